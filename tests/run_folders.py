"""Training runs made by hand: real records, and metrics whose numbers a test knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime_plugin.record import Record, StoreWriter
from slime_plugin.run.folder import RunFolder
from tests.conftest import example

REWARDS = (0.125, 0.25, 0.5)
LOGDIFFS = {"naive_compressed": 0.625, "naive_full": 0.25, "logittree": 3e-7, "mask4d": 4e-7, "sdcc": 0.625}
COSTS = {"naive_compressed": 1.0, "naive_full": 1.5, "logittree": 2.375, "mask4d": 1.75, "sdcc": 1.625}
TRAINED = {"naive_compressed": (6, 7, 9, 10, 12, 13), "mask4d": (5, 6, 7, 8, 9, 10, 11, 12, 13)}
"""The tape positions of the paper's running example that a method trains: all that were sampled, or those that stay."""


def running(name: str, **changes: Any) -> Record:
    """The paper's running example under another id."""
    record = example("running_example")
    meta = record.meta.to_json() | {"id": name} | changes
    return Record(record.tokens, record.generated, record.logprobs, record.views, record.edits, meta, record.extra)


def iteration(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "iteration",
        "iteration": number,
        "reward": REWARDS[number % len(REWARDS)],
        "K": 3.0,
        "sampled": 18,
        "trained": 18,
        "lost": {},
        "logdiff": {"mean": 4e-7, "max": 2e-6},
        "eviction_density": 0.2142,
        "frequency": 1.0,
        "depth": 0.2142,
        "seconds": {"generate": 3.0, "train": 1.5, "total": 4.5},
    } | changes


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "step", "iteration": number // 2, "step": number, "loss": 0.5 - number / 16} | changes


def make_run(
    path: Path,
    *,
    lines: Sequence[Mapping[str, Any]] = (),
    method: str = "mask4d",
    harness: str = "tc_rag",
    rollouts: Mapping[int, Sequence[Record]] | None = None,
) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir(parents=True)
    cell = {"harness": {"type": harness}, "method": {"type": method}, "trainer": {"iterations": 3}}
    folder.settings.write_text(json.dumps({"cell": cell}), encoding="utf-8")
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for number, records in (rollouts or {}).items():
        with StoreWriter(folder.rollouts(number)) as store:
            for record in records:
                store.append(record)
    return folder


def compare(folder: RunFolder, records: Sequence[Record], deltas: Mapping[str, Sequence[float]]) -> None:
    """What ``memorywalker compare`` leaves behind for rollouts of iteration 0; ``deltas`` go along ``TRAINED``."""
    methods = {
        name: {
            "logdiff": {"mean": logdiff, "max": 2 * logdiff},
            "share_trained": 1.0 if name in ("logittree", "mask4d", "naive_full") else 2 / 3,
            "trained": 9,
            "tokens": 19,
            "teacher_tokens": 17 if name == "sdcc" else 0,
            "off_context": 0 if name in ("logittree", "mask4d") else 5,
            "cost": COSTS[name],
            "lost": {"evicted by pop": 3} if name in ("naive_compressed", "sdcc") else {},
            "places": {"start": {"tokens": 3, "mean": logdiff, "max": logdiff}},
            "junctions": [{"junction": k, "tokens": 3, "mean": logdiff, "max": logdiff} for k in range(2)],
        }
        for name, logdiff in LOGDIFFS.items()
    }
    value = {
        "version": 1,
        "floor": {"mean": 3e-7, "max": 1e-6},
        "iterations": [0],
        "records": len(records),
        "denominator": "naive_compressed",
        "machine": "two cores",
        "methods": methods,
        "by_iteration": [{"iteration": 0, "methods": {name: {"mean": logdiff} for name, logdiff in LOGDIFFS.items()}}],
    }
    folder.comparison.write_text(json.dumps(value), encoding="utf-8")
    folder.comparison_arrays.mkdir()
    for name, gaps in deltas.items():
        tape = np.tile(np.array(TRAINED[name], dtype=np.int32), len(records))
        logged = np.concatenate([record.logprobs[list(TRAINED[name])] for record in records])
        np.savez(
            folder.comparison_arrays / f"{name}.npz",
            record=np.repeat(np.arange(len(records), dtype=np.int32), len(TRAINED[name])),
            tape=tape,
            logprob=(logged + np.tile(gaps, len(records))).astype(np.float32),
            ids=np.array([str(record.meta.id) for record in records]),
            iteration=np.zeros(len(records), dtype=np.int32),
        )
