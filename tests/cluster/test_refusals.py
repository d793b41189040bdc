"""What slime accepts and would train wrongly stops a job before it begins, with the reason and the flag to change."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest

from slime_plugin.cluster.flags import check_command_line, known_flags
from slime_plugin.config.overrides import load_cell
from slime_plugin.errors import ConfigError
from slime_plugin.slime.hook_names import ROLLOUT_HOOKS, TRAINING_HOOKS
from slime_plugin.slime.refusals import FORBIDDEN_FLAGS, REQUIRED_HOOKS, args_problems, check_args
from tests.cluster.parsed import parsed
from tests.conftest import ROOT

CELL = ROOT / "configs" / "cells" / "tc_rag-mask4d.yaml"


def args(*settings: str, more: tuple[str, ...] = ()) -> Namespace:
    return parsed(load_cell(CELL, settings), Path("runs/x"), more)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("method=sdcc",),
        ("trainer.cp=2",),
        ("objective.kl=0",),
        ("std=false",),
        ("trainer.pp=4", "trainer.vpp=3", "trainer.tp=2"),
    ],
    ids=str,
)
def test_what_slime_args_writes_is_right(settings: tuple[str, ...]) -> None:
    assert list(args_problems(args(*settings))) == []


def test_every_flag_that_is_refused_exists() -> None:
    assert {f"--{flag}" for flag in (*FORBIDDEN_FLAGS, *REQUIRED_HOOKS)} <= known_flags().keys()
    assert REQUIRED_HOOKS.keys() <= {**ROLLOUT_HOOKS, **TRAINING_HOOKS}.keys()


@pytest.mark.parametrize("flag", FORBIDDEN_FLAGS)
def test_a_flag_with_another_value_is_refused(flag: str) -> None:
    name, right, why = FORBIDDEN_FLAGS[flag]
    wrong = args()
    setattr(wrong, name, not right if isinstance(right, bool) else "other" if right is None else 0.3)
    (problem,) = args_problems(wrong)
    assert problem.startswith(f"--{flag}: ")
    assert why in problem


@pytest.mark.parametrize("flag", FORBIDDEN_FLAGS)
def test_it_is_refused_before_slime_has_parsed_it(flag: str) -> None:
    _, right, why = FORBIDDEN_FLAGS[flag]
    values = [] if known_flags()[f"--{flag}"] == "0" else ["0.3"]
    with pytest.raises(ConfigError, match=re.escape(f"command line: --{flag}: it cannot be used here: {why}")):
        check_command_line([f"--{flag}", *values])
    given: bool | list[str] = values or True
    with pytest.raises(ConfigError, match=f"cluster.flags.{flag}: "):
        args(f"cluster.flags={json.dumps({flag: given})}")
    if values and isinstance(right, float | int):
        check_command_line([f"--{flag}", str(right)])


@pytest.mark.parametrize("flag", REQUIRED_HOOKS)
def test_a_hook_that_is_not_ours_is_refused(flag: str) -> None:
    for value in (None, "somebody.else"):
        wrong = args()
        setattr(wrong, flag.replace("-", "_"), value)
        (problem,) = args_problems(wrong)
        assert problem.startswith(f"--{flag}: is {value or 'not set'}")
        assert REQUIRED_HOOKS[flag] in problem


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--loss-type", "policy_loss"), "--loss-type: is policy_loss.*set custom_loss"),
        (("--advantage-estimator", "gspo"), "--advantage-estimator: gspo"),
        (("--make-vocab-size-divisible-by", "128"), "152064 columns for 151936 tokens"),
        (("--actor-num-nodes", "3"), "8 rollouts per step cannot be divided evenly among 6 replicas"),
        (("--num-rollout", "9"), "is 9, and the cell says trainer.iterations 200"),
        (("--n-samples-per-prompt", "8"), "--n-samples-per-prompt: is 8, and the cell says 16"),
        (("--entropy-coef", "0.5"), "--entropy-coef: is 0.5, and the cell says 0"),
        (("--tensor-model-parallel-size", "2"), "--tensor-model-parallel-size: is 2, and the cell says 4"),
    ],
    ids=str,
)
def test_flags_that_say_something_else_than_the_cell(more: tuple[str, ...], message: str) -> None:
    problems = list(args_problems(args(more=more)))
    assert any(re.search(message, problem) for problem in problems), problems


def test_two_interleaved_stages() -> None:
    wrong = args()
    wrong.virtual_pipeline_model_parallel_size, wrong.pipeline_model_parallel_size = 2, 2
    problems = "\n".join(args_problems(wrong))
    assert "with 2 stages Megatron mixes up the lengths" in problems
    with pytest.raises(ConfigError, match="vpp: 2 virtual stages on pp 2"):
        args("trainer.pp=2", "trainer.vpp=2")


def test_all_reasons_are_given_at_once_and_evaluation_is_let_through() -> None:
    with pytest.raises(ConfigError, match=r"(?s)--loss-type.*--use-tis.*--spec"):
        check_args(Namespace(**{**vars(args()), "use_tis": True, "spec": ["a"], "loss_type": "policy_loss"}))
    check_args(Namespace(**{**vars(args()), "num_rollout": 0}))
    with pytest.raises(ConfigError, match="no 'memorywalker'"):
        check_args(Namespace())
