"""Cache of answers, one file each.

Files are written atomically, so processes on machines that share the folder need no lock. Of two that write the same
entry at once, either answer is valid.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from slime_plugin.errors import ConfigError
from slime_plugin.files import write_atomically

_log = logging.getLogger(__name__)


def cache_key(*parts: str) -> str:
    """Key of a request; equal only if every part is."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Cache:
    """Answers in a folder, by :func:`cache_key`."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{where}.cache: {folder} cannot be created: {error.strerror}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{where}.cache: {folder} cannot be written to; name a folder of your own")

    def read(self, key: str) -> str | None:
        """Return the answer, or None. A damaged file is treated as missing."""
        path = self._path(key)
        try:
            kept = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s: not a cached answer (%s); it is requested again", path, type(error).__name__)
            return None
        answer = kept.get("answer") if isinstance(kept, dict) and kept.get("key") == key else None
        return answer if isinstance(answer, str) else None

    def write(self, key: str, request: str, answer: str) -> None:
        """Store an answer; the request is stored for people only. A write error is logged."""
        path = self._path(key)
        try:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps({"key": key, "request": request, "answer": answer}))
        except OSError as error:
            _log.warning("%s: an answer is not cached: %s", self.folder, error.strerror)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"  # 256 folders: file systems slow down with too many entries in one
