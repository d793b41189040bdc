#!/usr/bin/env bash
# Run a command in the slime image with what training needs: GPUs, network, locked memory, InfiniBand, folders, keys.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: docker/run.sh [--detach] [--dry-run] [COMMAND...]
Run COMMAND (default: bash) in the image of docker/build.sh slime. models, data, runs and configs are those of this folder.
  --detach    start a container that waits, on each of several hosts; then on the first
              docker exec -it memorywalker bash, and in it
              REMOTE_SHELL=launch/lib/ssh_container.sh launch/cluster.sh hosts.txt CONFIG --nodes N
  --dry-run   print the command line and exit
IMAGE (memorywalker:slime), CONTAINER (memorywalker) and DOCKER (docker) name the image, the container and the program.
Keys, proxies and what begins with NCCL_, HF_ or WANDB_ are passed on; PASS_ENV names further variables.
TEXT
}

detach=no dry_run=no
while [[ $# -gt 0 ]]; do
  case $1 in
    -h | --help) usage && exit 0 ;;
    --detach) detach=yes ;;
    --dry-run) dry_run=yes ;;
    -*)
      echo "run.sh: there is no option $1" >&2
      usage >&2
      exit 2
      ;;
    *) break ;;
  esac
  shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# NCCL registers memory with the network card and needs a large stack; Ray and NCCL share memory between processes.
options=(--gpus all --network=host --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 --init)
if [[ -e ${INFINIBAND:-/dev/infiniband} ]]; then
  options+=(--device "${INFINIBAND:-/dev/infiniband}" --cap-add IPC_LOCK)
fi
for folder in models data runs configs; do
  options+=(--volume "$PWD/$folder:/opt/memorywalker/$folder")
done
for name in $(compgen -e); do
  case $name in
    *_API_KEY | [Hh][Tt][Tt][Pp]_[Pp][Rr][Oo][Xx][Yy] | [Hh][Tt][Tt][Pp][Ss]_[Pp][Rr][Oo][Xx][Yy] | [Aa][Ll][Ll]_[Pp][Rr][Oo][Xx][Yy] | \
      [Nn][Oo]_[Pp][Rr][Oo][Xx][Yy] | NCCL_* | HF_* | WANDB_*) options+=(--env "$name") ;;
    *) [[ " ${PASS_ENV:-} " != *" $name "* ]] || options+=(--env "$name") ;;
  esac
done

if [[ $detach == yes ]]; then
  options+=(--detach --name "${CONTAINER:-memorywalker}")
  [[ ! -d $HOME/.ssh ]] || options+=(--volume "$HOME/.ssh:/root/.ssh:ro") # to reach the other hosts from here
  set -- sleep infinity
else
  [[ ! -t 0 ]] || options+=(--tty)
  options+=(--rm --interactive)
  [[ $# -gt 0 ]] || set -- bash
fi
command=("${DOCKER:-docker}" run "${options[@]}" "${IMAGE:-memorywalker:slime}" "$@")
if [[ $dry_run == yes ]]; then
  printf '%q ' "${command[@]}" && echo
  exit
fi
mkdir -p models data runs # or Docker creates them as root
exec "${command[@]}"
