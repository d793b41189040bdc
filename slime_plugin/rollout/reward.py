"""Rewards, computed from the last reply.

>>> question = Question("q", "What is the capital of France?", ("Paris",))
>>> [exact_match(question.answers, extract_answer(reply), 0.2) for reply in ("<answer>paris.</answer>", "Paris")]
[1.0, 0.0]
"""

from __future__ import annotations

import inspect
import re
import string
import unicodedata
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from slime_plugin.config import reward as config
from slime_plugin.config.custom import load_custom
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.record.meta import LARGEST_REWARD
from slime_plugin.rollout.messages import Question

_PAIR = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)  # the innermost, if they are nested
_ARTICLES = {"a", "an", "the"}
_SYMBOLS = set(string.punctuation)


class RewardError(MemoryWalkerError):
    """A reward function did not return a finite number."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reward is computed from."""

    question: Question
    reply: str
    """Text of the last turn, without its thought."""
    answer: str | None
    """:func:`extract_answer` of the reply."""
    status: str
    """How the rollout ended."""


RewardFunction = Callable[[Outcome], float | Awaitable[float]]


def extract_answer(text: str) -> str | None:
    """Return the text between the last pair of tags, or None if there is no pair or it is empty.

    >>> extract_answer("<answer>Rome</answer> No: <answer> Paris\\n</answer>"), extract_answer("<answer> </answer>")
    ('Paris', None)
    """
    pairs = _PAIR.findall(text)
    return (pairs[-1].strip() or None) if pairs else None


def normalise(text: str) -> str:
    """Remove case, punctuation, articles and superfluous spaces, in any script.

    Keeps punctuation and articles if nothing else would be left, as of the band The The.

    >>> normalise(" The  O’Neill-Bros.,\\n«Émile» "), normalise("The The")
    ('oneillbros émile', 'the the')
    """
    lower = _canonical(_canonical(text).casefold())
    bare = _canonical("".join(character for character in lower if not _is_punctuation(character)))
    return " ".join(word for word in bare.split() if word not in _ARTICLES) or " ".join(lower.split())


def _canonical(text: str) -> str:
    """Map equivalent characters to one form."""
    return unicodedata.normalize("NFKC", text)


def _is_punctuation(character: str) -> bool:
    """Of any script, with the ASCII symbols that SQuAD counts and invisible characters."""
    category = unicodedata.category(character)
    return category[0] == "P" or category == "Cf" or character in _SYMBOLS


def exact_match(answers: Sequence[str], answer: str | None, format: float) -> float:
    """1 for one of the answers, ``format`` for any other, 0 for none."""
    if answer is None:
        return 0.0
    return 1.0 if normalise(answer) in {normalise(right) for right in answers} else format


def build_reward(settings: config.Reward) -> Callable[[Outcome], Awaitable[float]]:
    """Return the reward function. It returns a finite number or raises :class:`RewardError`."""
    judge: RewardFunction
    if isinstance(settings, config.ExactMatch):
        bonus = settings.format
        judge = lambda outcome: exact_match(outcome.question.answers, outcome.answer, bonus)  # noqa: E731
    else:
        judge = load_custom(settings, "reward")
        if not callable(judge):
            raise ConfigError(f"reward: {settings.type} is {type(judge).__name__}, which cannot be called")

    async def reward(outcome: Outcome) -> float:
        value: object = judge(outcome)
        if inspect.isawaitable(value):
            value = await value
        if not isinstance(value, Real) or not abs(float(value)) <= LARGEST_REWARD:  # NaN fails this too
            raise RewardError(
                f"question {outcome.question.id}: {settings.type} returned {value!r:.60} as reward; "
                f"it must be a finite number within {LARGEST_REWARD:g}"
            )
        return float(value)

    return reward
