"""Slow, obvious readings of rows, in plain Python: walk the parents, one token at a time."""

from __future__ import annotations

from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.methods import Row
from slime_plugin.record import Record

ALL: list[MethodSettings] = [
    NaiveCompressed(),
    NaiveFull(),
    LogitTree(),
    Mask4d(packing="trie"),
    Mask4d(packing="replicated"),
    Mask4d(packing="union"),
    Sdcc(),
]
EXACT: list[MethodSettings] = [LogitTree(), Mask4d(packing="trie"), Mask4d(packing="replicated")]


def name(method: MethodSettings) -> str:
    return f"{method.type}-{method.packing}" if isinstance(method, Mask4d) else method.type


def path(row: Row, index: int) -> list[int]:
    """Indices from the root down to, and without, the token at ``index``."""
    indices = []
    at = int(row.parent[index])
    while at != -1:
        indices.append(at)
        assert at < len(row)
        at = int(row.parent[at])
        assert len(indices) <= len(row), "the parents form a circle"
    return indices[::-1]


def prefix_tokens(row: Row, index: int) -> tuple[int, ...]:
    return tuple(int(row.tokens[i]) for i in path(row, index))


def trained(row: Row) -> list[int]:
    return [i for i, loss in enumerate(row.loss_mask.tolist()) if loss]


def view_tokens(record: Record, k: int) -> list[tuple[int, int]]:
    """View k as (tape position, token id), span by span."""
    return [(p, int(record.tokens[p])) for start, stop in record.views[k] for p in range(start, stop)]
