"""Why a tree and not a mask over the tape: a small attention model, in numpy, in double precision.

The oracle runs the model on each live context on its own, as the simulator wrote it down, and reads the prediction for
the sampled token off its last position. Trees reproduce it to rounding. The union packing sees the same tokens and does
not: from the second layer on, a token that survived an eviction carries what it had seen before it.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings
from slime_plugin.methods import Row, lay_out
from slime_plugin.record import Record
from tests.histories import Rollout, histories
from tests.oracle import EXACT, name, path, trained, view_tokens

Array = NDArray[np.float64]
WIDTH, LAYERS, VOCABULARY, LONGEST = 16, 3, 400, 400
_rng = np.random.default_rng(7)
EMBED = _rng.normal(size=(VOCABULARY, WIDTH))
PLACE = _rng.normal(size=(LONGEST, WIDTH))
QUERY, KEY, VALUE = (_rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5 for _ in range(3))
HEAD = _rng.normal(size=(WIDTH, VOCABULARY)) / WIDTH**0.5


def predictions(tokens: list[int], positions: list[int], visible: NDArray[np.bool_]) -> Array:
    """[N, V] log-probabilities of what follows each token, given which tokens each may see."""
    hidden = EMBED[tokens] + PLACE[positions]
    for q, k, v in zip(QUERY, KEY, VALUE, strict=True):
        scores = np.where(visible, (hidden @ q) @ (hidden @ k).T / WIDTH**0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        hidden = np.tanh(hidden + weights / weights.sum(axis=1, keepdims=True) @ (hidden @ v))
    logits = hidden @ HEAD
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def row_logprobs(row: Row) -> dict[int, float]:
    """Tape position -> log-probability of each trained token, read off its parent."""
    if row.visible is not None:
        visible = row.visible.mask()
    else:
        visible = np.zeros((len(row), len(row)), dtype=np.bool_)
        for i in range(len(row)):
            visible[i, [*path(row, i), i]] = True
    predicted = predictions(row.tokens.tolist(), row.position.tolist(), visible)
    return {int(row.tape[i]): float(predicted[row.parent[i], row.tokens[i]]) for i in trained(row)}


def logprobs(record: Record, method: MethodSettings) -> dict[int, float]:
    return {p: value for row in lay_out(record, method).rows for p, value in row_logprobs(row).items()}


def live_logprobs(tokens: list[int], live: dict[int, tuple[int, ...]]) -> dict[int, float]:
    """The oracle: one forward pass per sampled token, over its live context and nothing else."""
    found = {}
    for p, prefix in live.items():
        n = len(prefix)
        predicted = predictions(list(prefix), list(range(n)), np.tril(np.ones((n, n), dtype=np.bool_)))
        found[p] = float(predicted[-1, tokens[p]])
    return found


@pytest.mark.parametrize("method", EXACT, ids=name)
@given(rollout=histories())
@settings(max_examples=100)
def test_trees_predict_what_the_live_context_predicts(method: MethodSettings, rollout: Rollout) -> None:
    record, history = rollout
    found, expected = logprobs(record, method), live_logprobs(history.tokens, history.live)
    assert found.keys() == expected.keys()
    for p in expected:
        assert found[p] == pytest.approx(expected[p], abs=1e-10)


def test_the_union_is_exact_before_the_first_edit_and_wrong_after_it(running: Record) -> None:
    live: dict[int, tuple[int, ...]] = {}
    for k, view in enumerate(running.views):
        tokens = view_tokens(running, k)
        born_here = {p for start, stop in view for p in range(start, stop)} - live.keys()
        live |= {p: tuple(t for _, t in tokens[:i]) for i, (p, _) in enumerate(tokens) if p in born_here and p >= 5}
    expected = live_logprobs(running.tokens.tolist(), live)
    assert logprobs(running, LogitTree()) == pytest.approx(expected, abs=1e-10)
    union = logprobs(running, Mask4d(packing="union"))
    for p in (5, 6, 7):
        assert union[p] == pytest.approx(expected[p], abs=1e-10)
    for p in (8, 9, 10, 11, 12, 13):
        assert abs(union[p] - expected[p]) > 1e-3, "a survivor's state has seen what was evicted"
