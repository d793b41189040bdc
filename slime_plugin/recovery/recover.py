"""Recovers the record of a rollout from the contexts of its session.

Each chain of turns is a context that only grew: a view. Views are in the order in which the policy first sampled in
them; the user's conversation is resumed after each other one and comes last. The tape holds a block once: what a later
context shares with an earlier one has the same positions, and a turn has its positions from where it was sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime_plugin.record import ConversationReport, Edit, Meta, Record, RolloutReport, Span, TurnReport, View
from slime_plugin.record.arrays import join_spans
from slime_plugin.recovery.causes import EDIT_KINDS, Break, Cause
from slime_plugin.recovery.conversations import Conversation, SessionConversations, TurnKind, find_conversations
from slime_plugin.recovery.turn_chains import TurnChains
from slime_plugin.tap.blocks import Block, Turn
from slime_plugin.tap.context_tree import ContextTree, Node
from slime_plugin.tap.payload import StopReason

WEIGHT_SETTINGS: dict[TurnKind, str] = {"subagent": "subagents", "auxiliary": "auxiliary", "summary": "summaries"}
"""The setting with the token weight of each kind of turn. Turns of the user's conversation have weight 1."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A record without its meta data."""

    tokens: list[int]
    logprobs: list[float]
    views: list[View]
    edits: list[Edit]
    report: RolloutReport
    reply: str
    """The last message of the user's conversation."""
    finish: StopReason
    """Why that message ended."""

    def record(self, meta: Meta) -> Record:
        logprobs = np.array(self.logprobs)
        return Record(np.array(self.tokens), ~np.isnan(logprobs), logprobs, self.views, self.edits, meta)


@dataclass(frozen=True, slots=True)
class _TurnRun:
    """Consecutive turns of one context, with no other conversation in between."""

    conversation: Conversation
    turns: Sequence[Turn]
    rewritten: Break | None
    """How the context of the conversation was rewritten before these turns."""


def recover(
    contexts: ContextTree, parents: Mapping[str, str | None], lost: Mapping[str, int], weights: Mapping[str, float]
) -> Recovered:
    """``lost`` counts sampled tokens that reached no client; ``weights`` are token weights by setting."""
    conversations = find_conversations(contexts, parents)
    weight_of = {
        id: 0.0 if kind == "retry" else weights.get(WEIGHT_SETTINGS.get(kind, ""), 1.0)
        for id, kind in conversations.kinds.items()
    }
    trained = {id for id, weight in weight_of.items() if weight > 0}
    tape = _TapeBuilder(conversations.chains, trained)
    edits: list[Edit] = []
    before: _TurnRun | None = None
    for run in _turn_runs(conversations, trained):
        leaf = conversations.chains.own_node(run.turns[-1])
        if tape.add_view(leaf, run.conversation) and before is not None:
            edits.append(_edit(before, run))
        before = run
    untrained = Counter(lost)
    for turn in contexts.turns:
        if turn.id not in trained:
            untrained[conversations.kinds[turn.id]] += turn.sampled
    report = _report(contexts, conversations, tape, weight_of, untrained)
    main = conversations.main
    last = None if main is None else main.chains[-1].turns[-1]
    reply = "" if last is None else last.content.text
    finish: StopReason = "stop" if last is None else last.finish
    return Recovered(tape.tokens, tape.logprobs, tape.views, edits, report, reply, finish)


def _turn_runs(conversations: SessionConversations, trained: set[str]) -> Iterator[_TurnRun]:
    """Yield them in the order of the record: the user's conversation whole, others as far as they are trained."""
    main = conversations.main
    if main is None:
        return
    last = main.chains[-1].last
    others = [
        (min(chain.first, last), chain.first, _TurnRun(other, turns, other.breaks[i - 1] if i else None))
        for other in conversations.all[1:]
        for i, chain in enumerate(other.chains)
        if (turns := _up_to_trained(chain.turns, trained))
    ]
    others.sort(key=lambda other: other[1])
    for i, chain in enumerate(main.chains):
        rewritten = main.breaks[i - 1] if i else None
        turns = []
        for turn in chain.turns:
            while others and others[0][0] <= turn.number:
                if turns:
                    yield _TurnRun(main, turns, rewritten)
                    turns, rewritten = [], None
                yield others.pop(0)[2]
            turns.append(turn)
        kept = turns if i == len(main.chains) - 1 else _without_summary(turns, conversations, trained)
        if kept:
            yield _TurnRun(main, kept, rewritten)


def _up_to_trained(turns: list[Turn], trained: set[str]) -> list[Turn]:
    ends = [i for i, turn in enumerate(turns, 1) if turn.id in trained]
    return turns[: ends[-1]] if ends else []


def _without_summary(turns: list[Turn], conversations: SessionConversations, trained: set[str]) -> list[Turn]:
    """Drop an untrained summary at the end: it was asked for in a context of its own."""
    drop = turns and conversations.kinds[turns[-1].id] == "summary" and turns[-1].id not in trained
    return turns[:-1] if drop else turns


def _edit(before: _TurnRun, run: _TurnRun) -> Edit:
    """Return the edit between one run of turns and the next."""
    other = next((one for one in (run.conversation, before.conversation) if one.kind != "main"), None)
    details: dict[str, Any] = {}
    if run.rewritten is not None:
        cause: Cause = run.rewritten.cause
        details = {"removed": run.rewritten.removed, "inserted": run.rewritten.inserted}
    elif other is not None:
        cause = "subagent" if other.kind == "subagent" else "auxiliary"
    else:
        cause = "unknown"  # another conversation of the user's
    return Edit(EDIT_KINDS[cause], "harness", {"cause": cause, "conversation": run.conversation.name, **details})


@dataclass
class _TapeBuilder:
    """The tape and its views so far."""

    chains: TurnChains
    trained: set[str]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    sampled: dict[str, Span] = field(default_factory=dict)
    """The sampled tokens of each trained turn, by its id."""
    _spans: dict[int, list[Span]] = field(default_factory=dict)  # by node
    _turns: dict[str, Span] = field(default_factory=dict)  # whole turns, by id
    _last_nodes: dict[Conversation, Node] = field(default_factory=dict)
    _leaf: Node | None = None

    def add_view(self, leaf: Node, conversation: Conversation) -> bool:
        """Add the view of a context; return False if it extends the last view, which is then replaced."""
        known: dict[str, list[Span]] = {}  # blocks of the conversation's previous context, by key
        previous = self._last_nodes.get(conversation)
        for node in previous.path() if previous is not None else ():
            assert node.block is not None
            known.setdefault(node.block.key, []).extend(self._spans[node.id])
        in_view: set[Span | str] = set()  # spans, and ids of turns
        path = leaf.path()
        for node in path:
            assert node.block is not None
            if node.id not in self._spans:
                self._spans[node.id] = self._place(node, node.block, known, in_view)
            in_view.update(self._spans[node.id])
            if node.block.turn is not None:
                in_view.add(node.block.turn.id)
        view = join_spans(span for node in path for span in self._spans[node.id])
        extends = self._leaf is not None and self._leaf in path
        if extends:
            self.views[-1] = view
        else:
            self.views.append(view)
        self._last_nodes[conversation] = self._leaf = leaf
        return not extends

    def _place(self, node: Node, block: Block, known: Mapping[str, list[Span]], in_view: set[Span | str]) -> list[Span]:
        """Return the positions of a block: those on the tape, unless the view holds them already, or new ones."""
        turn = block.turn
        # Another conversation may have shown a turn before it was sampled here: it keeps the positions from here.
        sampled_here = (
            turn is not None
            and turn.id in self.trained
            and turn.id not in self.sampled
            and node is self.chains.own_node(turn)
        )
        if turn is not None and turn.id in self._turns and turn.id not in in_view and not sampled_here:
            return self._turn_spans(turn, block)
        free = next((span for span in known.get(block.key, ()) if span not in in_view), None)
        if turn is None and free is not None:
            return [free]
        start = len(self.tokens)
        span = (start, start + len(block.tokens))
        self.tokens.extend(block.tokens)
        self.logprobs.extend([float("nan")] * len(block.tokens))
        if turn is not None and sampled_here:
            first = start + self._opening_tokens()
            self.sampled[turn.id] = (first, first + turn.sampled)
            self.logprobs[first : first + turn.sampled] = turn.generation.logprobs
        if turn is not None and block.thought and (sampled_here or turn.id not in self._turns):
            self._turns[turn.id] = span
        return [span]

    def _turn_spans(self, turn: Turn, block: Block) -> list[Span]:
        """Return the positions of a turn on the tape: two spans if it is shown without its thought."""
        start, stop = self._turns[turn.id]
        if block.thought:
            return [(start, stop)]
        opening = self._opening_tokens()
        return [(start, start + opening), (stop - len(block.tokens) + opening, stop)]

    def _opening_tokens(self) -> int:
        return len(self.chains.contexts.renderer.chat.open_turn())


def _report(
    contexts: ContextTree,
    conversations: SessionConversations,
    tape: _TapeBuilder,
    weight_of: Mapping[str, float],
    untrained: Mapping[str, int],
) -> RolloutReport:
    by_id = {turn.id: turn for turn in contexts.turns}
    sampled = [(by_id[id], span) for id, span in sorted(tape.sampled.items(), key=lambda item: item[1])]
    unmatched = contexts.unmatched_replies()
    return RolloutReport(
        calls=sum(len(turn.content.calls) for turn in contexts.turns),
        turns=tuple(
            TurnReport(
                span,
                turn.generation.finish,
                conversations.kinds[turn.id],
                straddles=turn.generation.weights if turn.generation.straddles else (),
            )
            for turn, span in sampled
        ),
        conversations=tuple(
            ConversationReport(one.name, sum(len(chain.turns) for chain in one.chains), len(one.chains))
            for one in conversations.all
        ),
        breaks=Counter(found.cause for one in conversations.all for found in one.breaks),
        retokenised={"messages": len(unmatched), "tokens": sum(map(len, unmatched))},
        weights=tuple((*span, weight_of[turn.id]) for turn, span in sampled if weight_of[turn.id] != 1.0),
        untrained=untrained,
    )
