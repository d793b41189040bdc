"""Which conversation each turn of a session is part of.

A *line* is what a user would call a conversation: chains in order, where each takes the place of the one before because
the client rewrote its context in between. Clients name their conversations in headers, more or less: agents that work
for another have a name of their own, titles and summaries do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slime_plugin.tap.causes import Break, explain, stands_for_the_rest
from slime_plugin.tap.chains import Chain, Chains
from slime_plugin.tap.contexts import Contexts
from slime_plugin.tap.pieces import Piece

Kind = Literal["main", "subagent", "auxiliary", "summary", "retry"]
"""What a turn was for; a ``retry`` was sampled once more and not used."""


@dataclass(eq=False)
class Line:
    """A conversation."""

    kind: Kind
    thread: str
    name: str = ""
    chains: list[Chain] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    """Between each chain and the next."""


@dataclass(frozen=True)
class Lineage:
    """All conversations of a session."""

    chains: Chains
    lines: list[Line]
    """The first is that of the user; there is none if there was no turn."""
    kinds: Mapping[str, Kind]
    """What each turn was for, by its id."""

    @property
    def main(self) -> Line | None:
        return self.lines[0] if self.lines else None


def lineage_of(contexts: Contexts, parents: Mapping[str, str | None]) -> Lineage:
    """``parents`` are the threads, and for whom each works."""
    chains = Chains(contexts)
    threads: dict[str, list[Chain]] = {}
    for chain in chains.chains:
        threads.setdefault(chain.turns[0].thread, []).append(chain)
    kinds: dict[str, Kind] = {}
    lines: list[Line] = []
    for thread, own in threads.items():
        found = _Thread(chains, thread, worker=parents.get(thread) is not None, kinds=kinds)
        lines += found.lines_of(own)
    users = [line for line in lines if line.kind == "main"] or lines
    main = min(users, key=lambda line: (not line.chains[0].turns[0].tools, line.chains[0].first), default=None)
    ordered = sorted(lines, key=lambda line: (line is not main, line.chains[0].first))
    counts: dict[str, int] = {}
    for line in ordered:
        if all(kinds.get(turn.id) == "summary" for chain in line.chains for turn in chain.turns):
            line.kind = "summary"
        counts[line.kind] = counts.get(line.kind, 0) + 1
        line.name = line.kind if line is main else f"{line.kind} {counts[line.kind]}"
        for chain in line.chains:
            for turn in chain.turns:
                kinds.setdefault(turn.id, line.kind)
    return Lineage(chains, ordered, kinds)


@dataclass
class _Thread:
    """What a client calls one conversation."""

    chains: Chains
    name: str
    worker: bool
    """It works for another."""
    kinds: dict[str, Kind]
    lines: list[Line] = field(default_factory=list)
    main: Line | None = None

    def lines_of(self, chains: list[Chain]) -> list[Line]:
        with_tools = any(chain.turns[0].tools for chain in chains)
        for chain in chains:
            if self.chains.is_retried(chain):
                self.kinds |= {turn.id: "retry" for turn in chain.turns}
                continue
            first = chain.turns[0]
            aside = first.purpose == "auxiliary" or (with_tools and not first.tools)
            line = None if aside else self._continued(chain)
            if line is None:
                line = Line(self._kind(chain, aside=aside), self.name)
                self.lines.append(line)
                if self.main is None and not aside:
                    self.main = line
            else:
                line.breaks.append(explain(*self._sides(line.chains[-1], chain)))
            line.chains.append(chain)
        for turn in (turn for chain in chains for turn in chain.turns if turn.purpose == "summary"):
            self.kinds.setdefault(turn.id, "summary")
        for line in self.lines:
            for before, after, found in zip(line.chains[:-1], line.chains[1:], line.breaks, strict=True):
                if found.cause == "compaction":
                    self._find_summary(line, before, after)
        return self.lines

    def _kind(self, chain: Chain, *, aside: bool) -> Kind:
        if aside:
            return "auxiliary"
        if self.main is None:
            return "subagent" if self.worker else "main"
        knows = chain.forked is not None or bool(self.chains.held(chain.turns[0]))
        return "subagent" if chain.turns[0].tools and not knows else "auxiliary"

    def _continued(self, chain: Chain) -> Line | None:
        """The conversation whose context this one takes the place of. A title or a summary has none."""
        ended = [line for line in self.lines if line.kind != "auxiliary" and line.chains[-1].last < chain.first]
        if chain.forked is not None:
            if not self.chains.replaces(chain):
                return None
            beside = [line for line in ended if any(chain.forked in one.turns for one in line.chains)]
            return beside[0] if beside else None
        held = {turn.id for turn in self.chains.held(chain.turns[0])}
        shared = {id(line): sum(turn.id in held for one in line.chains for turn in one.turns) for line in ended}
        best = max(ended, key=lambda line: shared[id(line)], default=None)
        if best is not None and shared[id(best)]:
            return best
        return self.main if self.main in ended else None

    def _sides(self, before: Chain, after: Chain) -> tuple[list[Piece], list[Piece]]:
        """The context that one chain ended, and the prompt of the next."""
        nodes = self.chains.contexts.nodes
        return self.chains.own_node(before.turns[-1]).pieces(), nodes[after.turns[0].at].pieces()

    def _find_summary(self, line: Line, before: Chain, after: Chain) -> None:
        """Mark the turn that wrote what a compaction put in place of what it took out.

        Either it came back as it was, or it is the last that was asked for before the compaction, calls nothing and was
        not carried on with.
        """
        held = {turn.id for turn in self.chains.held(after.turns[0])}
        every = [turn for line in self.lines for chain in line.chains for turn in chain.turns]
        last = max(turn.number for turn in every if turn.number < after.first)
        asides = [line.chains[0] for line in self.lines if line.kind == "auxiliary"]
        candidates = [
            chain.turns[0]
            for chain in asides
            if len(chain.turns) == 1 and (chain.first == last or chain.turns[0].id in held)
        ]
        ended = before.turns[-1]
        stays = stands_for_the_rest(*self._sides(before, after))
        began = ended is line.chains[0].turns[0]
        if not began and ended.number == last and (stays or ended.id not in held):
            candidates.append(ended)
        self.kinds |= {turn.id: "summary" for turn in candidates if turn.id not in self.kinds and not turn.said.calls}
