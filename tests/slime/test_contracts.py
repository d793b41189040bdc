"""slime's own contract tests for plugins, run on our hooks; and our description of slime, held against its source."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime_plugin.cluster.arguments import slime_flags
from slime_plugin.config.overrides import load_cell
from slime_plugin.slime.contract import MEGATRON_COMMIT, SLIME_COMMIT, contract_problems
from tests.cluster.parsed import DEFAULTS
from tests.conftest import ROOT
from tests.slime.sources import needs_slime, slime_imports, versions

pytestmark = needs_slime

OURS = {
    "CUSTOM_ROLLOUT_LOG_FUNCTION_PATH": "tests.slime.contract_hooks.rollout_log",
    "CUSTOM_EVAL_ROLLOUT_LOG_FUNCTION_PATH": "tests.slime.contract_hooks.evaluation_log",
    "CUSTOM_REWARD_POST_PROCESS_PATH": "tests.slime.contract_hooks.reward_post_process",
    "CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH": "tests.slime.contract_hooks.convert_samples",
    "CUSTOM_RM_PATH": "tests.slime.contract_hooks.reward",
}


@pytest.mark.parametrize("name", ["runtime_hook", "path_loading"])
def test_slimes_contract_tests_pass_with_our_hooks(name: str) -> None:
    source = Path(os.environ["SLIME_SRC"]).resolve()
    environment = {
        **os.environ,
        **{f"SLIME_CONTRACT_{key}": path for key, path in OURS.items()},
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(source)]),
    }
    file = f"tests/plugin_contracts/test_plugin_{name}_contracts.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", file]
    result = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert int(re.findall(r"(\d+) passed", result.stdout)[0]) >= 9


def test_the_recorded_description_is_that_of_the_source() -> None:
    sources = [Path(os.environ[name]) for name in ("SLIME_SRC", "MEGATRON_SRC")]
    assert list(contract_problems(sources[0] / "slime", sources[1] / "megatron" / "core")) == []
    assert (versions()["slime"], versions()["Megatron-LM"]) == (SLIME_COMMIT, MEGATRON_COMMIT)


def test_the_recorded_defaults_are_those_of_the_parser(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests without slime take for its defaults, of all that no flag of ours sets."""
    slime_imports()
    from slime_plugin.cluster.driver import parsed

    monkeypatch.chdir(published)
    flags = slime_flags(load_cell(ROOT / "configs" / "cells" / "search_r1.yaml"), published / "runs" / "x")
    needed = ("--hf-checkpoint", "--ref-load", "--num-rollout", "--rollout-batch-size", "--global-batch-size")
    shape = flags[: next(i for i, flag in enumerate(flags) if flag.name == "--make-vocab-size-divisible-by")]
    kept = [flag for flag in flags if flag in shape or flag.name in needed]
    args = parsed([word for flag in kept for word in flag.words])
    ours = {key: value for key, value in DEFAULTS.items() if key != "loss_type"}
    assert {key: getattr(args, key) for key in ours} == ours
    assert args.loss_type == DEFAULTS["loss_type"]
