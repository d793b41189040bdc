#!/usr/bin/env bash
# Build an image with the versions of docker/versions.env.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: docker/build.sh cpu|slime [TAG]
  cpu     the command line, the quick start and the tests, without a GPU
  slime   slime with this package: training on GPUs
TAG is the name of the image (default: memorywalker:cpu or memorywalker:slime).
PIP_EXTRA_INDEX_URL is passed on if set; pytorch.org lists the index of the CPU builds of torch.
HARNESSES ("claude opencode") names the agents to install in the slime image, if set.
TEXT
}
[[ ${1:-} == -h || ${1:-} == --help ]] && usage && exit
if [[ $# -lt 1 || $# -gt 2 || (${1:-} != cpu && ${1:-} != slime) ]]; then
  usage >&2
  exit 2
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
versions=()
while IFS= read -r line; do
  [[ $line == [A-Z]*=* ]] && versions+=(--build-arg "$line")
done <docker/versions.env
[[ -n ${PIP_EXTRA_INDEX_URL:-} ]] && versions+=(--build-arg "PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL")
[[ -n ${HARNESSES:-} && $1 == slime ]] && versions+=(--build-arg "HARNESSES=$HARNESSES")
exec "${DOCKER:-docker}" build "${versions[@]}" -f "docker/$1.Dockerfile" -t "${2:-memorywalker:$1}" .
