#!/usr/bin/env bash
# Train on the recorded rollouts of another run, without engines: another method on the same contexts.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/replay.sh CONFIG RECORDED_RUN [--nodes N] [--with FILE]... [--out DIR] [--dry-run] [KEY=VALUE]...
Train a cell on the recorded rollouts of another run. No engine is started.
  RECORDED_RUN  folder of that run, with its rollout-*.records
  --out DIR     folder of the new run (default: runs/NAME_OF_CONFIG-replay)
  --nodes N, --with FILE, --dry-run: as in launch/train.sh
TEXT
}
# shellcheck source=launch/lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

[[ ${1:-} == -h || ${1:-} == --help ]] && usage && exit
[[ $# -ge 2 && $1 != -* && $2 != -* && $2 != *=* ]] || misused "CONFIG and RECORDED_RUN have to come first"
recorded=$(absolute "$2")
read_arguments "$1" "${@:3}"
run=${out:-$run-replay}
settings+=("cluster.replay='${recorded//\'/\'\'}'") # quoted as YAML
run_job
