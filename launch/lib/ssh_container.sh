#!/usr/bin/env bash
# HOST COMMAND...: run COMMAND in the container of docker/run.sh --detach on HOST, as REMOTE_SHELL of launch/cluster.sh.
set -euo pipefail

host=$1
shift
# ssh joins words with blanks and has them split again on the other side; COMMAND is quoted for that already.
exec ssh -o BatchMode=yes -o ServerAliveInterval=15 "$host" docker exec -i "${CONTAINER:-memorywalker}" bash -c "$(printf %q "$*")"
