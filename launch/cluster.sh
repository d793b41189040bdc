#!/usr/bin/env bash
# Train a cell under slime on several machines, over ssh.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/cluster.sh HOSTS CONFIG [--nodes N] [--with FILE]... [--out DIR] [--evaluate] [--dry-run] [KEY=VALUE]...
Train a cell under slime on several machines: start Ray on each, run the job on the first, and stop everything again.
Run the same command again to resume from the last checkpoint.
  HOSTS         a file with a host per line, or a dash and a list: -node1,node2; the first host is the head
  --evaluate    evaluate the last checkpoint instead
  --nodes N, --with FILE, --out DIR, --dry-run: as in launch/train.sh
All machines need this project, Python and the folder of the run at the same paths, and login without a password.
REMOTE_SHELL is the command that runs a command on a host (default: ssh -o BatchMode=yes -o ServerAliveInterval=15).
TEXT
}
# shellcheck source=launch/lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

[[ ${1:-} == -h || ${1:-} == --help ]] && usage && exit
[[ $# -ge 2 && $2 != -* ]] || misused "HOSTS and CONFIG have to come first"
hosts=$(hosts_of "$1") || exit

words=()
for word in "${@:2}"; do
  [[ $word == --evaluate ]] && mode=(--evaluate) || words+=("$word")
done
read_arguments "${words[@]}"
run_job "$hosts"
