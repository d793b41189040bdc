"""The prefix tree of a rollout's branches: every distinct (prefix, token) pair once, in depth-first order.

Branches share a node if their tokens are equal from the root on, whatever tape positions they come from. Two properties
make the tree exact and small:

* **One loss per node.** A node is trained by at most one sampled token. Another sampled token with the same prefix and
  id becomes a twin: a node beside the first, with its own loss. What follows the twin is attached to the first node,
  whose hidden state is the same.
* **No idle node.** Branches end at a trained token, so every leaf is trained.

Depth-first order makes each subtree contiguous. A chain is contiguous too: forks below it follow after its end, the
deepest first.

Example, the paper's running example (tokens written as tape positions; the branches have 8, 10, 11 and 11 tokens)::

    0 1 2 3 4 -+- 5 6 7
               +- 6 7 -+- 8 9 10
                       +- 9 10 -+- 11 12
                                +- 12 13                  5 + 3 + 5 + 4 + 2 = 19 nodes of 40 branch tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from slime_plugin.record.arrays import BoolArray, IntArray, equal_spans
from slime_plugin.tree.branches import Branch


@dataclass(frozen=True, slots=True)
class Trie:
    """N nodes in depth-first order."""

    tape: IntArray
    """[N] tape position of the node: of its trained token, or else of the first branch that has it."""
    parent: IntArray
    """[N] index of the parent, smaller than the node's own; -1 for a root."""
    depth: IntArray
    """[N] number of ancestors: the position id."""
    trained: BoolArray
    """[N] whether the node has the loss of a sampled token."""
    twins: tuple[int, ...]
    """Number of twins of each branch."""

    def __len__(self) -> int:
        return len(self.tape)


@dataclass(slots=True)
class _Chain:
    """Nodes with consecutive depths, hanging below node ``depth - 1`` of the chain ``below`` (-1: a root)."""

    tape: IntArray
    trained: BoolArray
    depth: int
    below: int
    offset: int = 0


_Path = list[tuple[int, int, int]]
"""A branch as (chain, first depth, depth after the last) from the root."""


def build_trie(tokens: IntArray, branches: Sequence[Branch]) -> Trie:
    """Build the prefix tree of non-empty branches. ``tokens`` is the tape."""
    chains: list[_Chain] = []
    paths: list[_Path] = []
    twins = []
    for branch, (earlier, shared) in zip(branches, _fork_points(tokens, branches), strict=True):
        path = _upto(paths[earlier], shared) if shared else []
        if shared < len(branch):
            chain = _Chain(
                branch.tape[shared:].copy(), branch.trained[shared:].copy(), shared, path[-1][0] if path else -1
            )
            path.append((len(chains), shared, len(branch)))
            chains.append(chain)
        paths.append(path)
        twins.append(_train_shared(chains, path, branch, shared))
    return _lay_out(chains, tuple(twins))


def _fork_points(tokens: IntArray, branches: Sequence[Branch]) -> list[tuple[int, int]]:
    """For each branch, the earlier one with the longest common prefix, and its length; (-1, 0) without one.

    The common prefix of any two rows is the minimum over the neighbours between them in sorted order.
    """
    order, adjacent = sort_branches(tokens, branches)
    position_of = np.argsort(order)
    forks = [(-1, 0)] if branches else []
    for b in range(1, len(branches)):
        at = int(position_of[b])
        shared = np.concatenate(
            (np.minimum.accumulate(adjacent[:at][::-1])[::-1], [0], np.minimum.accumulate(adjacent[at:]))
        )  # [branches] in sorted order: tokens in common with branch b
        shared[order >= b] = -1
        best = int(np.argmax(shared))
        forks.append((int(order[best]), int(shared[best])))
    return forks


def sort_branches(tokens: IntArray, branches: Sequence[Branch]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Lexicographic order of the branches, depth-first in the tree, and common prefix lengths of neighbours."""
    rows = [tokens[branch.tape] for branch in branches]
    order = sorted(range(len(rows)), key=lambda b: rows[b].astype(">u4").tobytes())
    adjacent = [_common_prefix(rows[a], rows[b]) for a, b in pairwise(order)]
    return np.array(order, dtype=np.intp), np.array(adjacent, dtype=np.intp)


def _common_prefix(a: IntArray, b: IntArray) -> int:
    n = min(a.size, b.size)
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _upto(path: _Path, stop: int) -> _Path:
    return [(chain, low, min(high, stop)) for chain, low, high in path if low < stop]


def _train_shared(chains: list[_Chain], path: _Path, branch: Branch, shared: int) -> int:
    """Place losses of a branch on nodes of earlier branches. Returns the number of twins."""
    depths = np.flatnonzero(branch.trained[:shared])
    if not depths.size:
        return 0
    taken: list[NDArray[np.intp]] = []
    for index, low, high in _upto(path, shared):
        chain = chains[index]
        here = depths[(depths >= low) & (depths < high)]
        is_taken = chain.trained[here - chain.depth]
        taken.append(here[is_taken])
        free = here[~is_taken]
        chain.tape[free - chain.depth] = branch.tape[free]
        chain.trained[free - chain.depth] = True
    twins = np.concatenate(taken)
    for start, stop in equal_spans(twins - np.arange(twins.size)):  # consecutive depths
        run = twins[start:stop]
        first = int(run[0])
        below = next((index for index, low, high in path if low < first <= high), -1)
        chains.append(_Chain(branch.tape[run], branch.trained[run], first, below))
    return twins.size


def _lay_out(chains: list[_Chain], twins: tuple[int, ...]) -> Trie:
    _number(chains)
    nodes = sum(len(chain.tape) for chain in chains)
    tape = np.empty(nodes, dtype=np.int32)
    parent = np.arange(-1, nodes - 1, dtype=np.int32)
    depth = np.empty(nodes, dtype=np.int32)
    trained = np.empty(nodes, dtype=np.bool_)
    for chain in chains:
        size = len(chain.tape)
        here = slice(chain.offset, chain.offset + size)
        tape[here] = chain.tape
        trained[here] = chain.trained
        depth[here] = np.arange(chain.depth, chain.depth + size)
        below = chains[chain.below] if chain.below >= 0 else None
        parent[chain.offset] = below.offset + chain.depth - 1 - below.depth if below else -1
    return Trie(tape, parent, depth, trained, twins)


def _number(chains: list[_Chain]) -> None:
    """Set the offsets of the chains, in depth-first order."""
    children: dict[int, list[int]] = {}
    for index, chain in enumerate(chains):
        children.setdefault(chain.below, []).append(index)
    waiting, offset = children.get(-1, [])[::-1], 0
    while waiting:
        index = waiting.pop()
        chains[index].offset = offset
        offset += len(chains[index].tape)
        # Popped from the back: the deepest fork first, older chains before younger ones.
        waiting.extend(sorted(children.get(index, ()), key=lambda child: (chains[child].depth, -child)))
