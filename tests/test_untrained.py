"""Tokens that were sampled and are not on the tape: counted as sampled and as lost, wherever numbers are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.config.cell import Cell
from slime_plugin.errors import RecordError
from slime_plugin.local.sample import recorded_samples
from slime_plugin.methods import lay_out
from slime_plugin.record import Record, dump_record
from slime_plugin.report.summary import summarise
from slime_plugin.slime.batch import Batch
from tests.cli import run
from tests.histories import Rollout, histories
from tests.oracle import ALL

CAUSES = st.dictionaries(st.sampled_from(["cancelled", "retry", "auxiliary"]), st.integers(1, 50))


def with_untrained(record: Record, causes: Any, **meta: Any) -> Record:
    return replace(record, meta=replace(record.meta, extra={**record.meta.extra, "untrained": causes}, **meta))


@given(rollout=histories(), causes=CAUSES)
def test_every_sampled_token_is_trained_or_lost_under_every_method(rollout: Rollout, causes: dict[str, int]) -> None:
    record, history = rollout
    counted = with_untrained(record, causes)
    assert counted.sampled == len(history.live) + sum(causes.values())
    for method in ALL:
        bare, layout = lay_out(record, method), lay_out(counted, method)
        assert layout.trained == bare.trained
        assert layout.lost == {**bare.lost, **causes}


@pytest.mark.parametrize("causes", [[], "many", {"retry": -1}, {"retry": 1.5}, {"retry": True}, {"retry": None}])
def test_what_cannot_be_a_number_of_tokens_is_refused(causes: Any, running: Record) -> None:
    with pytest.raises(RecordError, match=r"meta\.untrained"):
        with_untrained(running, causes)


def test_they_are_told_of(running: Record, tmp_path: Path) -> None:
    record = with_untrained(running, {"cancelled": 4})
    (path := tmp_path / "record.json").write_text(dump_record(record), encoding="utf-8")
    said = run("layout", str(path), "--method", "mask4d").stdout
    assert "trained 9 of 13 sampled tokens; not trained: 4 cancelled" in said
    total = summarise([record])["total"]
    assert total["sampled"] == 13
    assert {name: part["lost"].get("cancelled") for name, part in total["methods"].items()} == dict.fromkeys(
        total["methods"], 4
    )


@pytest.mark.parametrize(("status", "lost"), [("completed", {"cancelled": 4}), ("aborted", {"aborted": 13})])
def test_a_batch_adds_up(status: str, lost: dict[str, int], running: Record) -> None:
    record = with_untrained(running, {"cancelled": 4}, status=status, group="q", reward=1.0)
    told = Batch.of(recorded_samples([record]), Cell()).metrics()
    assert (told["sampled"], told["lost"]) == (13, lost)
    assert told["trained"] + sum(told["lost"].values()) == told["sampled"]
