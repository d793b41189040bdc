#!/usr/bin/env bash
# Installs the agents that the tap can serve, Claude Code and OpenCode, into .harnesses in the project root.
# Run it as often as you like: what is there at its version is left alone.
set -euo pipefail

claude_version=2.1.325 # the versions that the drivers in slime_plugin/tap/drivers were tried with
opencode_version=1.18.33

usage() {
  cat <<'TEXT'
usage: launch/harnesses.sh [claude] [opencode]
Installs these agents, or both, with npm into .harnesses; the programs are then .harnesses/bin/claude and
.harnesses/bin/opencode, where a configuration looks for them. Needs node and npm, and about 350 MB for each.
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

# Programs are in packages of their own, one per platform. The packages that people know only copy them into place in
# a script after installing, and npm may be set not to run such scripts: so the right one is linked here.
case $(uname -m) in
  x86_64) machine=x64 ;;
  aarch64 | arm64) machine=arm64 ;;
  *) stop "there are no agents for $(uname -m); use x86_64 or aarch64" ;;
esac
[[ $(uname -s) == Linux ]] || stop "this is for Linux, and here is $(uname -s)"
libc=''
if compgen -G '/lib/ld-musl-*' >/dev/null; then
  libc=-musl
fi
older='' # OpenCode has another program for processors without AVX2
if [[ $machine == x64 ]] && ! grep -qw avx2 /proc/cpuinfo; then
  older=-baseline
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
    echo "$2" >"$folder/version" # written last: what was interrupted is done again
  fi
  mkdir -p .harnesses/bin
  ln -sfn "../$1/node_modules/$4" ".harnesses/bin/$1"
  echo "harnesses: $1 $2 is $PWD/.harnesses/bin/$1"
}

for name in "${wanted[@]}"; do
  case $name in
    claude) install claude "$claude_version" @anthropic-ai/claude-code "@anthropic-ai/claude-code-linux-$machine$libc/claude" ;;
    opencode) install opencode "$opencode_version" opencode-ai "opencode-linux-$machine$older$libc/bin/opencode" ;;
  esac
done
