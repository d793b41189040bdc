#!/usr/bin/env bash
# Verify a cell on the machines that will train it, and the network between them.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/verify.sh [--hosts HOSTS] CONFIG [--nodes N] [--with FILE]... [--out DIR] [--quick] [--only A,B] [--device D] [KEY=VALUE]...
Run memorywalker verify on every machine at once, after a check of the network between their GPUs; exit with 1 if anything failed.
  --hosts HOSTS   a file with a host per line, or a dash and a list: -node1,node2; default: this machine
  --out DIR       folder of the results (default: runs/verify-CONFIG): verify.html, verify.json, and those of each host
  --nodes N, --with FILE: as in launch/train.sh; --quick, --only, --device: as in memorywalker verify, on each
In the image: docker/run.sh launch/verify.sh CONFIG; on several hosts as launch/cluster.sh, with docker/run.sh --detach.
REMOTE_SHELL is as in launch/cluster.sh.
TEXT
}
# shellcheck source=launch/lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

hosts='' words=() options=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --quick) options+=("$1") ;;
    --only | --device)
      value=$(value_of "$1" "$@") || exit
      options+=("$1" "$value")
      shift
      ;;
    --hosts)
      [[ $# -ge 2 ]] || misused "--hosts has no value"
      hosts=$(hosts_of "$2") || exit
      shift
      ;;
    --nodes | --with | --out)
      [[ $# -ge 2 ]] || misused "$1 has no value"
      words+=("$1" "$2")
      shift
      ;;
    *) words+=("$1") ;;
  esac
  shift
done
read_arguments "${words[@]}"
[[ $dry_run == no ]] || misused "there is no option --dry-run"
run=${out:-$PWD/runs/verify-$(basename "$config" .yaml)}
installed
resolve "$hosts"
[[ -n $hosts || $nodes -eq 1 ]] ||
  stop "the configuration asks for $nodes nodes (cluster.nodes); name them with --hosts, or verify one with cluster.nodes=1"
lock_run
start_nodes "$hosts" slime_plugin.cli.verify_nodes --run "$run" "${options[@]}" "$config" "${further[@]}" "${settings[@]}"
