"""How long records, trees, rows and stores take, beside the time numpy takes to copy the same bytes.

    python -m benchmarks.records [--records 64] [--tokens 40000] [--edits 20] [--live 11800] [--repeat 5]

Machines are noisy: every number is the best of ``--repeat`` runs, and the copy is timed in between.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.synthetic import popped_rollout
from slime_plugin.config.method import METHODS, Mask4d, MethodSettings
from slime_plugin.methods import Layout, lay_out
from slime_plugin.record import Record, StoreWriter, dump_record, parse_record, scan_store
from slime_plugin.tree import Trajectory, branches_of, build_trie, count

LAYOUTS: dict[str, MethodSettings] = {
    **METHODS,
    "mask4d replicated": Mask4d(packing="replicated"),
    "mask4d union": Mask4d(packing="union"),
}


def seconds(action: Callable[[], object], repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def copy_seconds(size: int, repeat: int) -> float:
    source = np.ones(size, dtype=np.uint8)
    return seconds(source.copy, repeat)


def row_bytes(layouts: list[Layout]) -> int:
    rows = [row for layout in layouts for row in (*layout.rows, *(teacher.row for teacher in layout.teachers))]
    columns = ("tokens", "tape", "parent", "position", "loss_mask", "rollout_logprobs")
    return sum(getattr(row, column).nbytes for row in rows for column in columns)


def report(what: str, taken: float, size: int, repeat: int) -> None:
    copy = copy_seconds(size, repeat)
    print(
        f"  {what:32} {taken * 1e3:9.2f} ms   {size / 1e6:8.2f} MB   copy {copy * 1e3:8.3f} ms   x{taken / copy:,.0f}"
    )


def time_layouts(record: Record, repeat: int) -> None:
    def everything() -> list[Layout]:
        trajectory = Trajectory.of(record)
        return [lay_out(trajectory, method) for method in LAYOUTS.values()]

    counts = count(Trajectory.of(record))
    print(f"\none record: L={counts.L:,} K={counts.K} branches {counts.branch_tokens:,} trie {counts.trie_tokens:,}")
    trajectory = Trajectory.of(record)
    branches = branches_of(trajectory)
    tape = record.tokens.nbytes + record.generated.nbytes + record.logprobs.nbytes
    branch_bytes = 4 * counts.branch_tokens
    rebuild = (record.tokens, record.generated, record.logprobs, record.views, record.edits, record.meta)
    report("check (construct the record)", seconds(lambda: Record(*rebuild), repeat), tape, repeat)
    report("unroll into layers", seconds(lambda: Trajectory.of(record), repeat), branch_bytes, repeat)
    report("trie", seconds(lambda: build_trie(record.tokens, branches), repeat), branch_bytes, repeat)
    for name, method in LAYOUTS.items():
        taken = seconds(partial(lay_out, trajectory, method), repeat)
        report(f"rows: {name}", taken, row_bytes([lay_out(trajectory, method)]), repeat)
    report("all of these, from the record", seconds(everything, repeat), row_bytes(everything()), repeat)


def time_store(records: list[Record], repeat: int) -> None:
    texts = [dump_record(record) for record in records]
    json_size = sum(map(len, texts))
    raw = sum(r.tokens.nbytes + r.generated.nbytes + r.logprobs.nbytes for r in records)
    print(f"\n{len(records)} records: arrays {raw / 1e6:.1f} MB, interchange JSON {json_size / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.records"

        def write() -> None:
            path.unlink(missing_ok=True)
            with StoreWriter(path) as store:
                for record in records:
                    store.append(record)

        written = seconds(write, repeat)
        read = seconds(lambda: list(scan_store(path)), repeat)
        assert list(scan_store(path)) == records
        size = path.stat().st_size
    report("store: write", written, raw, repeat)
    report("store: read and check", read, raw, repeat)
    report("store: write + read", written + read, raw, repeat)
    report("JSON: write", seconds(lambda: [dump_record(r) for r in records], 1), raw, repeat)
    report("JSON: read and check", seconds(lambda: [parse_record(text) for text in texts], 1), raw, repeat)
    smaller = f"{json_size / size:.2f} x smaller than JSON, {raw / size:.2f} x smaller than the arrays"
    print(f"  the store is {size / 1e6:.2f} MB: {smaller}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--edits", type=int, default=20)
    parser.add_argument("--live", type=int, default=11_800)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}")
    shape = {"tape": options.tokens, "edits": options.edits, "live": options.live}
    records = [popped_rollout(seed, **shape) for seed in range(options.records)]
    time_layouts(records[0], options.repeat)
    time_store(records, options.repeat)


if __name__ == "__main__":
    main()
