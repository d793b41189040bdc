"""The conversations of a session.

A conversation is a list of chains, each of which continues the one before after the client rewrote the context. Headers
name the threads of a client only in part: subagents have a thread of their own, titles and summaries do not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from slime_plugin.recovery.causes import Break, explain, is_returned_summary
from slime_plugin.recovery.turn_chains import TurnChain, TurnChains
from slime_plugin.tap.blocks import Block, Turn
from slime_plugin.tap.context_tree import ContextTree

TurnKind = Literal["main", "subagent", "auxiliary", "summary", "retry"]
"""Purpose of a turn; a ``retry`` was sampled once more and not used."""


@dataclass(frozen=True, eq=False)
class Conversation:
    """A conversation with its context breaks."""

    kind: TurnKind
    name: str
    chains: Sequence[TurnChain]
    breaks: Sequence[Break]
    """Between each chain and the next."""


@dataclass(frozen=True)
class SessionConversations:
    """All conversations of a session."""

    chains: TurnChains
    all: Sequence[Conversation]
    """The user's first; empty if there was no turn."""
    kinds: Mapping[str, TurnKind]
    """Kind of each turn, by its id."""

    @property
    def main(self) -> Conversation | None:
        return self.all[0] if self.all else None


@dataclass(frozen=True, eq=False)
class _Draft:
    """A conversation as far as it is known: before its breaks are explained."""

    kind: TurnKind
    chains: tuple[TurnChain, ...]

    @property
    def first(self) -> Turn:
        return self.chains[0].turns[0]

    def turns(self) -> Iterator[Turn]:
        return (turn for chain in self.chains for turn in chain.turns)


def find_conversations(contexts: ContextTree, parents: Mapping[str, str | None]) -> SessionConversations:
    """``parents`` maps each thread to the thread that started it."""
    chains = TurnChains(contexts)
    threads: dict[str, list[TurnChain]] = defaultdict(list)
    for chain in chains.chains:
        threads[chain.turns[0].thread].append(chain)
    drafts: list[_Draft] = []
    breaks: dict[_Draft, list[Break]] = {}
    summaries = {turn.id for turn in chains.turns if turn.purpose == "summary"}
    for thread, own in threads.items():
        joined = _join(chains, own, is_subagent=parents.get(thread) is not None)
        breaks |= {
            draft: [explain(*_contexts_at(chains, *pair)) for pair in pairwise(draft.chains)] for draft in joined
        }
        summaries |= _summaries(chains, joined, breaks)
        drafts += joined
    users = [draft for draft in drafts if draft.kind == "main"] or drafts
    main = min(users, key=lambda draft: (not draft.first.tools, draft.first.number), default=None)
    kinds: dict[str, TurnKind] = {turn.id: "retry" for turn in chains.turns}  # those that are in no draft
    kinds |= {turn.id: "summary" if turn.id in summaries else draft.kind for draft in drafts for turn in draft.turns()}
    found: list[Conversation] = []
    counts: Counter[str] = Counter()
    for draft in sorted(drafts, key=lambda draft: (draft is not main, draft.first.number)):
        is_summary = all(turn.id in summaries for turn in draft.turns())
        kind: TurnKind = "summary" if is_summary else draft.kind
        counts[kind] += 1
        name = kind if draft is main else f"{kind} {counts[kind]}"
        found.append(Conversation(kind, name, draft.chains, breaks[draft]))
    return SessionConversations(chains, found, kinds)


def _join(chains: TurnChains, own: list[TurnChain], *, is_subagent: bool) -> list[_Draft]:
    """Join the chains of one thread into conversations, without those that were retried."""
    with_tools = any(chain.turns[0].tools for chain in own)
    drafts: list[_Draft] = []
    for chain in own:
        if chains.is_retried(chain):
            continue
        first = chain.turns[0]
        main = next((draft for draft in drafts if draft.kind != "auxiliary"), None)
        kind: TurnKind
        if first.purpose == "auxiliary" or (with_tools and not first.tools):
            kind = "auxiliary"
        elif (draft := _continued(chains, chain, drafts, main)) is not None:
            drafts[drafts.index(draft)] = _Draft(draft.kind, (*draft.chains, chain))
            continue
        elif main is None:
            kind = "subagent" if is_subagent else "main"
        else:
            shares_context = chain.forked is not None or bool(chains.shown_to(first))
            kind = "subagent" if first.tools and not shares_context else "auxiliary"
        drafts.append(_Draft(kind, (chain,)))
    return drafts


def _continued(chains: TurnChains, chain: TurnChain, drafts: list[_Draft], main: _Draft | None) -> _Draft | None:
    """Return the conversation whose context a chain replaces; None for a title or a summary."""
    ended = [draft for draft in drafts if draft.kind != "auxiliary" and draft.chains[-1].last < chain.first]
    if chain.forked is not None:
        if not chains.replaces(chain):
            return None
        return next((draft for draft in ended if chain.forked in draft.turns()), None)
    shown = {turn.id for turn in chains.shown_to(chain.turns[0])}
    shared = {draft: sum(turn.id in shown for turn in draft.turns()) for draft in ended}
    best = max(ended, key=lambda draft: shared[draft], default=None)
    if best is not None and shared[best]:
        return best
    return main if main in ended else None


def _contexts_at(chains: TurnChains, before: TurnChain, after: TurnChain) -> tuple[list[Block], list[Block]]:
    """The context that one chain ended with, and the prompt of the next."""
    nodes = chains.contexts.nodes
    return chains.own_node(before.turns[-1]).blocks(), nodes[after.turns[0].at].blocks()


def _summaries(chains: TurnChains, drafts: list[_Draft], breaks: Mapping[_Draft, list[Break]]) -> set[str]:
    """Return the turns of a thread that wrote the summaries of its compactions."""
    turns = [turn for draft in drafts for turn in draft.turns()]
    side_requests = [draft.chains[0] for draft in drafts if draft.kind == "auxiliary"]
    found: set[str] = set()
    for draft in drafts:
        for (before, after), found_break in zip(pairwise(draft.chains), breaks[draft], strict=True):
            if found_break.cause != "compaction":
                continue
            shown = {turn.id for turn in chains.shown_to(after.turns[0])}
            last = max(turn.number for turn in turns if turn.number < after.first)
            # Either a side request that was the last turn before the compaction or came back verbatim ...
            candidates = [
                chain.turns[0]
                for chain in side_requests
                if len(chain.turns) == 1 and (chain.first == last or chain.turns[0].id in shown)
            ]
            # ... or the turn that ended the old context, if the new one does not continue it.
            ended = before.turns[-1]
            replaced = ended.id not in shown or is_returned_summary(*_contexts_at(chains, before, after))
            if ended is not draft.first and ended.number == last and replaced:
                candidates.append(ended)
            found |= {turn.id for turn in candidates if not turn.content.calls}
    return found
