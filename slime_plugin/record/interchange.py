"""Interchange JSON, version 1: records as text, for people and other programs.

    {"version": 1, "tokens": [..], "generated": [0|1 ..], "logprobs": [float|null ..],
     "views": [[[start, stop], ..], ..], "edits": [{"kind": .., "author": ..}], "meta": {..}}

Further fields are kept. Unknown versions are refused, and so is what Python's ``json`` accepts beyond JSON: NaN and
duplicate keys.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from slime_plugin.errors import Defect, RecordError
from slime_plugin.record.arrays import to_json_floats
from slime_plugin.record.meta import Json
from slime_plugin.record.schema import FIELDS, Record, record_label

VERSION = 1


def parse_record(text: str | bytes) -> Record:
    """Parse a record, or raise :class:`RecordError`."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice)
    except json.JSONDecodeError as error:
        raise _unreadable(_json_problem(error)) from None
    except UnicodeDecodeError as error:
        raise _unreadable(f"byte {error.start} is not UTF-8; records are JSON text") from None
    except RecursionError:
        raise _unreadable("nested too deeply to be a record") from None
    except ValueError as error:  # a constant, a key given twice, an integer of thousands of digits
        raise _unreadable(str(error).split(";")[0]) from None
    return record_from_json(value)


def record_from_json(value: Json) -> Record:
    """Convert a parsed JSON value, or raise :class:`RecordError`."""
    if not isinstance(value, Mapping):
        raise _unreadable(f"a JSON {type(value).__name__}, not an object; one record is one object")
    where = record_label(value.get("meta"))
    check_version(where, value.get("version"))
    missing = [key for key in FIELDS if key not in value]
    if missing:
        raise RecordError(where, [Defect(key, f"missing; a record has {', '.join(FIELDS)}") for key in missing])
    return Record(
        tokens=value["tokens"],
        generated=value["generated"],
        logprobs=value["logprobs"],
        views=value["views"],
        edits=value["edits"],
        meta=value["meta"],
        extra={key: value[key] for key in value if key not in FIELDS},
    )


def check_version(where: str, version: object) -> None:
    """Refuse missing and unknown versions."""
    if version is None:
        problem = f'missing; this reader knows version {VERSION}: add "version": {VERSION}'
    elif type(version) is not int or version != VERSION:
        problem = f"{version!r:.40} but this reader knows {VERSION}; upgrade memorywalker to read newer ones"
    else:
        return
    raise RecordError(where, [Defect("version", problem)])


def dump_record(record: Record) -> str:
    """Return one line of JSON. Log-probabilities have the fewest digits that parse to the same float32."""
    parts = {
        "version": str(VERSION),
        "tokens": _dumps(record.tokens.tolist()),
        "generated": _dumps(record.generated.view(np.int8).tolist()),
        "logprobs": _dumps(to_json_floats(record.logprobs)),
        "views": _dumps(record.views),
        "edits": _dumps([edit.to_json() for edit in record.edits]),
        "meta": _dumps(record.meta.to_json()),
    }
    parts |= {key: _dumps(value) for key, value in record.extra.items()}
    return "{" + ",".join(f"{_dumps(key)}:{text}" for key, text in parts.items()) + "}"


def _dumps(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON, write null where there is no number")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise ValueError(f"key {twice[:40]!r} is given twice in one object")
    return value


def _json_problem(error: json.JSONDecodeError) -> str:
    position = f"line {error.lineno} column {error.colno} (character {error.pos} of {len(error.doc)})"
    if not error.doc.strip():
        return "the text is empty; a record is a JSON object"
    rest = error.doc[error.pos :].rstrip()
    if error.msg.startswith("Unterminated") or any(word.startswith(rest) for word in ("null", "true", "false", "-")):
        return f"the JSON is truncated at {position}; write the file again"
    return f"not JSON at {position}: {error.msg}"


def _unreadable(problem: str) -> RecordError:
    return RecordError("record", [Defect("json", problem)])
