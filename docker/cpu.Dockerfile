# The command line, the quick start and the tests on a CPU. Versions are those of docker/versions.env:
#   docker/build.sh cpu
#   docker run --rm -v "$PWD/runs:/runs" memorywalker:cpu record stats /runs
#   docker run --rm --shm-size=2g -v "$PWD/runs:/runs" --entrypoint launch/quickstart.sh memorywalker:cpu /runs/quickstart
#   docker run --rm --shm-size=2g --entrypoint launch/test.sh memorywalker:cpu
ARG PYTHON
FROM python:${PYTHON}-slim

WORKDIR /opt/memorywalker
COPY . .
# Index of the CPU builds of torch, which are much smaller; see pytorch.org.
ARG PIP_EXTRA_INDEX_URL
RUN launch/setup.sh && .venv/bin/memorywalker --help
ENTRYPOINT ["/opt/memorywalker/.venv/bin/memorywalker"]
