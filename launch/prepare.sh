#!/usr/bin/env bash
# Prepare the inputs of a job: the model as a Megatron checkpoint, and questions.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/prepare.sh MODEL_DIR [--questions FILE...] [--answers NAME] [--dev SHARE] [--out DIR] [--gpus N] [--dry-run]
Convert a Hugging Face checkpoint into MODEL_DIR_torch_dist, and split questions into train.jsonl and dev.jsonl.
Finished steps are skipped; interrupted ones are repeated.
  MODEL_DIR       folder of the checkpoint; to get one: hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B
  --questions     files of JSON lines with question, answers and optionally id
  --answers NAME  field with the answers in these files: answers, golden_answers, answer or label
  --dev SHARE     share of the questions that are never trained on (default: 0.02)
  --out DIR       folder for train.jsonl and dev.jsonl (default: data, as in the configurations)
  --gpus N        GPUs that convert together (default: 1)
  --dry-run       print the commands and exit
SLIME_DIR and MEGATRON_DIR are the folders of slime and Megatron-LM; both are set in the image.
TEXT
}
# shellcheck source=launch/lib/job.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/job.sh"

model='' gpus=1 questions=() splitting=()
out=data
while [[ $# -gt 0 ]]; do
  case $1 in
    -h | --help) usage && exit 0 ;;
    --dry-run) dry_run=yes ;;
    --questions)
      while [[ $# -gt 1 && $2 != --* ]]; do
        questions+=("$(absolute "$2")")
        shift
      done
      [[ ${#questions[@]} -gt 0 ]] || misused "--questions has no value"
      ;;
    --answers | --dev)
      value=$(value_of "$1" "$@") || exit
      splitting+=("$1" "$value")
      shift
      ;;
    --out)
      value=$(value_of "$1" "$@") || exit
      out=$(absolute "$value")
      shift
      ;;
    --gpus)
      gpus=$(value_of "$1" "$@") || exit
      [[ $gpus =~ ^[1-9][0-9]*$ ]] || misused "--gpus $gpus is not a number of GPUs"
      shift
      ;;
    -*) misused "there is no option $1" ;;
    *)
      [[ -z $model ]] || misused "unexpected $1; files of questions follow --questions"
      model=$(absolute "${1%/}")
      ;;
  esac
  shift
done
[[ -n $model ]] || misused "MODEL_DIR is missing"
installed

run_or_show() {
  if [[ $dry_run == yes ]]; then
    printf '%q ' "$@" && echo
  else
    "$@"
  fi
}

# 1. The model, with slime's own tool. Its flags are those of a job up to --hf-checkpoint.
converted=${model}_torch_dist
if [[ -f $converted/latest_checkpointed_iteration.txt ]]; then
  echo "$script: $converted is there already" >&2
else
  [[ ! -e $converted ]] || stop "$converted exists and holds no checkpoint; move it away"
  [[ $dry_run == yes || -f $model/config.json ]] ||
    stop "$model holds no Hugging Face checkpoint; hf download Qwen/Qwen3-4B --local-dir $model gets one"
  for name in SLIME_DIR MEGATRON_DIR; do
    [[ $dry_run == yes || -d ${!name:-} ]] ||
      stop "$name is ${!name:-not set}, and has to name a folder; use the image of docker/slime.Dockerfile (docs/cluster.md)"
  done
  lines=$(memorywalker slime-args configs/reference.yaml "model='${model//\'/\'\'}'" rollout.questions=none --lines \
    2> >(grep -v '^Missing: ' >&2)) || exit
  mapfile -t flags < <(sed '/^--hf-checkpoint$/,$d' <<<"$lines")
  # One process, whatever a Slurm allocation around this says of its tasks: slime's tool would wait for the others.
  python=(env WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 python3)
  [[ $gpus -eq 1 ]] || python=(python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus")
  run_or_show rm -rf "$converted.part"
  # Renamed when complete, so that an interrupted conversion is repeated.
  run_or_show env "PYTHONPATH=${MEGATRON_DIR:-MEGATRON_DIR}:${SLIME_DIR:-SLIME_DIR}" CUDA_DEVICE_MAX_CONNECTIONS=1 \
    "${python[@]}" "${SLIME_DIR:-SLIME_DIR}/tools/convert_hf_to_torch_dist.py" "${flags[@]}" \
    --hf-checkpoint "$model" --save "$converted.part"
  run_or_show mv "$converted.part" "$converted"
fi

# 2. Questions: the side of a question depends on its text alone.
if [[ ${#questions[@]} -gt 0 ]]; then
  run_or_show python3 -m slime_plugin.cluster.prepare "${questions[@]}" --out "$out" "${splitting[@]}"
elif [[ ! -f $out/train.jsonl ]]; then
  echo "$script: $out/train.jsonl does not exist; make it with --questions" >&2
fi
