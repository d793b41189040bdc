"""Rewards: the values of the paper, answers in any writing, and functions of one's own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slime_plugin.config.reward import CustomReward, ExactMatch
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.reward import Outcome, RewardError, build_reward, extract_answer, normalise


def outcome(reply: str, *answers: str) -> Outcome:
    return Outcome(Question("17", "?", answers or ("Paris",)), reply, extract_answer(reply), "completed")


def reward(settings: ExactMatch | CustomReward, reply: str, *answers: str) -> float:
    return asyncio.run(_await(settings, outcome(reply, *answers)))


async def _await(settings: ExactMatch | CustomReward, judged: Outcome) -> float:
    return await build_reward(settings)(judged)


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("<answer>Paris</answer>", 1.0),
        ("It is <answer>\n the  PARIS! </answer>.", 1.0),
        ("<answer>Rome</answer> <answer>Paris</answer>", 1.0),
        ("<answer>Paris</answer> <answer>Rome</answer>", 0.2),
        ("<answer>Paris, France</answer>", 0.2),
        ("Paris", 0.0),
        ("<answer>Paris", 0.0),
        ("Paris</answer>", 0.0),
        ("</answer>Paris<answer>", 0.0),
        ("<answer> </answer>", 0.0),
        ("<answer>Paris</answer><answer></answer>", 0.0),
        ("<Answer>Paris</Answer>", 0.0),
        ("<answer>Rome<answer>Paris</answer>", 1.0),
        ("<answer>Paris</answer></answer>", 1.0),
        ("", 0.0),
    ],
)
def test_the_values_of_the_paper(reply: str, value: float) -> None:
    assert reward(ExactMatch(), reply) == value


def test_any_of_several_answers_is_right() -> None:
    answers = ("New York City", "NYC", "the Big Apple")
    assert [reward(ExactMatch(), f"<answer>{a}</answer>", *answers) for a in ("big apple", "nyc.", "York")] == [
        1,
        1,
        0.2,
    ]
    assert reward(ExactMatch(format=0.5), "<answer>York</answer>", *answers) == 0.5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The Beatles", "beatles"),
        ("an  apple\ta day", "apple day"),
        ("U.S.A.", "usa"),
        ("“Émile” \u2013 Zola", '"E\u0301mile" Zola'),
        ("straße", "STRASSE"),
        ("\uff34\uff4f\uff4b\uff59\uff4f", "tokyo"),
        ("東京。", "東京"),
        ("$1,000", "1000"),
        ("zero\u200bwidth", "zerowidth"),
        ("The The", "the the"),
        ("A", "a"),
        ("?", "?"),
    ],
)
def test_what_is_the_same(one: str, other: str) -> None:
    assert normalise(one) == normalise(other) != ""


@pytest.mark.parametrize(
    ("one", "other"),
    [("theatre", "atre"), ("€5", "5"), ("1.5", "1 5"), ("a", "the"), ("!", "?"), ("", "a"), ("résumé", "resume")],
)
def test_what_is_not_the_same(one: str, other: str) -> None:
    assert normalise(one) != normalise(other)


@given(st.text())
@example("e-\u0301")
@example("a\u0323-\u0301")
@example("ŉ İ ﬃ ϓ̈ ͅ")
def test_to_normalise_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@given(st.text(), st.text(alphabet="ab </>answer\n"), st.text())
def test_the_last_pair_is_taken(before: str, answer: str, after: str) -> None:
    """Against a reader that walks backwards."""
    text = f"{before}<answer>{answer}</answer>{after}"
    expected = None
    end = len(text)
    while (end := text.rfind("</answer>", 0, end)) >= 0:
        start = text.rfind("<answer>", 0, end)
        if start >= 0 and "</answer>" not in text[start:end]:
            expected = text[start + 8 : end].strip() or None
            break
    assert extract_answer(text) == expected


# Functions of one's own

MODULE = """
import asyncio
from slime_plugin.config.frozen import Frozen

def length(outcome):
    return len(outcome.reply)

async def later(outcome):
    await asyncio.sleep(0)
    return 0.5 if outcome.status == "completed" else 0

class Scaled:
    class Settings(Frozen):
        scale: float = 1.0
    def __init__(self, settings):
        self.scale = settings.scale
    def __call__(self, outcome):
        return self.scale * (outcome.answer in outcome.question.answers)

def fails(outcome):
    raise KeyError("in my function")

RESULT = None
def result(outcome):
    return RESULT

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


def custom(mine: str, name: str, **settings: Any) -> CustomReward:
    return CustomReward(type=f"{mine}:{name}", **settings)


def test_functions_and_classes_of_ones_own(mine: str) -> None:
    assert reward(custom(mine, "length"), "four") == 4.0
    assert reward(custom(mine, "later"), "four") == 0.5
    assert reward(custom(mine, "Scaled", scale=3), "<answer>Paris</answer>") == 3.0
    assert reward(custom(mine, "Scaled"), "<answer>Rome</answer>") == 0.0


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), -2])
def test_numbers_of_any_kind_are_rewards(value: Any, mine: str) -> None:
    build_reward(custom(mine, "result"))
    vars(sys.modules[mine])["RESULT"] = value
    assert reward(custom(mine, "result"), "x") == value


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), [1.0], 1j])
def test_a_result_that_is_no_number(value: Any, mine: str) -> None:
    build_reward(custom(mine, "result"))
    vars(sys.modules[mine])["RESULT"] = value
    with pytest.raises(RewardError, match=r"question 17: .*:result returned .* it must be a finite number"):
        reward(custom(mine, "result"), "x")


def test_an_error_of_the_user_is_his_to_see(mine: str) -> None:
    with pytest.raises(KeyError, match="in my function"):
        reward(custom(mine, "fails"), "x")


def test_a_reward_that_is_no_function(mine: str) -> None:
    with pytest.raises(ConfigError, match=r"reward: .*:number is int, which cannot be called"):
        build_reward(custom(mine, "number"))
    with pytest.raises(ConfigError, match=r"reward: .*:length takes no settings, but a, b is given"):
        build_reward(custom(mine, "length", a=1, b=2))
    with pytest.raises(ConfigError, match=r"reward: scal: unknown key; use 'scale'"):
        build_reward(custom(mine, "Scaled", scal=2))
