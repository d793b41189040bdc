"""The live context of a rollout, and the record that grows with it.

The context is an ordered list of segments over the record's tape. Messages and turns are appended; three verbs rewrite
it: :meth:`Context.evict`, :meth:`Context.replace` and :meth:`Context.restore`. **The verbs log the edit in the
record**, and the prompt for the engine is the concatenation of the segments, so it cannot differ from what is logged.

    prompt  turn 1  result 1  turn 2  result 2          a context of five segments
    context.evict([result_1.id])                        the policy's next turn no longer sees result 1
    context.restore([result_1.id])                      now it does again, at the end

Each verb on its own is one edit. Several together are one edit inside ``with context.edit("fold", author="policy")``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.record import Edit, Meta, Record, Span, View
from slime_plugin.record.arrays import join_spans
from slime_plugin.record.meta import Json
from slime_plugin.rollout.chat.chat import Chat
from slime_plugin.rollout.engine.engine import Generation
from slime_plugin.rollout.messages import Message, Role

NAN = float("nan")


class ContextError(MemoryWalkerError):
    """An invalid edit: a bug of the editor. The context is unchanged."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A message or a turn, which is evicted and restored as a whole."""

    id: int
    """Index among the segments of the rollout; 0 is the prompt."""
    role: Role
    text: str
    """For people and editors to read; the policy sees the tokens."""
    start: int
    stop: int
    """Tape positions ``[start, stop)``."""
    sampled: Span | None = None
    """The positions that the policy sampled."""
    name: str | None = None
    """The tool, for a tool result."""
    note: bool = False
    """Role tool, but not a tool result."""

    def __len__(self) -> int:
        return self.stop - self.start


class Context:
    """What the policy sees now, and the tape and views of everything it saw."""

    def __init__(self, chat: Chat, prompt: Sequence[int], text: str) -> None:
        """``prompt`` holds the system message and the question, which are never evicted."""
        self._chat = chat
        self._tokens: list[int] = []
        self._logprobs: list[float] = []  # NaN where not sampled
        self._known: list[Segment] = []  # by id
        self._live: list[Segment] = []
        self._views: list[View] = []
        self._edits: list[Edit] = []
        self._editing = False
        self._segments_before = 0  # segments when the current edit began
        self._logged = len(prompt)  # tape positions that logged views may hold
        self._prompt: list[int] = []  # the tokens of the live segments
        self._add(Segment(0, "user", text, 0, len(prompt)), prompt)

    # Reading

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The live segments in context order; the first is the prompt."""
        return tuple(self._live)

    @property
    def body(self) -> tuple[Segment, ...]:
        """The live segments after the prompt, which an editor may edit."""
        return tuple(self._live[1:])

    @property
    def results(self) -> tuple[Segment, ...]:
        """The live tool results in context order, without notes of editors."""
        return tuple(segment for segment in self._live if segment.role == "tool" and not segment.note)

    def __len__(self) -> int:
        """Number of live tokens."""
        return len(self._prompt)

    def __getitem__(self, id: int) -> Segment:
        """A segment by its id, live or not."""
        if not 0 <= id < len(self._known):
            raise ContextError(f"there is no segment {id}; this rollout has had {len(self._known)}")
        return self._known[id]

    def prompt(self) -> list[int]:
        """Token ids for the next turn."""
        if self._editing:
            raise ContextError("the policy cannot sample inside an edit; sample first, then edit")
        return [*self._prompt, *self._chat.open_turn()]

    def index(self, id: int) -> int:
        """Index of a live segment in :attr:`segments`."""
        for index, segment in enumerate(self._live):
            if segment.id == id:
                return index
        raise ContextError(f"segment {self[id].id} is not in the live context; restore it first")

    def place(self, id: int) -> int:
        """Name of :meth:`index` in 0.6, until 0.8."""
        warnings.warn("Context.place is now Context.index; the old name is removed in 0.8", FutureWarning, stacklevel=2)
        return self.index(id)

    # Growing

    def append(self, message: Message) -> Segment:
        """Append a message."""
        tokens = self._chat.render(message)
        segment = self._segment(message, tokens)
        self._add(segment, tokens)
        return segment

    def append_turn(self, generation: Generation) -> Segment:
        """Append what the policy sampled under :meth:`prompt`."""
        opening = self._chat.open_turn()
        tokens = [*opening, *generation.tokens, *self._chat.close_turn(generation.tokens)]
        start = len(self._tokens)
        first = start + len(opening)
        sampled = (first, first + len(generation.tokens))
        text = self._chat.text(generation.tokens)
        segment = Segment(len(self._known), "assistant", text, start, start + len(tokens), sampled)
        self._add(segment, tokens)
        self._logprobs[slice(*sampled)] = generation.logprobs
        return segment

    def take_back(self, segment: Segment) -> None:
        """Remove the message that was appended last, if nothing was sampled or edited since."""
        last = self._live[-1] == segment and segment.stop == len(self._tokens) and segment.sampled is None
        if not last or self._editing or segment.start < self._logged:
            raise ContextError(f"segment {segment.id} is not the last message of the context; evict it instead")
        del self._tokens[segment.start :], self._logprobs[segment.start :], self._known[segment.id :]
        del self._live[-1], self._prompt[-len(segment) :]

    # Editing

    def evict(self, ids: Iterable[int]) -> None:
        """Remove the segments. They can be restored."""
        leaving = self._leaving(ids)
        with self._verb("prune"):
            self._live = [segment for segment in self._live if segment.id not in leaving]
            self._rebuild()

    def replace(self, ids: Iterable[int], message: Message) -> Segment:
        """Remove the segments and insert the message in place of the first."""
        leaving = self._leaving(ids)
        if not leaving:
            raise ContextError("replace takes at least 1 segment; with 0 it is not known where to insert the message")
        with self._verb("compact"):
            at = next(index for index, segment in enumerate(self._live) if segment.id in leaving)
            self._live = [segment for segment in self._live if segment.id not in leaving]
            tokens = self._chat.render(message)
            segment = self._segment(message, tokens)
            self._add(segment, tokens, at)
            self._rebuild()
        return segment

    def restore(self, ids: Iterable[int], at: int | None = None) -> None:
        """Insert evicted segments before index ``at`` of :attr:`segments`, at the end by default: the same tokens."""
        coming = [self[id] for id in ids]
        live = {segment.id for segment in self._live}
        for segment in coming:
            if segment.id in live:
                raise ContextError(f"segment {segment.id} is in the live context already; evict it first to move it")
            live.add(segment.id)
        at = len(self._live) if at is None else at
        if not 1 <= at <= len(self._live):
            raise ContextError(
                f"cannot restore at index {at}: indices go from 1, after the prompt, to {len(self._live)}"
            )
        with self._verb("restore"):
            self._live[at:at] = coming
            self._rebuild()

    @contextmanager
    def edit(self, kind: str, *, author: str = "harness", **details: Json) -> Iterator[None]:
        """Make all verbs inside one edit of that kind. If one of them is refused, all are undone."""
        if self._editing:
            raise ContextError(f"a {kind} inside another edit; end that one first")
        entry = Edit(kind, author, details)
        for defect in entry.defects("edit"):
            raise ContextError(str(defect))
        before, live, tape, known = self._view(), list(self._live), len(self._tokens), len(self._known)
        self._editing, self._segments_before = True, known
        try:
            yield
        except BaseException:
            self._live = live
            del self._tokens[tape:], self._logprobs[tape:], self._known[known:]
            self._rebuild()
            raise
        finally:
            self._editing = False
        if not _extends(before, self._view(), tape):
            self._views.append(before)
            self._edits.append(entry)
            self._logged = len(self._tokens)

    def record(self, meta: Meta) -> Record:
        """Return the record of the rollout so far."""
        tokens, logprobs = np.array(self._tokens), np.array(self._logprobs)
        return Record(tokens, ~np.isnan(logprobs), logprobs, [*self._views, self._view()], self._edits, meta)

    def _leaving(self, ids: Iterable[int]) -> set[int]:
        leaving = set(ids)
        for id in leaving:
            if self.index(id) == 0:
                raise ContextError("segment 0 is the prompt, which stays; evict what comes after it")
            if self._editing and id >= self._segments_before:
                raise ContextError(
                    f"segment {id} came with this edit; it cannot be removed before the policy has seen it"
                )
        return leaving

    @contextmanager
    def _verb(self, kind: str) -> Iterator[None]:
        """Make a verb outside of an edit an edit of its own."""
        if self._editing:
            yield
        else:
            with self.edit(kind):
                yield

    def _segment(self, message: Message, tokens: Sequence[int]) -> Segment:
        if not tokens:
            raise ContextError(f"a {message.role} message was rendered as 0 tokens; nothing of it would be seen")
        start = len(self._tokens)
        stop, text = start + len(tokens), message.content
        return Segment(len(self._known), message.role, text, start, stop, name=message.name, note=message.note)

    def _add(self, segment: Segment, tokens: Sequence[int], at: int | None = None) -> None:
        self._tokens.extend(tokens)
        self._logprobs.extend([NAN] * len(tokens))
        self._known.append(segment)
        if at is None:
            self._live.append(segment)
            self._prompt.extend(tokens)
        else:
            self._live.insert(at, segment)

    def _rebuild(self) -> None:
        tokens = self._tokens
        self._prompt = list(chain.from_iterable(tokens[segment.start : segment.stop] for segment in self._live))

    def _view(self) -> View:
        """The live context as maximal spans of the tape."""
        return join_spans((segment.start, segment.stop) for segment in self._live)


def _extends(before: View, after: View, tape: int) -> bool:
    """Whether nothing was edited: ``after`` is ``before`` and then only tokens new to the tape."""
    if before == after:
        return True
    head, last = before[:-1], before[-1]
    if after[: len(head)] != head or len(after) < len(before):
        return False
    joint = after[len(head)]
    rest = ((last[1], joint[1]), *after[len(before) :])
    return joint[0] == last[0] and joint[1] >= last[1] and all(start >= tape or start == stop for start, stop in rest)
