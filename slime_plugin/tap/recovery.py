"""From the contexts of a session to the record of a rollout.

Each chain of turns is a context that only grew: a view. Views follow each other in the order in which the policy first
spoke in them; the conversation of the user is taken up again after each other one, and is what a record ends with. The
tape holds a piece once: what a later context has of an earlier one are the same positions, wherever it has them, and a
turn has its positions from where it was sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime_plugin.record import Edit, Meta, Record, Span
from slime_plugin.record.checks import UNTRAINED
from slime_plugin.tap.causes import EDIT_KINDS, Break, Cause
from slime_plugin.tap.chains import Chains
from slime_plugin.tap.contexts import Contexts, Node
from slime_plugin.tap.lineage import Kind, Line, Lineage, lineage_of
from slime_plugin.tap.messages import Finish
from slime_plugin.tap.pieces import Piece, Turn

WEIGHTS: dict[Kind, str] = {"subagent": "subagents", "auxiliary": "auxiliary", "summary": "summaries"}
"""The setting that weighs each kind of turn. What a user's own conversation says always counts."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A record in the making."""

    tokens: list[int]
    logprobs: list[float]
    views: list[list[Span]]
    edits: list[Edit]
    extra: dict[str, Any]
    """What the meta data say of it."""
    reply: str
    """What the policy said last to the user."""
    finish: Finish
    """How that ended."""

    def record(self, meta: Meta) -> Record:
        logprobs = np.array(self.logprobs)
        return Record(np.array(self.tokens), ~np.isnan(logprobs), logprobs, self.views, self.edits, meta)


@dataclass(frozen=True, slots=True)
class _Visit:
    """Turns of one context, one after the other, with no other conversation in between."""

    line: Line
    turns: Sequence[Turn]
    found: Break | None
    """What happened to the conversation before, if its context does not go on."""


def recover(
    contexts: Contexts, parents: Mapping[str, str | None], lost: Mapping[str, int], weights: Mapping[str, float]
) -> Recovered:
    """``lost`` are sampled tokens that no client was given, ``weights`` how much each kind of turn counts."""
    lineage = lineage_of(contexts, parents)
    weight_of = {id: weights.get(WEIGHTS.get(kind, ""), 1.0) for id, kind in lineage.kinds.items()}
    weight_of |= {id: 0.0 for id, kind in lineage.kinds.items() if kind == "retry"}
    trained = {id for id, weight in weight_of.items() if weight > 0}
    tape = _Tape(lineage.chains, trained)
    edits: list[Edit] = []
    before: _Visit | None = None
    for visit in _visits(lineage, trained):
        leaf = lineage.chains.own_node(visit.turns[-1])
        if tape.show(leaf, visit.line) and before is not None:
            edits.append(_edit(before, visit))
        before = visit
    untrained = Counter(lost)
    for turn in contexts.turns:
        if turn.id not in trained:
            untrained[lineage.kinds[turn.id]] += turn.sampled
    extra = _told(contexts, lineage, tape, weight_of, {**untrained})
    last = None if lineage.main is None else lineage.main.chains[-1].turns[-1]
    reply = "" if last is None else last.said.text
    finish: Finish = "stop" if last is None else last.finish
    return Recovered(tape.tokens, tape.logprobs, tape.views, edits, extra, reply, finish)


def _visits(lineage: Lineage, trained: set[str]) -> Iterator[_Visit]:
    """The contexts in the order in which a record has them. What has nothing to train is not visited, but for the
    user's conversation: that is how the rollout went."""
    main = lineage.main
    if main is None:
        return
    aside = [
        (chain.first, _Visit(line, visited, line.breaks[i - 1] if i else None))
        for line in lineage.lines[1:]
        for i, chain in enumerate(line.chains)
        if (visited := _up_to_trained(chain.turns, trained))
    ]
    last = main.chains[-1].last
    aside.sort(key=lambda pair: pair[0])
    starts = [(min(first, last), visit) for first, visit in aside]
    for i, chain in enumerate(main.chains):
        found = main.breaks[i - 1] if i else None
        turns: list[Turn] = []
        for turn in chain.turns:
            while starts and starts[0][0] <= turn.number:
                if turns:
                    yield _Visit(main, turns, found)
                    turns, found = [], None
                yield starts.pop(0)[1]
            turns.append(turn)
        kept = turns if i == len(main.chains) - 1 else _without_summary(turns, lineage, trained)
        if kept:
            yield _Visit(main, kept, found)


def _up_to_trained(turns: Sequence[Turn], trained: set[str]) -> Sequence[Turn]:
    ends = [i for i, turn in enumerate(turns, 1) if turn.id in trained]
    return turns[: ends[-1]] if ends else ()


def _without_summary(turns: Sequence[Turn], lineage: Lineage, trained: set[str]) -> Sequence[Turn]:
    """A summary that is not trained was asked for in a context of its own."""
    dropped = turns and lineage.kinds[turns[-1].id] == "summary" and turns[-1].id not in trained
    return turns[:-1] if dropped else turns


def _edit(before: _Visit, visit: _Visit) -> Edit:
    """What led from one visited context to the next."""
    aside = next((line for line in (visit.line, before.line) if line.kind != "main"), None)
    details: dict[str, Any] = {}
    if visit.found is not None:
        cause: Cause = visit.found.cause
        details = {"removed": visit.found.removed, "inserted": visit.found.inserted}
    elif aside is not None:
        cause = "subagent" if aside.kind == "subagent" else "auxiliary"
    else:
        cause = "unknown"  # another conversation of the user's
    return Edit(EDIT_KINDS[cause], "harness", {"cause": cause, "conversation": visit.line.name, **details})


@dataclass
class _Tape:
    """The tape and its views so far."""

    chains: Chains
    trained: set[str]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    views: list[list[Span]] = field(default_factory=list)
    sampled: dict[str, Span] = field(default_factory=dict)
    """Where the sampled tokens of each trained turn are, by its id."""
    _spans: dict[int, list[Span]] = field(default_factory=dict)  # by node
    _turns: dict[str, Span] = field(default_factory=dict)  # by turn, as a whole
    _last: dict[int, Node] = field(default_factory=dict)  # the last context of each line, by its id
    _leaf: Node | None = None

    def show(self, leaf: Node, line: Line) -> bool:
        """Add the view of a context; False if it only extends the last one, which is then the longer of the two."""
        known: dict[str, list[Span]] = {}
        previous = self._last.get(id(line))
        for node in previous.path() if previous is not None else ():
            assert node.piece is not None
            known.setdefault(node.piece.key, []).extend(self._spans[node.id])
        view: list[Span] = []
        taken: set[object] = set()  # spans, and ids of turns
        for node in leaf.path():
            if node.id not in self._spans:
                self._spans[node.id] = self._place(node, known, taken)
            taken.update(self._spans[node.id])
            if node.piece is not None and node.piece.turn is not None:
                taken.add(node.piece.turn.id)
            for span in self._spans[node.id]:
                if view and view[-1][1] == span[0]:
                    view[-1] = (view[-1][0], span[1])
                else:
                    view.append(span)
        extends = self._leaf is not None and self._leaf in leaf.path()
        if extends:
            self.views[-1] = view
        else:
            self.views.append(view)
        self._last[id(line)] = self._leaf = leaf
        return not extends

    def _place(self, node: Node, known: Mapping[str, list[Span]], taken: set[object]) -> list[Span]:
        """Where a piece is that was on the tape before, if the view does not have it already; or else at its end."""
        piece = node.piece
        assert piece is not None
        turn = piece.turn
        # A conversation on the side may have shown it before: it has its positions from where it was sampled.
        sampled_here = (
            turn is not None
            and turn.id in self.trained
            and turn.id not in self.sampled
            and node is self.chains.own_node(turn)
        )
        if turn is not None and turn.id in self._turns and turn.id not in taken and not sampled_here:
            return self._turn_spans(piece)
        free = next((span for span in known.get(piece.key, ()) if span not in taken), None)
        if turn is None and free is not None:
            return [free]
        start = len(self.tokens)
        span = (start, start + len(piece.tokens))
        self.tokens.extend(piece.tokens)
        self.logprobs.extend([float("nan")] * len(piece.tokens))
        if turn is not None and sampled_here:
            first = start + len(self.chains.contexts.renderer.chat.open_turn())
            self.sampled[turn.id] = (first, first + turn.sampled)
            self.logprobs[first : first + turn.sampled] = turn.generation.logprobs
        if turn is not None and piece.thought and (sampled_here or turn.id not in self._turns):
            self._turns[turn.id] = span
        return [span]

    def _turn_spans(self, piece: Piece) -> list[Span]:
        """Where a turn is that is on the tape; without its thought in two parts."""
        assert piece.turn is not None
        whole = self._turns[piece.turn.id]
        if piece.thought:
            return [whole]
        opening = len(self.chains.contexts.renderer.chat.open_turn())
        rest = len(piece.tokens) - opening
        return [(whole[0], whole[0] + opening), (whole[1] - rest, whole[1])]


def _told(
    contexts: Contexts, lineage: Lineage, tape: _Tape, weight_of: Mapping[str, float], untrained: dict[str, int]
) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    weights: list[list[float]] = []
    ordered = sorted(tape.sampled.items(), key=lambda item: item[1])
    by_id = {turn.id: turn for turn in contexts.turns}
    for turn_id, span in ordered:
        kind, generation = lineage.kinds[turn_id], by_id[turn_id].generation
        turn: dict[str, Any] = {"span": list(span), "finish": generation.finish}
        if kind != "main":
            turn["kind"] = kind
        if generation.straddles:
            turn["straddles"] = [list(part) for part in generation.weights]
        turns.append(turn)
        if weight_of[turn_id] != 1.0:
            weights.append([*span, weight_of[turn_id]])
    again = contexts.rendered_again()
    extra: dict[str, Any] = {
        "calls": sum(len(turn.said.calls) for turn in contexts.turns),
        "turns": turns,
        "conversations": [
            {"name": line.name, "turns": sum(len(chain.turns) for chain in line.chains), "contexts": len(line.chains)}
            for line in lineage.lines
        ],
        "breaks": dict(Counter(found.cause for line in lineage.lines for found in line.breaks)),
        "retokenised": {"messages": len(again), "tokens": sum(map(len, again))},
    }
    if untrained:
        extra[UNTRAINED] = untrained
    if weights:
        extra["weights"] = weights
    return extra
