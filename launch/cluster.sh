#!/usr/bin/env bash
# Trains a cell under slime on several machines that are reached by ssh.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/cluster.sh HOSTS CONFIG [--nodes N] [--with FILE]... [--out DIR] [--evaluate] [--dry-run] [KEY=VALUE]...
Trains a cell under slime on several machines: a Ray node on each, the job on the first, and all of it stopped again.
The same command again goes on from the last checkpoint.
  HOSTS         a file with a host per line, or the hosts behind a dash: -node1,node2; the first one is the head
  --evaluate    evaluate the last checkpoint instead
  --nodes N, --with FILE, --out DIR, --dry-run: as launch/train.sh has them
Machines have this project, Python and the folder of the run at the same paths, and can be reached without a password.
REMOTE_SHELL is the command that reaches them (default: ssh -o BatchMode=yes -o ServerAliveInterval=15).
TEXT
}
# shellcheck source=launch/lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

[[ ${1:-} == -h || ${1:-} == --help ]] && usage && exit
[[ $# -ge 2 && $2 != -* ]] || misused "HOSTS and CONFIG come first"
if [[ $1 == -* ]]; then
  hosts=$(tr ',' '\n' <<<"${1#-}")
else
  file=$(absolute "$1")
  [[ -f $file ]] || stop "$1: there is no such file; hosts themselves stand behind a dash: -node1,node2"
  hosts=$(<"$file")
fi
hosts=$(sed 's/#.*//; s/^[[:space:]]*//; s/[[:space:]]*$//; /^$/d' <<<"$hosts")
wrong=$(grep -nvE '^[A-Za-z0-9][A-Za-z0-9._@-]*$' <<<"$hosts" | head -n 1) || true
[[ -z $wrong ]] || stop "$1: ${wrong#*:} is no name of a host"
twice=$(sort <<<"$hosts" | uniq -d | head -n 1)
[[ -z $twice ]] || stop "$1: $twice is named twice"

words=()
for word in "${@:2}"; do
  [[ $word == --evaluate ]] && mode=(--evaluate) || words+=("$word")
done
read_arguments "${words[@]}"
run_job "$(paste -sd , <<<"$hosts")"
