#!/usr/bin/env bash
# Regenerate requirements.lock and requirements.sglang: the newest versions that fit pyproject.toml, with their hashes.
# torch is left out: which build fits depends on the machine (requirements.torch has its version). sglang is in a file of
# its own, since its dependencies include a CUDA torch; it stays at its version, because
# slime_plugin/rollout/server/sglang_on_cpu.py relies on it: SGLANG=0.5.24 launch/lock.sh changes it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
sglang=${SGLANG:-$(sed -n 's/^sglang==\([^ ]*\).*/\1/p' requirements.sglang)}
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check pip-tools
CUSTOM_COMPILE_COMMAND=launch/lock.sh "$tools/bin/pip-compile" --quiet --upgrade --generate-hashes --strip-extras \
  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
  --extra dev --extra train --extra rollout --extra report --extra parquet --extra tap --extra engine-cpu \
  --constraint requirements.torch --unsafe-package torch --output-file requirements.lock pyproject.toml

for python in 3.11 3.12 3.13; do # one build for each
  "$tools/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --python-version "$python" --dest "$tools/wheels" "sglang==$sglang"
done
{
  sed '/^#/!d' requirements.sglang
  echo "sglang==$sglang \\"
  "$tools/bin/python" -m pip hash "$tools"/wheels/sglang-* | sed -n 's/^--hash/    --hash/p' | sort -u | sed '$!s/$/ \\/'
} >"$tools/sglang"
cp "$tools/sglang" requirements.sglang
echo "wrote requirements.lock and requirements.sglang; now run launch/test.sh"
