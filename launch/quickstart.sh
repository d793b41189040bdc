#!/usr/bin/env bash
# From nothing to a trained policy and the paper's effect, on one machine without a GPU, in a few minutes:
# a tiny Qwen3 answers questions with a search tool while a harness folds its context into summaries.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help || $# -gt 1 ]]; then
  echo "usage: launch/quickstart.sh [FOLDER]" >&2
  echo "Set up what is missing, train, compare the five methods on the same rollouts and write a report." >&2
  echo "FOLDER is that of the run (default: runs/quickstart); an existing run is resumed." >&2
  [[ $# -eq 1 ]] && exit 0
  exit 2
fi
here=$(pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=${1:-runs/quickstart}
[[ $# -eq 1 && $run != /* ]] && run=$here/$run # relative to where it was typed

# 1. Python packages: SGLang, megatron-core, Ray, this package. Minutes the first time, nothing after that.
launch/setup.sh
export PATH=$PWD/.venv/bin:$PATH

# 2. Check that everything is installed that the run needs.
memorywalker doctor configs/quickstart.yaml --out "$run"

# 3. GRPO with exact contexts (agentfold x mask4d): rollouts on a real SGLang server, updates on Megatron, through Ray.
resume=()
[[ -f $run/run.json ]] && resume=(--resume)
memorywalker train configs/quickstart.yaml --out "$run" "${resume[@]}"

# 4. The recorded rollouts under all five methods: how far is each trainer from the policy that sampled them?
memorywalker compare "$run"

# 5. Plots, and every rollout as a tree, on one page.
memorywalker report "$run"
