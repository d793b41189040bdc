"""Random rollouts that remember what the policy saw: the oracle for records, trees and layouts.

A small simulator keeps a live context as a plain list and edits it the way harnesses do. Whenever it samples a
token it writes down the context of that moment, word for word. It shares no code with the package, and it never
looks at views: what it wrote down is the truth that every exact method has to reproduce. The vocabulary is tiny, so
that equal tokens under equal prefixes, the hard case for a prefix tree, come up all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from slime_plugin.record import Record


@dataclass
class History:
    """A rollout in the making, and the contexts its tokens were sampled under."""

    tokens: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    live: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For each sampled tape position, the token ids before it at the moment it was sampled."""
    context: list[int] = field(default_factory=list)
    """Tape positions that are live now."""
    views: list[list[int]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    before_edit: list[int] | None = None
    """The context as it was when the edits that are under way began."""
    kind: str = "unknown"

    def new(self, token: int, sampled: bool) -> int:
        position = len(self.tokens)
        self.tokens.append(token)
        self.generated.append(int(sampled))
        return position

    def append(self, token: int, sampled: bool) -> None:
        self.finish_edit()
        position = self.new(token, sampled)
        if sampled:
            self.live[position] = tuple(self.tokens[p] for p in self.context)
        self.context.append(position)

    def begin_edit(self, kind: str) -> None:
        if self.before_edit is None:
            self.before_edit = list(self.context)
        self.kind = kind

    def finish_edit(self) -> None:
        """Close a layer, if what happened since was an edit and not just an append."""
        if self.before_edit is None:
            return
        before, self.before_edit = self.before_edit, None
        appended = self.context[len(before) :]
        if self.context[: len(before)] == before and all(p not in self.seen() | set(before) for p in appended):
            self.context = before + sorted(appended)
            return
        self.views.append(before)
        self.kinds.append(self.kind)

    def seen(self) -> set[int]:
        return {p for view in self.views for p in view}

    def evict(self, start: int, count: int, kind: str = "pop") -> None:
        """Take a stretch out, but not what no view has shown yet, and never the whole context."""
        self.begin_edit(kind)
        visible = set(self.before_edit or ()) | self.seen()
        start %= len(self.context)
        leaving = [p for p in self.context[start : start + count] if p in visible]
        if len(leaving) < len(self.context):
            self.context = [p for p in self.context if p not in leaving]

    def insert(self, at: int, tokens: list[int]) -> None:
        self.begin_edit("fold")
        at %= len(self.context) + 1
        if at == 0:
            at = 1
        self.context[at:at] = [self.new(token, sampled=False) for token in tokens]

    def restore(self, at: int, count: int) -> None:
        gone = sorted((self.seen() | set(self.before_edit or ())) - set(self.context))
        if gone:
            self.begin_edit("restore")
            at %= len(self.context) + 1
            self.context[at:at] = gone[:count]

    def fold_in_place(self, start: int, count: int) -> None:
        """Move recent tokens over an older stretch, as a fold does with the summary it sampled."""
        self.begin_edit("fold")
        start %= len(self.context)
        moved = self.context[-count:]
        rest = [p for p in self.context if p not in moved]
        self.context = rest[:start] + moved + rest[start + count :]
        dropped = set(rest[start : start + count])
        unseen = dropped - self.seen() - set(self.before_edit or ())
        self.context += sorted(unseen)

    def record(self, **meta: object) -> Record:
        self.finish_edit()
        views = [*self.views, self.context]
        return Record(
            tokens=self.tokens,
            generated=self.generated,
            logprobs=[-0.125 * (p % 7) if flag else None for p, flag in enumerate(self.generated)],
            views=[spans(view) for view in views],
            edits=[{"kind": kind} for kind in self.kinds],
            meta={"id": "random", "harness": "simulated", **meta},
        )


Rollout = tuple[Record, History]


def spans(positions: list[int]) -> list[tuple[int, int]]:
    """Positions in context order as maximal spans."""
    found: list[tuple[int, int]] = []
    for p in positions:
        if found and found[-1][1] == p:
            found[-1] = (found[-1][0], p + 1)
        else:
            found.append((p, p + 1))
    return found


_step = st.tuples(
    st.sampled_from(["say", "say", "say", "tool", "evict", "insert", "restore", "fold"]),
    st.integers(0, 30),  # where
    st.integers(1, 4),  # how many
    st.lists(st.integers(0, 1), min_size=1, max_size=4),  # which tokens
)


@st.composite
def histories(draw: st.DrawFn, max_steps: int = 14) -> Rollout:
    """A record and the history that produced it."""
    history = History()
    for token in draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)):
        history.append(token, sampled=False)
    for action, at, count, tokens in draw(st.lists(_step, max_size=max_steps)):
        if action in ("say", "tool"):
            for token in tokens:
                history.append(token, sampled=action == "say")
        elif action == "evict":
            history.evict(at, count)
        elif action == "insert":
            history.insert(at, tokens)
        elif action == "restore":
            history.restore(at, count)
        else:
            history.fold_in_place(at, count)
    return history.record(), history


def twin_rollout() -> Rollout:
    """The policy says 1 0, it is popped, the policy says 1 0 again and goes on: equal tokens under equal prefixes."""
    history = History()
    history.append(0, sampled=False)
    history.append(1, sampled=True)
    history.append(0, sampled=True)
    history.evict(1, 2)
    for token in (1, 0, 1):
        history.append(token, sampled=True)
    return history.record(), history


def twin_at_a_fork() -> Rollout:
    """The policy says 1 1, then 0, then 0 again, each popped before the next: the twin stands where a fork begins."""
    history = History()
    history.append(0, sampled=False)
    for said in ((1, 1), (0,), (0,)):
        history.evict(1, 2)
        for token in said:
            history.append(token, sampled=True)
    return history.record(), history
