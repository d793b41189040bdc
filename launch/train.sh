#!/usr/bin/env bash
# Train a cell under slime on this machine.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/train.sh CONFIG [--nodes N] [--with FILE]... [--out DIR] [--dry-run] [KEY=VALUE]...
Train a cell under slime on this machine: start Ray, run the job, and stop what was started.
Run the same command again to resume from the last checkpoint.
  --nodes N     add configs/nodes/N.yaml; more than 1 needs launch/cluster.sh or launch/slurm.sbatch
  --with FILE   settings that replace those of CONFIG
  --out DIR     folder of the run (default: runs/NAME_OF_CONFIG)
  --dry-run     print slime's command line and exit
TEXT
}
# shellcheck source=launch/lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

read_arguments "$@"
run_job
