#!/usr/bin/env bash
# Writes requirements.lock anew from pyproject.toml: the newest versions that fit, with their hashes. torch is left out:
# which build of it fits depends on the machine (requirements.torch has its version).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check pip-tools
CUSTOM_COMPILE_COMMAND=launch/lock.sh "$tools/bin/pip-compile" --quiet --upgrade --generate-hashes --strip-extras \
  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --extra dev --extra train \
  --constraint requirements.torch --unsafe-package torch --output-file requirements.lock pyproject.toml
echo "wrote requirements.lock; now run launch/test.sh"
