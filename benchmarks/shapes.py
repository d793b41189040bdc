"""Four rollouts of an agent, as four kinds of editor leave them behind.

A turn is a message of the policy and a tool result four times as long; the twelfth message is the answer. The prompt
holds the instructions and the tools. At scale 1 these have 125, 500 and 1,100 tokens, so that the prompt and three or
four turns exceed 3k; messages and results vary by a quarter either way.

===========  =  ==========================================================================================
shape        K  what the editor does
===========  =  ==========================================================================================
append-only  0  nothing
offload      2  late in the rollout, takes out a small result that has just been read
pop oldest   4  at even intervals, takes out the oldest result
fold at 3k   3  when the context exceeds 3k tokens, keeps the prompt and a summary that the policy has written
===========  =  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slime_plugin.record import Edit, Meta, Record, Span
from slime_plugin.record.arrays import View

TURNS = 12
PROMPT, MESSAGE, RESULT = 1_100, 125, 500
SUMMARY = 2 * MESSAGE
SMALL_RESULT = RESULT // 4
FOLD_ABOVE = 3_000


class Rollout:
    """A rollout that is being written. What is said or heard joins the live context; an edit closes a layer."""

    def __init__(self, scale: float, seed: int) -> None:
        self.live: list[Span] = []
        self._scale = scale
        self._rng = np.random.default_rng(seed)
        self._generated: list[np.ndarray] = []
        self._views: list[View] = []
        self._edits: list[Edit] = []
        self._add(round(PROMPT * scale), sampled=False)

    @property
    def context(self) -> float:
        """Tokens of the live context, at scale 1."""
        return sum(stop - start for start, stop in self.live) / self._scale

    def say(self, tokens: int = MESSAGE) -> Span:
        """The policy samples about so many tokens."""
        return self._add(self._vary(tokens), sampled=True)

    def hear(self, tokens: int = RESULT) -> Span:
        """A tool returns about so many tokens."""
        return self._add(self._vary(tokens), sampled=False)

    def edit(self, kind: str, live: list[Span]) -> None:
        """From here on the policy sees ``live``."""
        self._views.append(tuple(self.live))
        self._edits.append(Edit(kind, "policy"))
        self.live = live

    def record(self, name: str, vocabulary: int) -> Record:
        """Random words, logged with the log-probabilities that an untrained model gives them."""
        generated = np.concatenate(self._generated)
        logprobs = self._rng.normal(-np.log(vocabulary), 0.1, generated.size)
        return Record(
            tokens=self._rng.integers(0, vocabulary, generated.size),
            generated=generated,
            logprobs=np.where(generated, logprobs, np.nan),
            views=[*self._views, self.live],
            edits=self._edits,
            meta=Meta(id=name, harness="synthetic", group=0, reward=1.0),
        )

    def _vary(self, tokens: int) -> int:
        return max(1, round(tokens * self._scale * self._rng.uniform(0.75, 1.25)))

    def _add(self, tokens: int, *, sampled: bool) -> Span:
        start = sum(part.size for part in self._generated)
        self._generated.append(np.full(tokens, sampled))
        span = (start, start + tokens)
        self.live.append(span)
        return span


def append_only(rollout: Rollout) -> None:
    for _ in range(TURNS - 1):
        rollout.say()
        rollout.hear()
    rollout.say()


def offload(rollout: Rollout) -> None:
    """In turns 8 and 10 the policy first reads something small, notes what matters of it, and stores it elsewhere."""
    for turn in range(1, TURNS):
        rollout.say()
        if turn in (8, 10):
            small = rollout.hear(SMALL_RESULT)
            rollout.say()
            rollout.edit("offload", [span for span in rollout.live if span != small])
        rollout.hear()
    rollout.say()


def pop_oldest(rollout: Rollout, edits: int = 4) -> None:
    results: list[Span] = []
    when = {round(TURNS * (k + 1) / (edits + 1)) for k in range(edits)}
    for turn in range(1, TURNS):
        rollout.say()
        results.append(rollout.hear())
        if turn in when:
            oldest = results.pop(0)
            rollout.edit("pop", [span for span in rollout.live if span != oldest])
    rollout.say()


def fold(rollout: Rollout) -> None:
    prompt = rollout.live[0]
    for _ in range(TURNS - 1):
        rollout.say()
        rollout.hear()
        if rollout.context > FOLD_ABOVE:
            summary = rollout.say(SUMMARY)  # sampled in the old context, kept in the new one
            rollout.edit("fold", [prompt, summary])
    rollout.say()


SHAPES: dict[str, Callable[[Rollout], None]] = {
    "append-only": append_only,
    "offload": offload,
    "pop oldest": pop_oldest,
    "fold at 3k": fold,
}


def shaped_record(shape: str, *, scale: float, vocabulary: int, seed: int = 0) -> Record:
    """A rollout of one of ``SHAPES`` with all lengths multiplied by ``scale``."""
    rollout = Rollout(scale, seed)
    SHAPES[shape](rollout)
    return rollout.record(shape, vocabulary)
