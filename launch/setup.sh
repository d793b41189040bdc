#!/usr/bin/env bash
# Create .venv in the project root with the pinned packages of requirements.lock, SGLang, and this package.
# Does nothing if nothing has changed since the last time.
set -euo pipefail

if [[ $# -gt 0 ]]; then
  echo "usage: [PYTHON=python3.12] launch/setup.sh" >&2
  echo "Create or update .venv in the project root; PYTHON is the interpreter to create it with (3.11 or newer)." >&2
  [[ $1 == -h || $1 == --help ]] && exit 0
  exit 2
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "setup: $python is not Python 3.11 or newer; install one and name it: PYTHON=python3.12 launch/setup.sh" >&2
  exit 1
fi

# An environment belongs to one interpreter and one folder, and cannot be copied; a change of either recreates it.
# Changed requirements are installed into it, so that other packages installed there stay.
made_for="$("$python" --version) $PWD"
holds=$(cat requirements.lock requirements.torch requirements.sglang pyproject.toml | sha256sum | cut -d ' ' -f 1)
stamp=.venv/.memorywalker-setup # written last: an interrupted set-up is done again
if [[ -f $stamp && $(<"$stamp") == "$made_for $holds" ]]; then
  exit 0
fi

if [[ ! -f $stamp || $(<"$stamp") != "$made_for "* ]]; then
  echo "setup: creating .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
fi
echo "setup: installing requirements.torch, requirements.lock and requirements.sglang"
rm -f "$stamp"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.torch
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
  -r requirements.lock -r requirements.sglang
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
echo "$made_for $holds" >"$stamp"
echo "setup: done; try .venv/bin/memorywalker --help"
