#!/usr/bin/env bash
# Evaluate the last checkpoint of a run on evaluation.questions.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/eval.sh CONFIG [--nodes N] [--with FILE]... [--out DIR] [--dry-run] [KEY=VALUE]...
Evaluate the last checkpoint of a run on evaluation.questions; without a checkpoint, the model itself.
  --out DIR     folder of the run (default: runs/NAME_OF_CONFIG)
  --nodes N, --with FILE, --dry-run: as in launch/train.sh
TEXT
}
# shellcheck source=launch/lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

read_arguments "$@"
mode=(--evaluate)
run_job
