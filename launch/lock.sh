#!/usr/bin/env bash
# Writes requirements.lock and requirements.sglang anew: the newest versions that fit pyproject.toml, with their hashes.
# torch is left out: which build of it fits depends on the machine (requirements.torch has its version). sglang is in a
# file of its own, since asking it what it needs would bring a CUDA torch; it stays at the version that is there, because
# slime_plugin/bridge/server/cpu.py relies on it: SGLANG=0.5.24 launch/lock.sh takes another one.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
sglang=${SGLANG:-$(sed -n 's/^sglang==\([^ ]*\).*/\1/p' requirements.sglang)}
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check pip-tools
CUSTOM_COMPILE_COMMAND=launch/lock.sh "$tools/bin/pip-compile" --quiet --upgrade --generate-hashes --strip-extras \
  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
  --extra dev --extra train --extra rollout --extra tap --extra engine-cpu \
  --constraint requirements.torch --unsafe-package torch --output-file requirements.lock pyproject.toml

for python in 3.11 3.12 3.13; do # there is a build for each
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
