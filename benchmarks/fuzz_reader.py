"""Throws damaged files at the reader: every one must be read or refused with a message, never crash it.

    python -m benchmarks.fuzz_reader [--seconds 60] [--seed 0]

Starts from valid files of every kind, flips, cuts, doubles and splices their bytes, and checks of each result that the
reader ends without an unexpected exception, that every refusal is a line that names the file, and that every record it
does accept can be laid out by all methods and written back unchanged.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

from benchmarks.records import LAYOUTS
from benchmarks.synthetic import popped_rollout
from slime_plugin.methods import lay_out
from slime_plugin.record import Record, StoreWriter, dump_record, parse_record, read_entries
from slime_plugin.tree import Trajectory


def sound_files(folder: Path) -> list[bytes]:
    """JSON, pretty JSON, JSON lines and a store of the example records and a longer one."""
    examples = sorted(Path(__file__).parent.parent.glob("examples/records/*.json"))
    records = [parse_record(path.read_text(encoding="utf-8")) for path in examples]
    records.append(popped_rollout(0, tape=3_000, edits=4, live=1_800))
    texts = [dump_record(record) for record in records]
    with StoreWriter(folder / "valid.records") as store:
        for record in records:
            store.append(record)
    pretty = [json.dumps(json.loads(text), indent=1) for text in texts]
    return [text.encode() for text in (*texts, *pretty, "\n".join(texts))] + [store.path.read_bytes()] * len(texts)


def damaged(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        if not out:
            break
        at = rng.randrange(len(out))
        action = rng.randrange(7)
        if action == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            out[at] = rng.choice(b'0123456789-,.:[]{}"\\eNt\x00\xff\x80')
        elif action == 2:
            del out[at : at + rng.randrange(1, 40)]
        elif action == 3:
            out[at:at] = out[at : at + rng.randrange(1, 40)]
        elif action == 4:
            del out[at:]
        elif action == 5:
            other = rng.randrange(len(out))
            out[at:at] = out[other : other + rng.randrange(1, 400)]
        else:
            out[at:at] = rng.choice(
                (b"null", b"1e999", b"-1", b"[[", b"NaN", b"99999999999999999999", b'"\\ud800"', b"{}")
            )
    return bytes(out)


def repaired_frames(data: bytes, rng: random.Random) -> bytes:
    """A store whose content is damaged but whose check sums are right: it gets past the first line of defence."""
    at = data.find(b"\xf5mwr")
    if at < 0:
        return damaged(data, rng)
    stored = int.from_bytes(data[at + 4 : at + 8], "little")
    raw = damaged(zlib.decompress(data[at + 20 : at + 20 + stored]), rng)
    packed = zlib.compress(raw, 1)
    head = b"\xf5mwr" + b"".join(n.to_bytes(4, "little") for n in (len(packed), len(raw), zlib.crc32(packed)))
    return data[:at] + head + zlib.crc32(head).to_bytes(4, "little") + packed


def examine(path: Path) -> tuple[int, int]:
    """Read one file; the number of records accepted and refused."""
    accepted = refused = 0
    for entry in read_entries([path]):
        if entry.record is None:
            refused += 1
            assert entry.problems, "refused without a word"
            assert all(line.startswith(str(path)) for line in entry.problems)
        else:
            accepted += 1
            use(entry.record)
    return accepted, refused


def use(record: Record) -> None:
    trajectory = Trajectory.of(record)
    for method in LAYOUTS.values():
        layout = lay_out(trajectory, method)
        assert layout.trained + sum(layout.lost.values()) == record.generated.sum()
    assert parse_record(dump_record(record)) == record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = sound_files(folder)
        path = folder / "damaged"
        stop = time.monotonic() + options.seconds
        while time.monotonic() < stop:
            data = rng.choice(corpus)
            data = (repaired_frames if rng.random() < 0.3 else damaged)(data, rng)
            path.write_bytes(data)
            try:
                accepted, refused = examine(path)
            except Exception as error:  # noqa: BLE001  # whatever escapes the reader is what this script looks for
                kept = Path("fuzz-failure.bin")
                kept.write_bytes(data)
                print(f"after {totals['files']} files: {type(error).__name__}: {error}\nthe file is in {kept}")
                sys.exit(1)
            totals.update(files=1, accepted=accepted, refused=refused)
    print(
        f"{totals['files']:,} damaged files: {totals['refused']:,} refusals, {totals['accepted']:,} valid records read"
    )


if __name__ == "__main__":
    main()
