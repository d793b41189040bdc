"""Damaged records are refused: one clear line per defect, exit code 1, no traceback."""

from __future__ import annotations

import copy
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.errors import RecordError
from slime_plugin.record import Edit, Meta, Record, StoreWriter, dump_record, parse_record
from tests.cli import run
from tests.histories import Rollout, histories

Damage = Callable[[dict[str, Any]], object]


def _set(*path: Any, to: Any) -> Damage:
    def damage(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return damage


def _delete(*path: Any) -> Damage:
    def damage(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        del value[path[-1]]

    return damage


def _token_never_visible(value: dict[str, Any]) -> None:
    for key, entry in (("tokens", 7), ("generated", 0), ("logprobs", None)):
        value[key].append(entry)


# The running example, damaged: what is done to it, where the message points, and what it must mention.
DAMAGES: dict[str, tuple[Damage, str, list[str]]] = {
    "future version": (_set("version", to=2), "version", ["2", "1", "upgrade"]),
    "version as text": (_set("version", to="1"), "version", ["'1'"]),
    "version true": (_set("version", to=True), "version", ["True"]),
    "no version": (_delete("version"), "version", ["missing"]),
    "no tokens": (_delete("tokens"), "tokens", ["missing"]),
    "no views": (_delete("views"), "views", ["missing"]),
    "no edits": (_delete("edits"), "edits", ["missing"]),
    "tokens not a list": (_set("tokens", to="abc"), "tokens", ["str 'abc'"]),
    "empty tape": (_set("tokens", to=[]), "tokens", ["0 tokens"]),
    "token is text": (_set("tokens", 3, to="x"), "tokens[3]", ["str 'x'"]),
    "token is a float": (_set("tokens", 3, to=3.0), "tokens[3]", ["float 3.0"]),
    "token is true": (_set("tokens", 3, to=True), "tokens[3]", ["bool True"]),
    "token is a list": (_set("tokens", 3, to=[1]), "tokens[3]", ["list [1]"]),
    "token is negative": (_set("tokens", 3, to=-1), "tokens[3]", ["-1"]),
    "token beyond int32": (_set("tokens", 3, to=2**31), "tokens[3]", [str(2**31), str(2**31 - 1)]),
    "token of 60 digits": (_set("tokens", 3, to=10**60), "tokens[3]", ["digits"]),
    "generated too short": (_delete("generated", -1), "generated", ["13 flags", "14 tokens"]),
    "generated too long": (lambda v: v["generated"].append(0), "generated", ["15 flags", "14 tokens"]),
    "generated is 2": (_set("generated", 5, to=2), "generated[5]", ["2 is neither 0 nor 1"]),
    "generated is null": (_set("generated", 5, to=None), "generated[5]", ["null"]),
    "logprobs too short": (_delete("logprobs", 0), "logprobs", ["13 entries", "14 tokens"]),
    "generated without logprob": (_set("logprobs", 6, to=None), "logprobs[6]", ["1 of 9"]),
    "logprob without generated": (_set("logprobs", 2, to=-0.5), "logprobs[2]", ["-0.5", "null"]),
    "logprob above zero": (_set("logprobs", 6, to=0.5), "logprobs[6]", ["0.5", "above 0"]),
    "logprob beyond float32": (_set("logprobs", 6, to=-1e39), "logprobs[6]", ["-1e+39"]),
    "logprob of 400 digits": (_set("logprobs", 6, to=-(10**400)), "logprobs[6]", ["digits"]),
    "logprob is text": (_set("logprobs", 6, to="-0.5"), "logprobs[6]", ["str"]),
    "views is an object": (_set("views", to={}), "views", ["dict"]),
    "no view": (_set("views", to=[]), "views", ["0 views"]),
    "empty view": (_set("views", 1, to=[]), "views[1]", ["0 spans"]),
    "span is a number": (_set("views", 1, 0, to=5), "views[1][0]", ["pair"]),
    "span of three": (_set("views", 1, 0, to=[0, 1, 2]), "views[1][0]", ["pair"]),
    "span of floats": (_set("views", 1, 0, to=[0.0, 5.0]), "views[1][0]", ["whole numbers"]),
    "reversed span": (_set("views", 1, 0, to=[5, 0]), "views[1][0]", ["reversed", "5", "0"]),
    "empty span": (_set("views", 1, 0, to=[5, 5]), "views[1][0]", ["empty"]),
    "span before the tape": (_set("views", 1, 0, to=[-1, 5]), "views[1][0]", ["-1"]),
    "span beyond the tape": (_set("views", 3, 3, to=[12, 15]), "views[3][3]", ["15", "14 tokens"]),
    "huge span": (_set("views", 3, 3, to=[12, 10**30]), "views[3][3]", ["beyond", "14 tokens"]),
    "overlapping spans": (_set("views", 1, 1, to=[4, 11]), "views[1][1]", ["[4, 11)", "position 4", "[0, 5)"]),
    "position twice in a view": (
        lambda v: v["views"][1].append([2, 3]), "views[1][2]", ["[2, 3)", "position 2", "[0, 5)"],
    ),
    "token never visible": (_token_never_visible, "tokens[14]", ["never visible", "1 of 15", "4 views"]),
    "view only extends": (
        lambda v: (_set("views", to=[[[0, 8]], [[0, 14]]])(v), _set("edits", to=[{"kind": "pop"}])(v)),
        "views[1]", ["only extends view 0", "8", "6"],
    ),
    "view repeats the one before": (
        lambda v: (v["views"].insert(1, v["views"][0]), v["edits"].append({"kind": "pop"})),
        "views[1]", ["only extends view 0", "by 0 new"],
    ),
    "first appearance out of order": (
        lambda v: (_set("views", 0, to=[[0, 5], [6, 8]])(v), _set("views", 1, to=[[0, 11]])(v)),
        "tokens[5]", ["position 5", "view 1", "position 6", "view 0"],
    ),
    "sampled token not appended": (
        _set("views", 1, to=[[0, 5], [6, 8], [9, 10], [8, 9], [10, 11]]), "views[1]", ["position 9", "position 8"],
    ),
    "first view out of order": (_set("views", 0, to=[[1, 2], [0, 1], [2, 8]]), "views[0]", ["beginning of the tape"]),
    "sampled from nothing": (
        lambda v: (_set("generated", 0, to=1)(v), _set("logprobs", 0, to=-1.0)(v)), "views[0]", ["0 tokens precede"],
    ),
    "too few edits": (_delete("edits", 0), "edits", ["2 edits", "4 views"]),
    "too many edits": (lambda v: v["edits"].append({"kind": "pop"}), "edits", ["4 edits", "4 views"]),
    "edit is text": (_set("edits", 0, to="pop"), "edits[0]", ["str"]),
    "unknown kind of edit": (_set("edits", 0, "kind", to="popp"), "edits[0].kind", ["popp", "'pop'"]),
    "author is a number": (_set("edits", 0, "author", to=3), "edits[0].author", ["3"]),
    "meta is a list": (_set("meta", to=[]), "meta", ["list"]),
    "meta is null": (_set("meta", to=None), "meta", ["NoneType"]),
    "reward is text": (_set("meta", "reward", to="1"), "meta.reward", ["'1'"]),
    "reward is huge": (_set("meta", "reward", to=10**400), "meta.reward", ["finite"]),
    "status is a number": (_set("meta", "status", to=3), "meta.status", ["3", "aborted"]),
    "status is null": (_set("meta", "status", to=None), "meta.status", ["None", "completed"]),
    "id is a list": (_set("meta", "id", to=[1]), "meta.id", ["[1]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record_is_refused(name: str, running: Record, tmp_path: Path) -> None:
    damage, field, mentioned = DAMAGES[name]
    value = json.loads(dump_record(running))
    damage(value)
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(value))
    result = run("record", "check", str(file))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    matching = [line for line in lines if f": {field}: " in line]
    assert matching, lines
    assert len(lines) == 1, lines
    for word in mentioned:
        assert word in matching[0]
    for line in lines:
        assert line.startswith(f"{file}: record ")
    if name not in ("meta is a list", "meta is null", "id is a list"):
        assert "record running-example (tc_rag)" in matching[0]


TEXTS: dict[str, tuple[bytes, list[str]]] = {
    "empty file": (b"", ["empty"]),
    "not JSON": (b"hello", ["not JSON", "line 1 column 1"]),
    "a list": (b"[1, 2]", ["list", "object"]),
    "a number": (b"7", ["int"]),
    "NaN": (b'{"version": 1, "logprobs": [NaN]}', ["NaN"]),
    "infinity": (b'{"version": 1, "logprobs": [-Infinity]}', ["-Infinity"]),
    "key twice": (b'{"version": 1, "version": 1}', ["'version'", "twice"]),
    "integer of 5000 digits": (b'{"version": 1' + b"0" * 5000 + b"}", ["digits"]),
    "deep nesting": (b"[" * 100_000, ["deep"]),
    "not UTF-8": (b'{"version": 1, "meta": {"id": "\xff\xfe"}}', ["UTF-8"]),
    "a pickle": (pickle.dumps({"version": 1}), ["pickle", "never loaded"]),
    "an old pickle": (pickle.dumps({"version": 1}, protocol=0), ["not JSON"]),
    "a zip archive": (b"PK\x03\x04rest", ["zip"]),
    "gzip": (b"\x1f\x8b\x08rest", ["gzip"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_is_no_record_is_refused(name: str, tmp_path: Path) -> None:
    text, mentioned = TEXTS[name]
    file = tmp_path / "file"
    file.write_bytes(text)
    result = run("record", "check", str(file))
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    for word in mentioned:
        assert word in line


@pytest.mark.parametrize("command", [["record", "show"], ["record", "stats"], ["layout", "--method", "mask4d"]])
def test_every_command_refuses_it_the_same_way(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"version": 9}')
    result = run(*command, str(file))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert "version: 9 but this reader knows 1" in result.stderr


@pytest.mark.parametrize("keep", [1, 10, 200, -30, -2])
def test_a_truncated_file_is_refused(keep: int, running: Record, tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    file.write_text(dump_record(running)[:keep])
    result = run("record", "check", str(file))
    assert result.exit_code == 1
    assert "the JSON is truncated at" in result.stdout


def test_missing_file_folder_and_empty_folder(tmp_path: Path) -> None:
    result = run("record", "check", str(tmp_path / "nothing.json"), str(tmp_path))
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 2
    assert "No such file" in result.stdout


def test_all_defects_are_reported_at_once(running: Record, tmp_path: Path) -> None:
    value = json.loads(dump_record(running))
    value["logprobs"][6] = None
    value["logprobs"][2] = -1.0
    del value["edits"][0]
    value["meta"]["status"] = ""
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(value))
    assert len(run("record", "check", str(file)).stdout.splitlines()) == 4


def test_good_lines_survive_a_bad_one(running: Record, tmp_path: Path) -> None:
    good = dump_record(running)
    for name, lines, bad in (("a.jsonl", [good, good[:50], "", good], 2), ("a.json", [good[:50], good, good], 1)):
        file = tmp_path / name
        file.write_text("\n".join(lines))
        result = run("record", "check", str(file))
        assert result.exit_code == 1
        assert result.stdout.startswith(f"{file}:{bad}: ")
        assert "2 valid records, 1 defect" in result.stderr


def test_one_record_over_several_lines(running: Record, tmp_path: Path) -> None:
    file = tmp_path / "broken_up.json"
    file.write_text(dump_record(running).replace(',"tokens"', '\n,"tokens"').replace('"meta":', '"meta":\n'))
    assert run("record", "check", str(file)).exit_code == 0


def test_control_characters_do_not_reach_the_terminal(running: Record, tmp_path: Path) -> None:
    value = json.loads(dump_record(running))
    value["meta"]["id"] = "\x1b[2Jgone\n"
    value["edits"][0]["kind"] = "\x1b[31m"
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps(value))
    result = run("record", "check", str(file))
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout
    assert len(result.stdout.splitlines()) == 1


def test_arrays_of_the_wrong_kind_are_refused() -> None:
    sound: dict[str, Any] = {
        "tokens": np.array([1, 2]),
        "generated": np.array([False, True]),
        "logprobs": np.array([np.nan, -1.0]),
        "views": [[(0, 2)]],
    }
    assert len(Record(**sound)) == 2
    for field, value in {
        "tokens": np.array([1.0, 2.0]),
        "generated": np.array([0.0, 1.0]),
        "logprobs": np.array(["", ""]),
    }.items():
        with pytest.raises(RecordError, match=f"{field}: array of"):
            Record(**{**sound, field: value})
    with pytest.raises(RecordError, match=r"tokens: array of int64 with shape \(1, 2\)"):
        Record(**{**sound, "tokens": np.array([[1, 2]])})
    with pytest.raises(RecordError, match="-inf is not finite"):
        Record(**{**sound, "logprobs": np.array([np.nan, -np.inf])})


def test_what_is_neither_list_nor_vector_is_refused() -> None:
    for tokens in (np.array(5), 5, None, {"a": 1}):
        with pytest.raises(RecordError, match="tokens: "):
            Record(tokens, [0], [None], [[(0, 1)]])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"extra": {"tokens": [1]}}, "record.extra: 'tokens' cannot be a further key"),
        ({"extra": {5: 1}}, "record.extra: 5 cannot be a further key"),
        ({"extra": {"x": np.zeros(2)}}, "record.extra: cannot be written as JSON"),
        ({"extra": {"x": float("nan")}}, "record.extra: cannot be written as JSON"),
        ({"extra": [1]}, "extra: list is not an object"),
        ({"meta": Meta(id="a", extra={"id": ["bad"]})}, "meta.extra: 'id' cannot be a further key"),
        ({"meta": {"x": float("inf")}}, "meta.extra: cannot be written as JSON"),
        ({"edits": [Edit("pop", extra={"kind": "x"})]}, r"edits\[0\].extra: 'kind' cannot be a further key"),
    ],
)
def test_further_fields_cannot_contradict_or_break_a_record(part: dict[str, Any], message: str) -> None:
    sound: dict[str, Any] = {
        "tokens": [7, 8, 9], "generated": [0, 1, 0], "logprobs": [None, -1.0, None],
        "views": [[(0, 2)], [(0, 1), (2, 3)]], "edits": [Edit("pop")],
    }  # fmt: skip
    assert len(Record(**sound)) == 3
    with pytest.raises(RecordError, match=message):
        Record(**{**sound, **part})


def test_a_number_beyond_floats_in_an_unknown_field(running: Record) -> None:
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        parse_record(dump_record(running)[:-1] + ',"x":1e999}')


def test_many_keys_and_one_of_them_twice_take_no_time() -> None:
    """In a number of steps that grows with the keys, not with their square: 200,000 keys would not end otherwise."""
    keys = ",".join(f'"{i}":0' for i in range(200_000))
    with pytest.raises(RecordError, match="'199999' is given twice"):
        parse_record("{" + keys + ',"199999":1}')


def test_a_small_file_cannot_claim_a_huge_history() -> None:
    n = 15_000
    views = [[[0, n - 1 - k % 2]] for k in range(n)]
    with pytest.raises(RecordError, match=r"views: hold 224\d* positions in all; the maximum is 100000000"):
        Record([1] * n, [0] * n, [None] * n, views, [{"kind": "pop"}] * (n - 1))


def test_a_copy_is_as_protected_as_the_original(running: Record) -> None:
    for again in (pickle.loads(pickle.dumps(running)), copy.deepcopy(running)):
        assert again == running
        assert not again.tokens.flags.writeable


def test_a_record_cannot_be_changed(running: Record) -> None:
    with pytest.raises(ValueError, match="read-only"):
        running.tokens[0] = 1
    with pytest.raises(AttributeError):
        running.tokens = running.tokens.copy()  # type: ignore[misc]  # forbidden: that is the test


@given(rollout=histories(), data=st.data())
def test_any_single_change_is_refused_or_means_something_else(rollout: Rollout, data: st.DataObject) -> None:
    """No change to the JSON is silently repaired: it is refused, or the record read is a different one."""
    record = rollout[0]
    value = json.loads(dump_record(record))
    holder: Any = value
    key: Any = data.draw(st.sampled_from(["tokens", "generated", "logprobs", "views", "edits"]))
    while isinstance(holder[key], list | dict) and holder[key] and data.draw(st.integers(0, 4)):
        holder = holder[key]
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    before = holder[key]
    others: list[Any] = [None, -1, 0, 1, 2, 99, 0.5, -0.5, True, "", "pop", [], [[0, 1]], {}, 1e300]
    holder[key] = data.draw(st.sampled_from(others))
    if holder[key] == before:  # a flag may be written as a boolean, and -0.0 is 0
        return
    try:
        changed = parse_record(json.dumps(value))
    except RecordError as error:
        lines = error.lines()
    else:
        lines = []
        assert changed != record
    assert all(line.startswith("record random (simulated): ") for line in lines)


def test_frame_with_good_check_sums_and_senseless_content(running: Record, tmp_path: Path) -> None:
    file = tmp_path / "a.records"
    with StoreWriter(file) as store:
        store.append(running)
    raw = struct.pack("<I", 13) + b'{"version":1}'
    stored = zlib.compress(raw)
    head = struct.pack("<4sIII", b"\xf5mwr", len(stored), len(raw), zlib.crc32(stored))
    with open(file, "ab") as out:
        out.write(head + struct.pack("<I", zlib.crc32(head)) + stored)
    result = run("record", "check", str(file))
    assert result.exit_code == 1
    assert "holds no record" in result.stdout
    assert "1 valid record, 1 defect" in result.stderr
