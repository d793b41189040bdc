# shellcheck shell=bash
# Shared by the scripts that start a job. A script defines usage and sources this, which changes into the project's
# folder; $here is where it was typed. Files on the command line are relative to $here, those in settings to the project.
set -euo pipefail

here=$(pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -x .venv/bin/memorywalker ]] && PATH=$PWD/.venv/bin:$PATH # otherwise the installed one, as in the image
driver=${DRIVER:-slime_plugin.cluster.driver}                # checks the flags and runs slime's train.py
script=$(basename "$0")

config='' out='' run='' dry_run=no nodes='' gpus='' keys=''
further=() settings=() mode=()

stop() {
  echo "$script: $1" >&2
  exit 1
}

misused() {
  echo "$script: $1" >&2
  usage >&2
  exit 2
}

absolute() { # PATH as it was typed
  [[ $1 == /* ]] && echo "$1" || echo "$here/$1"
}

value_of() { # OPTION WORDS...: the word after it
  [[ $# -ge 3 && $3 != --* ]] || misused "$1 has no value"
  echo "$3"
}

hosts_of() { # HOSTS, a file or a dash and a list: their names, comma-separated
  local file names invalid duplicate
  if [[ $1 == -* ]]; then
    names=$(tr ',' '\n' <<<"${1#-}")
  else
    file=$(absolute "$1")
    [[ -f $file ]] || stop "$1: there is no such file; a list of hosts starts with a dash: -node1,node2"
    names=$(<"$file")
  fi
  names=$(sed 's/#.*//; s/^[[:space:]]*//; s/[[:space:]]*$//; /^$/d' <<<"$names")
  invalid=$(grep -nvE '^[A-Za-z0-9][A-Za-z0-9._@-]*$' <<<"$names" | head -n 1) || true
  [[ -z $invalid ]] || stop "$1: ${invalid#*:} is not a host name"
  duplicate=$(sort <<<"$names" | uniq -d | head -n 1)
  [[ -z $duplicate ]] || stop "$1: $duplicate is listed twice"
  paste -sd , <<<"$names"
}

installed() {
  command -v memorywalker >/dev/null || stop "memorywalker is not installed; launch/setup.sh does that"
}

# CONFIG [--nodes N] [--with FILE]... [--out DIR] [--dry-run] [KEY=VALUE]...
read_arguments() {
  local sizes value
  while [[ $# -gt 0 ]]; do
    case $1 in
      -h | --help) usage && exit 0 ;;
      --dry-run) dry_run=yes ;;
      --nodes)
        value=$(value_of "$1" "$@") || exit
        if [[ ! -f configs/nodes/$value.yaml ]]; then
          sizes=$(find configs -path 'configs/nodes/*.yaml' -exec basename {} .yaml \; | sort -n | paste -sd ' ')
          stop "--nodes $value: there is no configs/nodes/$value.yaml; available sizes: ${sizes:-none}"
        fi
        further+=(--with "configs/nodes/$value.yaml")
        shift
        ;;
      --with)
        value=$(value_of "$1" "$@") || exit
        further+=(--with "$(absolute "$value")")
        shift
        ;;
      --out)
        value=$(value_of "$1" "$@") || exit
        out=$(absolute "$value")
        shift
        ;;
      -*) misused "there is no option $1" ;;
      *=*) settings+=("$1") ;;
      *)
        [[ -z $config ]] || misused "$1 is not a setting; settings are key=value, such as trainer.tp=2"
        config=$(absolute "$1")
        ;;
    esac
    shift
  done
  [[ -n $config ]] || misused "CONFIG is missing"
  run=${out:-$PWD/runs/$(basename "$config" .yaml)}
}

# HOSTS, comma-separated, the head first; none: this machine
run_job() {
  installed
  local hosts=${1:-} lines flags=() words=("$config" "${further[@]}" "${settings[@]}" --out "$run" "${mode[@]}")
  resolve "$hosts"
  if [[ $dry_run == yes ]]; then
    lines=$(memorywalker slime-args "${words[@]}") || exit
    echo "python -m $driver $lines"
    exit
  fi
  [[ -n $hosts || $nodes -eq 1 ]] ||
    stop "the configuration asks for $nodes nodes (cluster.nodes), and this starts 1; use launch/cluster.sh or slurm.sbatch"
  lock_run
  lines=$(memorywalker slime-args "${words[@]}" --lines --write) || exit
  mapfile -t flags <<<"$lines"
  start_nodes "$hosts" "$driver" "${flags[@]}"
}

resolve() { # HOSTS: set $nodes, $gpus and $keys of the configuration, and check the number of hosts
  local shown count
  shown=$(memorywalker config show "$config" "${further[@]}" "${settings[@]}") || exit
  nodes=$(sed -n '/^cluster:/,/^[^ ]/s/^  nodes: //p' <<<"$shown")
  gpus=$(sed -n '/^cluster:/,/^[^ ]/s/^  gpus: //p' <<<"$shown")
  keys=$(sed -n '/: null$/d; s/^ *key_variable: //p' <<<"$shown" | sort -u | paste -sd ,)
  count=$(tr ',' '\n' <<<"$1" | wc -l)
  [[ -z $1 || $count -eq $nodes ]] ||
    stop "$count hosts for a configuration of $nodes nodes (cluster.nodes); name $nodes hosts, or give --nodes $count"
}

# Lock the folder before anything is written into it. The lock ends with this process, which exec keeps until the job is
# over.
lock_run() {
  mkdir -p "$run"
  local lock
  exec {lock}<>"$run/processes.lock"
  flock --nonblock "$lock" ||
    stop "$run: another job is using it (process $(<"$run/processes.lock")); wait for it to end, or give another --out"
  echo $$ >"$run/processes.lock"
}

start_nodes() { # HOSTS DRIVER FLAGS...: start Ray on all hosts, and the driver on the first
  exec python3 launch/lib/hosts.py --run "$run" --hosts "$1" --gpus "$gpus" --keys "$keys" "$2" -- "${@:3}"
}
