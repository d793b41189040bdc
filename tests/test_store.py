"""The store: exact, append-only, readable while it grows, and at most one record poorer after a crash."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.errors import MemoryWalkerError, RecordError, StoreError
from slime_plugin.record import (
    Edit,
    Meta,
    Record,
    RolloutReport,
    StoreWriter,
    dump_record,
    parse_record,
    read_entries,
    read_records,
    scan_store,
)
from slime_plugin.record.store import Damage
from tests.cli import run
from tests.conftest import ROOT
from tests.histories import Rollout, histories

Words = dict[str, int | str | None]


def write(path: Path, records: list[Record]) -> list[int]:
    """Write the records; the size of the file before the first and after each."""
    with StoreWriter(path) as store:
        sizes = [path.stat().st_size]
        for record in records:
            store.append(record)
            sizes.append(path.stat().st_size)
    return sizes


words = st.dictionaries(st.text(min_size=15), st.integers() | st.text() | st.none())  # longer than any known key
ids = st.integers() | st.text()


@given(rollout=histories(), name=ids, edit=words, meta=words, top=words)
def test_round_trip(rollout: Rollout, name: str | int, edit: Words, meta: Words, top: Words) -> None:
    """Whatever a record holds, known or not, it is the same after JSON and after a store."""
    r = rollout[0]
    edits = [{"kind": e.kind, "author": None, **edit} for e in r.edits]
    record = Record(r.tokens, r.generated, r.logprobs, r.views, edits, {"id": name, "reward": 0.5, **meta}, top)
    assert parse_record(dump_record(record)) == record
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.records"
        write(path, [record, r, record])
        assert list(scan_store(path)) == [record, r, record]


@given(st.lists(st.floats(-100, 0, width=32), min_size=1))
def test_logprobs_survive_to_the_last_bit(values: list[float]) -> None:
    n = len(values)
    record = Record([1] * (n + 1), [0] + [1] * n, [None, *values], [[(0, n + 1)]])
    assert parse_record(dump_record(record)).logprobs.tobytes() == record.logprobs.tobytes()


def test_a_torn_tail_costs_only_the_record_being_written(running: Record, weather: Record, tmp_path: Path) -> None:
    """Cut the file at every byte of its last record: everything before it is read, and the loss is reported."""
    path = tmp_path / "a.records"
    _, _, before, after = write(path, [running, weather, running])
    whole = path.read_bytes()
    for size in range(before, after):
        path.write_bytes(whole[:size])
        found = list(scan_store(path))
        assert found[:2] == [running, weather]
        if size == before:
            assert len(found) == 2
        else:
            (torn,) = found[2:]
            assert isinstance(torn, Damage)
            assert torn.torn
            assert torn.offset == before
    result = run("record", "check", str(path))
    assert result.exit_code == 1
    assert f"torn tail at byte {before}" in result.stdout
    assert "2 valid records, 1 defect" in result.stderr


def test_a_new_writer_cuts_the_torn_tail_off_and_goes_on(
    running: Record, weather: Record, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.records"
    _, before, after = write(path, [running, weather])
    os.truncate(path, after - 5)
    with StoreWriter(path) as store:
        assert f"cut off at byte {before}" in caplog.text
        store.append(running)
    assert list(scan_store(path)) == [running, running]
    os.truncate(path, 9)  # not even the header is whole
    with StoreWriter(path) as store:
        store.append(weather)
    assert list(scan_store(path)) == [weather]


def test_damage_in_the_middle_costs_only_the_record_it_hits(running: Record, weather: Record, tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    sizes = write(path, [running, weather, running])
    whole = bytearray(path.read_bytes())
    for at in range(sizes[1], sizes[2]):
        damaged = whole.copy()
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        first, *lost, last = scan_store(path)
        assert (first, last) == (running, running)
        assert all(isinstance(damage, Damage) and not damage.torn for damage in lost)
        assert len(lost) == 1


def test_reading_while_a_writer_is_at_work(running: Record, weather: Record, tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    with StoreWriter(path) as store:
        assert list(read_records([path])) == []
        store.append(running)
        assert list(read_records([path])) == [running]
        with open(path, "ab") as half:  # what a reader may see of a record that is being written
            half.write(b"\xf5mwr\x10")
        assert list(read_records([path])) == [running]
        assert run("record", "check", str(path)).exit_code == 0
    assert run("record", "check", str(path)).exit_code == 1, "the writer is gone: now it is a torn tail"


def test_a_killed_writer_leaves_whole_records(running: Record, tmp_path: Path) -> None:
    """A real process, killed without warning in the middle of writing."""
    path = tmp_path / "a.records"
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent("""
            import sys
            from slime_plugin.record import StoreWriter, parse_record
            record = parse_record(open(sys.argv[1]).read())
            with StoreWriter(sys.argv[2]) as store:
                while True:
                    store.append(record)
        """), str(ROOT / "examples/records/running_example.json"), str(path)],
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 50_000:
            assert time.monotonic() < deadline, "the writer does not write"
            time.sleep(0.01)
        seen = [entry.record for entry in read_entries([path])]
        assert seen, "readable while it is written"
        assert all(record == running for record in seen)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    *records, last = scan_store(path)
    assert all(record == running for record in records)
    assert last == running or (isinstance(last, Damage) and last.torn)
    with StoreWriter(path) as store:
        store.append(running)
    assert all(record == running for record in scan_store(path))


def test_two_writers_are_kept_apart(running: Record, tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    with StoreWriter(path), pytest.raises(StoreError, match="another writer has it open; give every writer a file"):
        StoreWriter(path)


def test_a_reader_that_probes_for_a_writer_does_not_turn_one_away(tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    path.touch()
    with open(path, "rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        release = threading.Timer(0.1, fcntl.flock, (reader, fcntl.LOCK_UN))
        release.start()
        StoreWriter(path).close()
        release.join()


def test_a_store_that_has_just_been_made_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    path.touch()
    assert list(read_entries([path])) == []


def test_an_interrupted_append_leaves_no_half_frame(
    running: Record, weather: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.records"
    with StoreWriter(path) as store:
        store.append(running)
        usual = os.write

        def half(descriptor: int, data: bytes) -> int:
            usual(descriptor, data[: len(data) // 2])
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            with pytest.raises(KeyboardInterrupt):
                store.append(weather)
        store.append(weather)
    assert list(scan_store(path)) == [running, weather]


def test_a_wrong_length_hides_no_record_behind_it(running: Record, weather: Record, tmp_path: Path) -> None:
    """A header that claims four gigabytes, with a check sum that fits: nothing is allocated for it, nothing cut off."""
    path = tmp_path / "a.records"
    sizes = write(path, [running, weather, running])
    data = bytearray(path.read_bytes())
    at = sizes[1]
    data[at + 4 : at + 8] = b"\xf0\xff\xff\xff"
    data[at + 16 : at + 20] = zlib.crc32(data[at : at + 16]).to_bytes(4, "little")
    path.write_bytes(data)
    first, damage, last = scan_store(path)
    assert (first, last) == (running, running)
    assert isinstance(damage, Damage)
    assert not damage.torn
    StoreWriter(path).close()
    assert path.read_bytes() == data


def test_a_frame_that_unpacks_to_more_than_it_says(running: Record, tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    write(path, [running])
    bomb = zlib.compress(bytes(50_000_000))
    for claimed in (1_000, 2**31):
        head = struct.pack("<4sIII", b"\xf5mwr", len(bomb), claimed, zlib.crc32(bomb))
        frame = head + struct.pack("<I", zlib.crc32(head)) + bomb
        (tmp_path / "bomb.records").write_bytes(path.read_bytes() + frame)
        sound, damage = scan_store(tmp_path / "bomb.records")
        assert sound == running
        assert isinstance(damage, Damage)
        assert str(claimed) in damage.message


def test_other_files_are_never_overwritten(tmp_path: Path) -> None:
    for content in (b"notes", b"notes, longer than a header"):
        path = tmp_path / "notes.txt"
        path.write_bytes(content)
        with pytest.raises(StoreError, match="not a record store"):
            StoreWriter(path)
        assert path.read_bytes() == content


def test_a_full_disk_loses_nothing_that_was_written(running: Record, tmp_path: Path) -> None:
    """A real write error: the file may not grow beyond a limit set for a child process."""
    path = tmp_path / "a.records"
    script = textwrap.dedent("""
        import resource, signal, sys
        from slime_plugin.errors import StoreError
        from slime_plugin.record import StoreWriter, parse_record
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        record = parse_record(open(sys.argv[1]).read())
        written = 0
        with StoreWriter(sys.argv[2]) as store:
            try:
                while True:
                    store.append(record)
                    written += 1
            except StoreError as error:
                print(written, error)
    """)
    example = ROOT / "examples/records/running_example.json"
    done = subprocess.run([sys.executable, "-c", script, example, path], capture_output=True, text=True, check=True)
    written, message = done.stdout.split(" ", 1)
    assert "record running-example (tc_rag) was not written: File too large" in message
    assert list(scan_store(path)) == [running] * int(written)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written: .*; choose another folder"):
        StoreWriter(tmp_path / "file" / "a.records")


def test_future_stores_are_refused(running: Record, tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    write(path, [running])
    whole = bytearray(path.read_bytes())
    whole[8] = 2
    path.write_bytes(whole)
    with pytest.raises(StoreError, match="store version 2 but this reader knows 1"):
        list(scan_store(path))
    with pytest.raises(StoreError, match="store version 2"):
        StoreWriter(path)
    assert "upgrade memorywalker" in run("record", "check", str(path)).stdout


def test_a_future_record_in_a_store_is_not_called_damaged(running: Record, tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    write(path, [running])
    head = json.dumps({"version": 2, "meta": {"id": "new"}, "other": "keys"}).encode()
    raw = struct.pack("<I", len(head)) + head
    stored = zlib.compress(raw)
    frame = struct.pack("<4sIII", b"\xf5mwr", len(stored), len(raw), zlib.crc32(stored))
    with open(path, "ab") as out:
        out.write(frame + struct.pack("<I", zlib.crc32(frame)) + stored)
    sound, refused = scan_store(path)
    assert sound == running
    assert isinstance(refused, RecordError)
    assert "record new: version: 2 but this reader knows 1; upgrade" in str(refused)


def test_durable_writes_reach_the_disk_one_by_one(
    running: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with StoreWriter(tmp_path / "a.records", durable=True) as store:
        store.append(running)
        store.append(running)
        assert synced == sorted(set(synced))
        assert synced[-1] == store.path.stat().st_size


def test_an_error_survives_a_process_boundary(running: Record) -> None:
    with pytest.raises(RecordError) as caught:
        Record(running.tokens, running.generated, running.logprobs, running.views, [])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.where, again.defects, str(again)) == (caught.value.where, caught.value.defects, str(caught.value))


def test_a_folder_stands_for_its_stores(running: Record, weather: Record, memex: Record, tmp_path: Path) -> None:
    write(tmp_path / "run" / "writer-1.records", [running, weather])
    write(tmp_path / "run" / "writer-2.records", [memex])
    assert list(read_records([tmp_path])) == [running, weather, memex]


def test_the_first_problem_stops_reading_records(running: Record, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(dump_record(running))
    bad.write_text("{}")
    with pytest.raises(MemoryWalkerError, match=r"bad\.json: record without id: version: missing"):
        list(read_records([good, bad]))


def test_pretty_json_and_json_lines(running: Record, weather: Record, tmp_path: Path) -> None:
    pretty, lines = tmp_path / "pretty.json", tmp_path / "lines.json"
    pretty.write_text(json.dumps(json.loads(dump_record(running)), indent=2))
    lines.write_text(f"{dump_record(running)}\n{dump_record(weather)}\n")
    assert list(read_records([pretty])) == [running]
    assert list(read_records([lines])) == [running, weather]


def test_unknown_fields_are_carried_along(running: Record) -> None:
    text = dump_record(running)[:-1] + ',"later":{"x":[1,null]}}'
    record = parse_record(text.replace('{"kind":"pop",', '{"kind":"pop","why":"full",', 1))
    assert record.extra["later"] == {"x": [1, None]}
    assert record.edits[0] == Edit("pop", "policy", {"why": "full"})
    assert parse_record(dump_record(record)) == record


def test_numpy_and_list_records_are_equal(running: Record) -> None:
    again = Record(
        running.tokens.astype(np.int64),
        running.generated.astype(int),
        running.logprobs.astype(np.float64),
        [np.array(view).tolist() for view in running.views],
        running.edits,
        running.meta,
        running.extra,
    )
    assert again == running
    assert again != "something else"
    with pytest.raises(RecordError):
        Record(running.tokens, running.generated, running.logprobs, running.views, [], running.meta)


def test_a_report_is_added_to_what_is_there() -> None:
    meta = Meta(id=1, extra={"mine": [1], "stop": "answer", "turns": ["not one of ours"], "untrained": {"retry": 2}})
    added = meta.with_report(RolloutReport(sample=3))
    assert dict(added.extra) == {**meta.extra, "sample": 3}
    assert (added.report.stop, added.report.sample, added.report.untrained) == ("answer", 3, {"retry": 2})
    assert (added.id, meta.report.sample) == (1, None)
