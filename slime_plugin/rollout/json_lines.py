"""Read JSON lines that a user wrote: questions and corpora."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_plugin.errors import ConfigError


def read_json_lines(path: Path, keys: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (line number, place for messages, object), or raise :class:`ConfigError`. ``keys`` says what objects hold.

    Lines end at line feeds only: JSON strings may hold other line separators.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{where}: not JSON: {error}") from None
                if not isinstance(value, dict):
                    raise ConfigError(f"{where}: {type(value).__name__} instead of an object with {keys}")
                yield number, where, value
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
