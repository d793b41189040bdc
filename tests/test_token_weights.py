"""What a record says its tokens count in training: refused if it cannot be meant, and in every row where it belongs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.config.method import MethodSettings, Sdcc
from slime_plugin.errors import RecordError
from slime_plugin.methods import lay_out, token_weights
from slime_plugin.record import Record, StoreWriter, dump_record, parse_record, scan_store
from tests.cli import run
from tests.histories import Rollout, histories, twin_at_a_fork
from tests.oracle import ALL, name, trained

WEIGHTS = (0, 0.25, 0.5, 1, 1.0, 3)


def with_weights(record: Record, weights: Any) -> Record:
    return replace(record, meta=replace(record.meta, extra={**record.meta.extra, "weights": weights}))


@st.composite
def weighted(draw: st.DrawFn) -> tuple[Record, list[float]]:
    """A record with weights, and what each of its tape tokens counts, kept token by token."""
    record, _ = draw(histories())
    counts = [1.0] * len(record)
    entries = []
    at = 0
    while at < len(record) and draw(st.booleans()):
        start = draw(st.integers(at, len(record) - 1))
        at = draw(st.integers(start + 1, len(record)))
        weight = draw(st.sampled_from(WEIGHTS))
        entries.append([start, at, weight])
        for position in range(start, at):
            counts[position] = float(weight)
    return with_weights(record, entries), counts


@given(made=weighted())
def test_every_token_has_the_weight_of_its_span(made: tuple[Record, list[float]]) -> None:
    record, counts = made
    weights = token_weights(record)
    assert weights.tolist() == counts
    assert (weights.dtype == np.float32, weights.flags.writeable) == (True, False)


@given(rollout=histories())
def test_without_weights_every_token_counts_one(rollout: Rollout) -> None:
    record, _ = rollout
    for same in (record, with_weights(record, [])):
        assert token_weights(same).tolist() == [1.0] * len(record)


@pytest.mark.parametrize("method", ALL, ids=name)
@given(made=weighted())
def test_rows_have_the_weights_of_the_tokens_they_train(
    method: MethodSettings, made: tuple[Record, list[float]]
) -> None:
    record, counts = made
    layout, plain = lay_out(record, method), lay_out(with_weights(record, []), method)
    for row, other in zip(layout.rows, plain.rows, strict=True):
        assert not row.weight.flags.writeable
        assert row.weight.dtype == np.float32
        expected = [1.0] * len(row)
        for i in trained(row):
            expected[i] = counts[row.tape[i]]
        assert row.weight.tolist() == expected
        assert (row.loss_mask.tolist(), row.tape.tolist()) == (other.loss_mask.tolist(), other.tape.tolist())
    assert layout.trained == plain.trained, "also what counts nothing is counted"
    assert all((teacher.row.weight == 1).all() for teacher in layout.teachers), "a teacher row has no loss"


@pytest.mark.parametrize("method", ALL, ids=name)
def test_equal_tokens_in_one_place_keep_their_own_weights(method: MethodSettings) -> None:
    """The same thing said again after the same prefix has one place in the tree, and a loss of its own beside it."""
    record, history = twin_at_a_fork()
    positions = sorted(history.live)
    record = with_weights(record, [[p, p + 1, 1 + i] for i, p in enumerate(positions)])
    found = {int(row.tape[i]): float(row.weight[i]) for row in lay_out(record, method).rows for i in trained(row)}
    assert found == {p: 1.0 + i for i, p in enumerate(positions) if p in found}
    if not isinstance(method, Sdcc) and method.type != "naive_compressed":
        assert sorted(found) == positions


REFUSED: dict[str, tuple[Any, str, list[str]]] = {
    "a number": (0.5, "meta.weights", ["float is not a list", "[[start, stop, weight], ...]", "leave it out"]),
    "null": (None, "meta.weights", ["NoneType is not a list"]),
    "one number per token": ([1.0, 0.5], "meta.weights[0]", ["1.0 is not a span", "[start, stop, weight]"]),
    "a span without weight": ([[0, 1]], "meta.weights[0]", ["[0, 1] is not a span with its weight"]),
    "a fraction of a token": ([[0, 1.5, 1]], "meta.weights[0]", ["start 0 and stop 1.5", "whole numbers"]),
    "true as a position": ([[True, 2, 1]], "meta.weights[0]", ["start True", "whole numbers"]),
    "before the tape": ([[-1, 2, 1]], "meta.weights[0]", ["span [-1, 2)", "tape of 4 tokens"]),
    "behind the tape": ([[0, 1, 2], [2, 5, 1]], "meta.weights[1]", ["span [2, 5)", "tape of 4 tokens", "<= 4"]),
    "reversed": ([[3, 2, 1]], "meta.weights[0]", ["span [3, 2)", "start < stop"]),
    "empty": ([[2, 2, 1]], "meta.weights[0]", ["span [2, 2)", "start < stop"]),
    "beyond any tape": ([[0, 10**4000, 1]], "meta.weights[0]", ["1" + "0" * 19 + ")", "tape of 4 tokens"]),
    "overlapping": ([[0, 1, 0], [1, 3, 0.5], [2, 4, 1]], "meta.weights[2]", ["span [2, 4) begins before 3"]),
    "out of order": ([[2, 3, 1], [0, 1, 1]], "meta.weights[1]", ["span [0, 1) begins before 3", "in order"]),
    "negative": ([[0, 2, -0.5]], "meta.weights[0]", ["weight -0.5 of span [0, 2)", "from 0 to 1e+18"]),
    "not finite in float32": ([[0, 2, 1e39]], "meta.weights[0]", ["weight 1e+39", "from 0 to 1e+18"]),
    "not a number": ([[0, 2, "half"]], "meta.weights[0]", ["weight 'half'"]),
    "true as a weight": ([[0, 2, True]], "meta.weights[0]", ["weight True"]),
    "nan": ([[0, 2, float("nan")]], "meta.extra", ["use plain, finite values"]),
}
SMALL: dict[str, Any] = {
    "tokens": [7, 8, 9, 5],
    "generated": [0, 1, 0, 1],
    "logprobs": [None, -0.5, None, -0.25],
    "views": [[(0, 4)]],
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_cannot_be_meant_are_refused(case: str) -> None:
    weights, where, words = REFUSED[case]
    with pytest.raises(RecordError) as caught:
        Record(**SMALL, meta={"id": "17-3", "harness": "tap", "weights": weights})
    (line,) = caught.value.lines()
    assert line.startswith(f"record 17-3 (tap): {where}: ")
    assert len(line) < 300
    for word in words:
        assert word in line


def test_spans_that_touch_are_disjoint() -> None:
    record = Record(**SMALL, meta={"weights": [[0, 2, 0.5], (2, 4, 0)]})
    assert token_weights(record).tolist() == [0.5, 0.5, 0.0, 0.0]


def test_record_check_names_the_entry(tmp_path: Path) -> None:
    text = dump_record(Record(**SMALL, meta={"id": "17-3", "weights": [[0, 2, 0.5], [2, 3, 1]]}))
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(text)
    bad.write_text(text.replace("[2,3,1]", "[1,3,1]"))
    assert run("record", "check", str(good)).exit_code == 0
    result = run("record", "check", str(bad))
    assert result.exit_code == 1
    assert "record 17-3: meta.weights[1]: span [1, 3) begins before 2" in result.stdout + result.stderr


@given(made=weighted())
def test_weights_are_kept_with_the_record(made: tuple[Record, list[float]]) -> None:
    record, counts = made
    assert token_weights(parse_record(dump_record(record))).tolist() == counts


def test_weights_are_kept_in_a_store(tmp_path: Path) -> None:
    record = Record(**SMALL, meta={"weights": [[1, 2, 0.1]]})
    with StoreWriter(tmp_path / "some.records") as store:
        store.append(record)
    (found,) = scan_store(tmp_path / "some.records")
    assert isinstance(found, Record)
    assert token_weights(found).tolist() == token_weights(record).tolist() == [1, np.float32(0.1), 1, 1]
