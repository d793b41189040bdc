"""Logs of a run, read in bounded parts: their beginning and their end, whatever they hold and however long they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HEAD_BYTES, TAIL_BYTES = 1 << 20, 8 << 20
"""Of one log. Setup fails at its beginning, everything else at its end."""
ALL_BYTES = 96 << 20
"""Of all logs of a run together."""
_JOB_LOG = re.compile(r"-\d+\.(err|out)$|^raylet\.(err|out)$|\.ray\.log$")
"""Logs of a job that are read: of actors (``MegatronTrainRayActor-4711.err``), raylets and ``ray start``."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class LogPart:
    """Consecutive lines of a log."""

    name: str
    """Path of the log, relative to the run's folder."""
    text: str
    first_byte: int
    """Where in the file it begins."""
    begin: int = 0
    """Characters at its beginning that an earlier start of the run has logged."""

    def place(self, start: int) -> str:
        """Return ``logs/driver.log:17`` for the line that holds that character, or ``... at byte 123456`` where what
        is before it was not read."""
        if not self.first_byte:
            return f"{self.name}:{self.text.count(chr(10), 0, start) + 1}"
        return f"{self.name} at byte {self.first_byte + len(self.text[:start].encode())}"

    def lines_with(self, needle: str) -> Iterator[tuple[int, str]]:
        """Yield (character, line) for every line of the last start that holds a text."""
        at = self.text.find(needle, self.begin)
        while at >= 0:
            start, end = self.text.rfind("\n", 0, at) + 1, self.text.find("\n", at)
            end = len(self.text) if end < 0 else end
            yield start, self.text[start:end]
            at = self.text.find(needle, end)


def log_files(run: Path) -> list[Path]:
    """Return the logs of a local run, or those of a job's driver and of the last start's actors and raylets, the most
    telling first. Ray's own other logs repeat them, with warnings that mean nothing."""
    logs = run / "logs"
    files = sorted(path for path in logs.glob("*.log") if path.is_file())
    starts = sorted(path for path in logs.glob("*") if path.is_dir())
    for path in starts[-1:]:
        found = [file for file in path.rglob("*") if _JOB_LOG.search(file.name) and file.is_file()]
        files += sorted(found, key=lambda file: (file.name.startswith("raylet"), str(file)))
    return files


def read_logs(run: Path, before: Mapping[str, int]) -> Iterator[LogPart]:
    """Yield the parts of the logs that are read; ``before`` are the sizes of logs when the last start began."""
    left = ALL_BYTES
    for path in log_files(run):
        for part in read_log(run, path, before.get(path.name, 0)):
            left -= len(part.text)
            if left < 0:
                return
            yield part


def read_log(run: Path, path: Path, since_byte: int = 0) -> list[LogPart]:
    """Return the parts of a log that are read; nothing if it cannot be read. What is before a byte was logged by an
    earlier start."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            since = since_byte if 0 < since_byte <= size else 0  # a shorter file was begun anew
            if size <= HEAD_BYTES + TAIL_BYTES:
                return [_part(run, path, file.read(size), 0, since)]
            spans = [(since, since + HEAD_BYTES), (size - TAIL_BYTES, size)]
            parts = []
            for start, stop in spans if since + HEAD_BYTES < size - TAIL_BYTES else [(since, size)]:
                file.seek(start)
                parts.append(_part(run, path, file.read(stop - start), start))
            return parts
    except OSError:
        return []


def shown_line(line: str, width: int = 240) -> str:
    """A line of a log, safe to show on a terminal."""
    text = _ESCAPES.sub("", line).strip()
    text = "".join(character if character.isprintable() else " " for character in text)
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def _part(run: Path, path: Path, data: bytes, start: int, since: int = 0) -> LogPart:
    name = str(path.relative_to(run)) if path.is_relative_to(run) else path.name
    begin = len(data[:since].decode("utf-8", errors="replace")) if since else 0
    return LogPart(name, data.decode("utf-8", errors="replace"), start, begin)
