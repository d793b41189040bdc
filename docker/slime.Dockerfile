# slime's image with this package. Versions are those of docker/versions.env:
#   docker/build.sh slime
#   docker/run.sh
ARG SLIME_IMAGE
ARG SLIME_IMAGE_TAG
FROM ${SLIME_IMAGE}:${SLIME_IMAGE_TAG}

# Their folders in slime's image, for the launch scripts and slime itself.
ENV SLIME_DIR=/root/slime MEGATRON_DIR=/root/Megatron-LM
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# slime at the commit that the hooks were written for. It is an editable installation.
ARG SLIME_COMMIT
RUN git -C "$SLIME_DIR" fetch --quiet origin "$SLIME_COMMIT" \
 && git -C "$SLIME_DIR" checkout --quiet --force "$SLIME_COMMIT"

# Everything else stays as in the image. Megatron is patched there, so only its commit can be compared.
ARG MEGATRON_COMMIT
ARG SLIME_SGLANG
ARG SLIME_TORCH
ARG SLIME_NUMPY
ARG SLIME_TRANSFORMERS
COPY docker/check_image.py /tmp/check_image.py
RUN test "$(git -C "$MEGATRON_DIR" rev-parse HEAD)" = "$MEGATRON_COMMIT" \
 && python3 /tmp/check_image.py sglang="$SLIME_SGLANG" torch="$SLIME_TORCH" numpy="$SLIME_NUMPY" \
      transformers="$SLIME_TRANSFORMERS"

# Packages that slime's image lacks, without their dependencies, so that slime's versions stay unchanged.
ARG BM25S
ARG TENSORBOARDX
RUN pip install --no-cache-dir --no-deps "bm25s==$BM25S" "tensorboardx==$TENSORBOARDX"

WORKDIR /opt/memorywalker
COPY . .
RUN pip install --no-cache-dir --no-deps -e . \
 && memorywalker --help \
 && python3 -c "import slime, bm25s, tensorboardX, slime_plugin.hooks.rollout" \
 && python3 docker/check_image.py sglang="$SLIME_SGLANG" torch="$SLIME_TORCH" numpy="$SLIME_NUMPY" \
      transformers="$SLIME_TRANSFORMERS" --extra rollout

# The agents of the black-box cells, on request: HARNESSES="claude opencode" docker/build.sh slime
ARG HARNESSES
RUN if [[ -n "$HARNESSES" ]]; then \
      python3 docker/check_image.py --extra tap \
      && apt-get update && apt-get install --yes --no-install-recommends nodejs npm && rm -rf /var/lib/apt/lists/* \
      && read -ra names <<<"$HARNESSES" && launch/harnesses.sh "${names[@]}"; \
    fi
CMD ["bash"]
