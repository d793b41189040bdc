"""Export records to a Parquet file, for pandas and DuckDB: one row per record.

``id``, ``group`` and ``weight_version`` become strings, because a column has one type. Arrays along the tape, views and
edits become nested columns. Everything else of a record's metadata is JSON text in ``meta``; further fields of the
record are JSON text in ``extra``. So nothing is lost.

    SELECT harness, avg(reward), avg(K) FROM 'rollouts.parquet' GROUP BY harness
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime_plugin.record import Record
from slime_plugin.tree.counts import count
from slime_plugin.tree.trajectory import Trajectory

ROW_GROUP_TOKENS = 2**20
"""Tape tokens per row group: about 20 MB of memory while one is collected."""
ROW_GROUP_RECORDS = 2**12


def write_parquet(path: Path, records: Iterable[Record]) -> int:
    """Write the records one row group after another. Returns their number."""
    import pyarrow as pa  # an extra: memorywalker[parquet]
    from pyarrow import parquet

    schema = _schema(pa)
    rows: list[dict[str, Any]] = []
    written = tokens = 0

    def row_group() -> Any:
        columns = [pa.array([row[field.name] for row in rows], field.type, from_pandas=True) for field in schema]
        return pa.record_batch(columns, schema)

    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for record in records:
            rows.append(_row(record))
            written += 1
            tokens += len(record)
            if tokens >= ROW_GROUP_TOKENS or len(rows) >= ROW_GROUP_RECORDS:
                writer.write_batch(row_group())
                rows, tokens = [], 0
        if rows:
            writer.write_batch(row_group())
    return written


def _schema(pa: Any) -> Any:
    names = {
        pa.string(): ("id", "group", "harness", "status", "weight_version", "stop"),
        pa.float64(): ("reward",),
        pa.int32(): ("K", "L", "C", "R", "D", "turns", "calls"),
    }
    edit = pa.struct([("kind", pa.string()), ("author", pa.string()), ("extra", pa.string())])
    span = pa.struct([("start", pa.int32()), ("stop", pa.int32())])
    return pa.schema(
        [
            *((name, kind) for kind, columns in names.items() for name in columns),
            ("tokens", pa.list_(pa.int32())),
            ("generated", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),  # null where not sampled: from_pandas turns NaN into null
            ("views", pa.list_(pa.list_(span))),
            ("edits", pa.list_(edit)),
            ("meta", pa.string()),
            ("extra", pa.string()),
        ]
    )


def _row(record: Record) -> dict[str, Any]:
    meta, report, counts = record.meta, record.meta.report, count(Trajectory.of(record))
    columns = {"stop": report.stop, "calls": report.calls}
    rest = {key: value for key, value in meta.extra.items() if columns.get(key) is None}
    return {
        "id": _text(meta.id),
        "group": _text(meta.group),
        "harness": meta.harness,
        "status": meta.status,
        "weight_version": _text(meta.weight_version),
        "reward": meta.reward,
        "turns": len(report.turns),
        **columns,
        **{name: getattr(counts, name) for name in "KLCRD"},
        "tokens": record.tokens,
        "generated": record.generated,
        "logprobs": record.logprobs,
        "views": [[{"start": start, "stop": stop} for start, stop in view] for view in record.views],
        "edits": [{"kind": e.kind, "author": e.author, "extra": json.dumps(dict(e.extra))} for e in record.edits],
        "meta": json.dumps(rest),
        "extra": json.dumps(dict(record.extra)),
    }


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)
