#!/usr/bin/env bash
# Trains a cell under slime on this machine.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/train.sh CONFIG [--nodes N] [--with FILE]... [--out DIR] [--dry-run] [KEY=VALUE]...
Trains a cell under slime on this machine: starts Ray, runs the job, and stops what it started.
The same command again goes on from the last checkpoint.
  --nodes N     the sizes of configs/nodes/N.yaml; more than 1 needs launch/cluster.sh or launch/slurm.sbatch
  --with FILE   settings that replace those of CONFIG
  --out DIR     folder of the run (default: runs/NAME_OF_CONFIG)
  --dry-run     print the command line that would be run, and do nothing
TEXT
}
# shellcheck source=launch/lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

read_arguments "$@"
run_job
