#!/usr/bin/env bash
# Run tests/slime against the sources of slime and Megatron-LM, on a CPU. Arguments go to pytest.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: SLIME_SRC=DIR MEGATRON_SRC=DIR launch/test_slime.sh [PYTEST ARGUMENTS]
Run the hooks through slime's own parser, rollout loop, batches, losses and schedules. Neither source is part of this project:
  SLIME_SRC      slime, at the commit that docker/versions.env names
  MEGATRON_SRC   Megatron-LM, at the commit named there, with slime's docker/patch/latest/megatron*.patch applied
Creates .venv-slime on top of .venv, with requirements.slime.
TEXT
}
[[ ${1:-} == -h || ${1:-} == --help ]] && usage && exit
for name in SLIME_SRC MEGATRON_SRC; do
  if [[ ! -d ${!name:-} ]]; then
    echo "test_slime.sh: $name is ${!name:-not set}, and has to name a folder" >&2
    usage >&2
    exit 2
  fi
  export "$name=$(cd "${!name}" && pwd)"
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh
stamp=.venv-slime/.memorywalker-setup
holds=$(cat .venv/.memorywalker-setup requirements.slime | sha256sum)
if [[ ! -f $stamp || $(<"$stamp") != "$holds" ]]; then
  echo "test_slime.sh: creating .venv-slime" >&2
  .venv/bin/python -m venv --clear .venv-slime
  # Packages of .venv count as installed, so that only missing ones are added.
  .venv/bin/python -c 'import site; print(*site.getsitepackages(), sep="\n")' \
    >"$(.venv-slime/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
  .venv-slime/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.slime 2>&1 |
    grep -v -e 'dependency resolver' -e ' requires ' >&2 || true # SGLang on a CPU is installed without its dependencies
  .venv-slime/bin/python -c 'import pandas, pyarrow, wandb, omegaconf' # or the installation failed
  echo "$holds" >"$stamp"
fi
exec .venv-slime/bin/python -m pytest -p no:cacheprovider "${@:-tests/slime}"
