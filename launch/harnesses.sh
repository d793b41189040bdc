#!/usr/bin/env bash
# Install the agents that the tap can serve, Claude Code and OpenCode, into .harnesses in the project root.
# An agent that is installed at its version is skipped.
set -euo pipefail

claude_version=2.1.325 # the versions that the drivers in slime_plugin/agents were tested with
opencode_version=1.18.33

usage() {
  cat <<'TEXT'
usage: launch/harnesses.sh [claude] [opencode]
Install these agents, or both, with npm into .harnesses; the programs are .harnesses/bin/claude and
.harnesses/bin/opencode, where configurations expect them. Needs node and npm, and about 350 MB for each.
TEXT
}

stop() {
  echo "harnesses: $1" >&2
  exit 1
}

wanted=()
while [[ $# -gt 0 ]]; do
  case $1 in
    -h | --help) usage && exit 0 ;;
    claude | opencode) wanted+=("$1") ;;
    *)
      echo "harnesses: there is no agent $1" >&2
      usage >&2
      exit 2
      ;;
  esac
  shift
done
[[ ${#wanted[@]} -gt 0 ]] || wanted=(claude opencode)

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Programs are in one package per platform. The main packages only copy them into place in a post-install script, which
# npm may be configured not to run: so the program is linked here.
case $(uname -m) in
  x86_64) machine=x64 ;;
  aarch64 | arm64) machine=arm64 ;;
  *) stop "there are no agents for $(uname -m); use x86_64 or aarch64" ;;
esac
[[ $(uname -s) == Linux ]] || stop "agents run on Linux, and this is $(uname -s)"
libc=''
if compgen -G '/lib/ld-musl-*' >/dev/null; then
  libc=-musl
fi
baseline='' # OpenCode has another program for processors without AVX2
if [[ $machine == x64 ]] && ! grep -qw avx2 /proc/cpuinfo; then
  baseline=-baseline
fi

install() { # NAME VERSION PACKAGE PROGRAM
  local folder=.harnesses/$1 program=.harnesses/$1/node_modules/$4
  if [[ ! -x $program || $(cat "$folder/version" 2>/dev/null) != "$2" ]]; then
    command -v node >/dev/null || stop "node is not installed; get version 20 or newer from your package manager"
    command -v npm >/dev/null || stop "npm is not installed; it comes with node"
    echo "harnesses: installing $3@$2"
    rm -rf "$folder"
    mkdir -p "$folder"
    npm install --prefix "$folder" --ignore-scripts --no-audit --no-fund --no-package-lock --loglevel error "$3@$2"
    [[ -f $program ]] || stop "$3@$2 has no $4 for this machine; look into $folder/node_modules"
    chmod +x "$program"
    echo "$2" >"$folder/version" # written last, so that an interrupted installation is repeated
  fi
  mkdir -p .harnesses/bin
  ln -sfn "../$1/node_modules/$4" ".harnesses/bin/$1"
  echo "harnesses: $1 $2 is $PWD/.harnesses/bin/$1"
}

for name in "${wanted[@]}"; do
  case $name in
    claude) install claude "$claude_version" @anthropic-ai/claude-code "@anthropic-ai/claude-code-linux-$machine$libc/claude" ;;
    opencode) install opencode "$opencode_version" opencode-ai "opencode-linux-$machine$baseline$libc/bin/opencode" ;;
  esac
done
