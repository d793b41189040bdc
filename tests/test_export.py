"""``memorywalker record export``: what Parquet gives back is what the records say."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.record import Edit, Meta, Record, StoreWriter, read_records
from slime_plugin.report import parquet
from slime_plugin.tree import Trajectory, count
from tests.cli import run
from tests.conftest import ROOT

pq = pytest.importorskip("pyarrow.parquet")

EXAMPLES = ROOT / "examples" / "records"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The shipped records, and one with everything that a record may hold."""
    path = tmp_path / "run.records"
    full = Record(
        tokens=[7, 8, 9, 5],
        generated=[0, 1, 0, 1],
        logprobs=[None, -0.5, None, -0.25],
        views=[[(0, 2)], [(0, 1), (2, 4)]],
        edits=[Edit("context_folding:branch", "policy", {"depth": 2})],
        meta=Meta(
            id=3,
            group="g",
            weight_version=17,
            reward=-0.5,
            status="truncated",
            extra={
                "stop": "turns",
                "calls": 2,
                "turns": [{"span": [1, 2], "finish": "stop"}],
                "mine": [1, {"a": None}],
            },
        ),
        extra={"pieces": ["a", "b", "c", "d"]},
    )
    with StoreWriter(path) as writer:
        for record in (*read_records([EXAMPLES]), full):
            writer.append(record)
    return path


def check_row(row: dict[str, Any], record: Record) -> None:
    """Put together again, the columns are the record but for the type of the three names."""
    meta = json.loads(row["meta"]) | {key: row[key] for key in ("stop", "calls") if row[key] is not None}
    names = {key: row[key] for key in ("id", "group", "harness", "status", "reward", "weight_version")}
    again = Record(
        tokens=row["tokens"],
        generated=row["generated"],
        logprobs=row["logprobs"],
        views=[[(span["start"], span["stop"]) for span in view] for view in row["views"]],
        edits=[Edit(edit["kind"], edit["author"], json.loads(edit["extra"])) for edit in row["edits"]],
        meta={**names, **meta},
        extra=json.loads(row["extra"]),
    )
    old = record.meta
    name, group, version = (None if value is None else str(value) for value in (old.id, old.group, old.weight_version))
    assert again == record.with_meta(replace(old, id=name, group=group, weight_version=version))
    counts = count(Trajectory.of(record))
    assert {name: row[name] for name in "KLCRD"} == {name: getattr(counts, name) for name in "KLCRD"}
    assert row["turns"] == len(record.meta.report.turns)


@pytest.mark.parametrize("records_per_group", [1, 3, 4096])
def test_what_is_exported_is_the_records(
    store: Path, tmp_path: Path, records_per_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_RECORDS", records_per_group)
    out = tmp_path / "out.parquet"
    result = run("record", "export", str(store), "--parquet", str(out))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote 4 records to {out}, no defects\n")
    records = list(read_records([store]))
    rows = pq.read_table(out).to_pylist()
    for row, record in zip(rows, records, strict=True):
        check_row(row, record)
    assert pq.ParquetFile(out).num_row_groups == math.ceil(4 / records_per_group)
    assert sorted(tmp_path.iterdir()) == [out, store]


def test_pandas_reads_it(store: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    out = tmp_path / "out.parquet"
    run("record", "export", str(store), "--parquet", str(out))
    frame = pandas.read_parquet(out)
    assert frame.groupby("harness")["K"].sum().to_dict()["tc_rag"] == 3
    assert [len(tokens) for tokens in frame.tokens] == [len(record) for record in read_records([store])]


def test_a_file_that_is_there_is_replaced_only_with_force(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    out.write_text("precious")
    result = run("record", "export", str(store), "--parquet", str(out))
    assert (result.exit_code, out.read_text()) == (1, "precious")
    assert f"{out}: exists already; pass --force" in result.stderr
    assert run("record", "export", str(store), "--parquet", str(out), "--force").exit_code == 0
    assert pq.read_table(out).num_rows == 4


def test_damaged_records_are_named_and_left_out(store: Path, tmp_path: Path) -> None:
    data = bytearray(store.read_bytes())
    data[100] ^= 0xFF  # in the first frame
    store.write_bytes(data)
    out = tmp_path / "out.parquet"
    result = run("record", "export", str(store), "--parquet", str(out))
    checked = run("record", "check", str(store))
    assert (result.exit_code, result.stdout) == (1, checked.stdout)
    assert "not a valid frame" in result.stdout
    assert result.stderr == f"wrote 3 records to {out}, 1 defect\n"
    assert pq.read_table(out).num_rows == 3


def test_without_a_valid_record_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    out = tmp_path / "out.parquet"
    result = run("record", "export", str(tmp_path), "--parquet", str(out), "--force")
    assert result.exit_code == 1
    assert "no valid record to export" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_cannot_be_written_and_a_library_that_is_missing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "no" / "out.parquet"
    result = run("record", "export", str(store), "--parquet", str(out))
    assert (result.exit_code, f"{out}: cannot be written" in result.stderr) == (1, True)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("record", "export", str(store), "--parquet", str(tmp_path / "out.parquet"))
    assert result.exit_code == 1
    assert "this command needs pyarrow: pip install 'memorywalker[parquet]'" in result.stderr
