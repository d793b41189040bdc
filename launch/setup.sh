#!/usr/bin/env bash
# Makes .venv in the project root with the pinned packages of requirements.lock and this package in it.
# Run it as often as you like: if nothing changed since the last time, it does nothing.
set -euo pipefail

if [[ $# -gt 0 ]]; then
  echo "usage: [PYTHON=python3.12] launch/setup.sh" >&2
  echo "Makes or updates .venv in the project root; PYTHON is the interpreter to make it with (3.11 or newer)." >&2
  [[ $1 == -h || $1 == --help ]] && exit 0
  exit 2
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "setup: $python is not Python 3.11 or newer; install one and name it: PYTHON=python3.12 launch/setup.sh" >&2
  exit 1
fi

# What the environment depends on. The stamp is written last, so an interrupted set-up is done again.
wanted=$({ "$python" --version; cat requirements.lock pyproject.toml; } | sha256sum | cut -d ' ' -f 1)
stamp=.venv/.memorywalker-setup
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && .venv/bin/python -c 'import slime_plugin' 2>/dev/null; then
  exit 0
fi

echo "setup: making .venv with $("$python" --version)"
rm -f "$stamp"
"$python" -m venv --clear .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
echo "$wanted" >"$stamp"
echo "setup: done; try .venv/bin/memorywalker --help"
