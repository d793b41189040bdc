#!/usr/bin/env bash
# Set up what is missing and run the whole test suite. Arguments go to pytest: launch/test.sh -k trie
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
exec .venv/bin/python -m pytest -n auto -p tests.rollout.workers "$@"
