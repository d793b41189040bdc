"""What a rollout reports in its metadata: how it ended, its turns, tool calls, and tokens that cannot be trained.

These keys are in :attr:`Meta.extra` next to a user's own, and only this module knows their names. A value of another
type is taken for a user's own: it is kept, and reads as absent. Only ``weights`` and ``untrained`` are refused if
malformed (:mod:`.checks`), because they change what is trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slime_plugin.record.arrays import Span

Json = Any
Item = TypeVar("Item")

WEIGHTS = "weights"
UNTRAINED = "untrained"
_MAIN = "main"


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One turn of the policy."""

    span: Span | None
    """Tape positions of its sampled tokens."""
    finish: str | None
    """Why sampling stopped: stop, length or abort."""
    kind: str = _MAIN
    """main, or the purpose of an agent's other requests: subagent, summary, auxiliary, retry."""
    asked: bool = False
    """Requested by the editor, such as a summary."""
    straddles: tuple[tuple[str, int], ...] = ()
    """(weight version, tokens) of each part, if the weights changed while the turn was sampled."""

    def to_json(self) -> dict[str, Json]:
        values = {
            "span": None if self.span is None else list(self.span),
            "finish": self.finish,
            "kind": self.kind if self.kind != _MAIN else None,
            "asked": self.asked,
            "straddles": [list(part) for part in self.straddles],
        }
        return {key: value for key, value in values.items() if value}

    @classmethod
    def read(cls, value: Json) -> TurnReport:
        parts = value.get("straddles", ())
        straddles = tuple((str(version), int(tokens)) for version, tokens in parts)
        span, finish = value.get("span"), value.get("finish")
        kind, asked = str(value.get("kind", _MAIN)), bool(value.get("asked", False))
        return cls(
            None if span is None else (int(span[0]), int(span[1])),
            None if finish is None else str(finish),
            kind,
            asked,
            straddles,
        )


@dataclass(frozen=True, slots=True)
class ConversationReport:
    """One conversation of an agent: its own, or that of a subagent."""

    name: str | None
    turns: int
    contexts: int
    """1, and 1 more for each rewrite."""

    def to_json(self) -> dict[str, Json]:
        return {"name": self.name, "turns": self.turns, "contexts": self.contexts}

    @classmethod
    def read(cls, value: Json) -> ConversationReport:
        name = value.get("name")
        return cls(None if name is None else str(name), int(value["turns"]), int(value["contexts"]))


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Absent values are None or empty.

    >>> report = RolloutReport(stop="answer", calls=2, turns=(TurnReport((4, 9), "stop"),))
    >>> RolloutReport.read({**report.to_json(), "mine": 1}) == report
    True
    """

    stop: str | None = None
    """What ended the rollout: answer, turns, context, time, engine, ..."""
    error: str | None = None
    question: str | None = None
    """Digest of the question: distinguishes questions that share an id."""
    seed: int | None = None
    calls: int | None = None
    """Tool calls of the policy."""
    call_errors: int | None = None
    """Those answered with an error."""
    error_kinds: Mapping[str, int] = field(default_factory=dict)
    """The same by kind (:data:`slime_plugin.rollout.tools.tool.ErrorKind`)."""
    turns: tuple[TurnReport, ...] = ()
    removed: bool = False
    """A filter took the rollout out of training. It stays in the baseline of its group."""
    sample: int | None = None
    """Index of slime's sample, which orders a batch."""
    discarded: int | None = None
    """Tokens sampled in earlier attempts that were aborted."""
    retries: int | None = None
    """Requests that an agent sent again."""
    conversations: tuple[ConversationReport, ...] = ()
    breaks: Mapping[str, int] = field(default_factory=dict)
    """Rewrites of an agent's context, by cause."""
    retokenised: Mapping[str, int] = field(default_factory=dict)
    """Messages and tokens of an agent's own replies that came back changed and were tokenised again."""
    weights: tuple[tuple[int, int, float], ...] = ()
    """(start, stop, token weight) of spans of the tape; 1 elsewhere."""
    untrained: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens that are not on the tape as sampled, by cause."""

    def to_json(self) -> dict[str, Json]:
        """The keys that have a value, and those that rollouts of its kind always have, even if they are empty."""
        values: dict[str, Json] = {name: getattr(self, name) for name in (*_TEXTS, *_NUMBERS)}
        values |= {name: dict(getattr(self, name)) for name in _COUNTS}
        values |= {name: [entry.to_json() for entry in getattr(self, name)] for name in _ENTRIES}
        values[WEIGHTS] = [list(entry) for entry in self.weights]
        values["removed"] = self.removed or None
        always = {"turns"} if self.calls is not None else set()
        always |= {"conversations", "breaks"} if self.retokenised else set()
        return {key: value for key, value in values.items() if key in always or value not in (None, [], {})}

    @classmethod
    def read(cls, extra: Mapping[str, Json]) -> RolloutReport:
        plain: dict[str, Any] = {
            **{key: value for key in _TEXTS if isinstance(value := extra.get(key), str)},
            **{key: value for key in _NUMBERS if type(value := extra.get(key)) is int},
            **{key: value for key in _COUNTS if _is_counts(value := extra.get(key))},
        }
        return cls(
            **plain,
            removed=extra.get("removed") is True,
            turns=tuple(_entries(extra.get("turns"), TurnReport.read)),
            conversations=tuple(_entries(extra.get("conversations"), ConversationReport.read)),
            weights=tuple((start, stop, weight) for start, stop, weight in extra.get(WEIGHTS, ())),
        )

    @property
    def straddles(self) -> bool:
        """Whether the weights changed during a turn, so that no single version sampled it."""
        return any(turn.straddles for turn in self.turns)


_TEXTS = ("stop", "error", "question")
_NUMBERS = ("seed", "calls", "call_errors", "sample", "discarded", "retries")
_COUNTS = ("error_kinds", "breaks", "retokenised", UNTRAINED)
_ENTRIES = ("turns", "conversations")


def _is_counts(value: Json) -> bool:
    return isinstance(value, Mapping) and all(isinstance(number, int) for number in value.values())


def _entries(value: Json, read: Callable[[Json], Item]) -> Iterator[Item]:
    """The entries that can be read, one by one: a malformed one must not hide the others."""
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        return
    for entry in value:
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            yield read(entry)
