"""What a bug report needs of a run, as one archive: settings, evidence, metrics, statistics, ends of logs. No keys."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from slime_plugin.config.frozen import parse_yaml, to_yaml
from slime_plugin.diagnosis import Diagnosis
from slime_plugin.diagnosis.log_text import log_files
from slime_plugin.diagnosis.run_contents import PLUGIN_FILE
from slime_plugin.errors import ConfigError
from slime_plugin.run.evidence import FOLDER
from slime_plugin.run.redaction import redact_text, redact_values

LOG_HEAD_BYTES, LOG_TAIL_BYTES = 64 << 10, 512 << 10
"""Of each log."""
METRICS_BYTES = 32 << 20
LOGS_BYTES = 64 << 20
"""Of all logs together, before compression."""
MOST_FILES = 5000
"""Of the listing of the folder."""


def write_bundle(path: Path, diagnosis: Diagnosis, text: str, *, records: bool = False) -> list[str]:
    """Write the archive and return the names of its files. ``text`` is the diagnosis as it is shown; ``records`` adds
    the stores that were read, with what the policy saw and wrote."""
    name, names = diagnosis.run.folder.path.resolve().name or "run", []
    with tarfile.open(path, "w:gz") as archive:
        for member, data in _members(diagnosis, text, records=records):
            info = tarfile.TarInfo(f"{name}/{member}")
            info.size, info.mtime = len(data), int(time.time())
            archive.addfile(info, io.BytesIO(data))
            names.append(member)
    return names


def _members(diagnosis: Diagnosis, text: str, *, records: bool) -> Iterator[tuple[str, bytes]]:
    run = diagnosis.run
    folder = run.folder.path
    secrets = run.secrets
    yield "diagnosis.txt", redact_text(text, secrets).encode()
    symptoms = [asdict(symptom) for symptom in diagnosis.symptoms]
    yield "diagnosis.json", _json(redact_values({"ok": diagnosis.ok, "symptoms": symptoms}, secrets))
    yield "health.json", _json(diagnosis.health)
    yield "records.json", _json([store.to_json() for store in run.stores])
    yield "files.txt", "".join(_listing(folder)).encode(errors="backslashreplace")
    settings = [folder / "run.json", folder / PLUGIN_FILE, folder / "health.json"]
    for path in [*settings, *sorted((folder / FOLDER).glob("*.json"))]:
        data = _start(path, METRICS_BYTES)
        if data is not None:
            name = "written-health.json" if path.name == "health.json" else str(path.relative_to(folder))
            yield name, _redacted_settings(path, data, secrets)
    for name in ("metrics.jsonl", "sdcc.jsonl"):
        data = _start(folder / name, METRICS_BYTES)
        if data is not None:
            yield name, redact_text(data.decode(errors="replace"), secrets).encode()
    yield from _logs(folder, secrets)
    if records:
        for store in run.stores:
            with contextlib.suppress(OSError):
                yield store.name, (folder / store.name).read_bytes()


def _redacted_settings(path: Path, data: bytes, secrets: Mapping[str, str]) -> bytes:
    """Redact by the names of keys; a file that is not whole as text."""
    text = data.decode(errors="replace")
    try:
        if path.suffix == ".json":
            return _json(redact_values(json.loads(text), secrets))
        return to_yaml(redact_values(parse_yaml(text, str(path)), secrets)).encode()
    except (ValueError, ConfigError, RecursionError):
        return redact_text(text, secrets).encode()


def _logs(folder: Path, secrets: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    left = LOGS_BYTES
    for path in log_files(folder):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size <= LOG_HEAD_BYTES + LOG_TAIL_BYTES:
                    data = file.read(size)
                else:
                    head = file.read(LOG_HEAD_BYTES)
                    file.seek(size - LOG_TAIL_BYTES)
                    # Whole lines: a secret that is cut would not be recognised.
                    head, tail = head.rpartition(b"\n")[0], file.read(LOG_TAIL_BYTES).partition(b"\n")[2]
                    skipped = size - len(head) - len(tail)
                    data = head + f"\n[... {skipped} bytes left out ...]\n".encode() + tail
        except OSError:
            continue
        left -= len(data)
        if left < 0:
            return
        yield str(path.relative_to(folder)), redact_text(data.decode(errors="replace"), secrets).encode()


def _listing(folder: Path) -> Iterator[str]:
    """Yield a line per file: bytes, time of the last change, path."""
    for number, path in enumerate(sorted(folder.rglob("*"))):
        if number == MOST_FILES:
            yield "...\n"
            return
        with contextlib.suppress(OSError):
            found = path.lstat()
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.st_mtime))
            yield f"{found.st_size:>14} {when} {path.relative_to(folder)}{'/' * path.is_dir()}\n"


def _start(path: Path, most: int) -> bytes | None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(most)
    return None


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
