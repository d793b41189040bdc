"""Answers that were given before, one file each.

A file appears whole or not at all, so any number of processes, on any number of machines that share the folder, may
read and write at once without a lock. Two that ask the same at the same time both write; either answer is right.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from pathlib import Path

from slime_plugin.errors import ConfigError

_log = logging.getLogger(__name__)


def cache_key(*parts: str) -> str:
    """One name for a request; equal only if every part is."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Cache:
    """A folder of answers, by :func:`cache_key`."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{where}.cache: {folder} cannot be made: {error.strerror}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{where}.cache: {folder} cannot be written to; name a folder of your own")

    def read(self, key: str) -> str | None:
        """The answer, or None. A damaged file counts as none and is replaced by the next answer."""
        path = self._path(key)
        try:
            kept = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s: not a cached answer (%s); it is asked for again", path, type(error).__name__)
            return None
        answer = kept.get("answer") if isinstance(kept, dict) and kept.get("key") == key else None
        return answer if isinstance(answer, str) else None

    def write(self, key: str, request: str, answer: str) -> None:
        """Keep an answer. The request is kept for the reader of the file only. A full disk costs the entry, no more."""
        path = self._path(key)
        draft = path.with_name(f"{key}.{uuid.uuid4().hex}.draft")
        try:
            path.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps({"key": key, "request": request, "answer": answer}), encoding="utf-8")
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            _log.warning("%s: an answer is not kept: %s", self.folder, error.strerror)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"  # 256 folders: file systems slow down with too many entries in one
