#!/usr/bin/env bash
# Evaluates the last checkpoint of a run on the questions of evaluation.questions.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/eval.sh CONFIG [--nodes N] [--with FILE]... [--out DIR] [--dry-run] [KEY=VALUE]...
Evaluates the last checkpoint of a run, or the model itself if there is none, on evaluation.questions.
  --out DIR     folder of the run (default: runs/NAME_OF_CONFIG)
  --nodes N, --with FILE, --dry-run: as launch/train.sh has them
TEXT
}
# shellcheck source=launch/lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

read_arguments "$@"
mode=(--evaluate)
run_job
