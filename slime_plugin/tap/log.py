"""What a session knows, one JSON object per line, appended before a client is answered.

``{"session": ..}`` begins a log. ``{"node": ..}`` is a piece at its place, with its tokens the first time;
``{"turn": ..}`` what was sampled and how it was asked for; ``{"lost": ..}`` tokens that were sampled for nobody;
``{"end": ..}`` how the rollout ended. A process that dies loses nothing that it had answered; half a line at the end is
what it was writing, and is cut off. A machine that dies may lose what its system had not written to disk yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from slime_plugin.bridge.engine.base import Generation
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.tap.contexts import Contexts, Node
from slime_plugin.tap.pieces import Piece, Turn, read_turn

VERSION = 1


class LogError(MemoryWalkerError):
    """A log that cannot be read or written."""


class Log:
    """Appends whole lines, in one write each time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however that ends
        except OSError:
            self.close()
            raise LogError(f"{path}: another tap writes to it; end that one, or choose another folder") from None
        self._length = os.fstat(self._file).st_size
        self._broken: str | None = None
        self._logged_nodes = 1  # the root is not written
        self._logged_keys: set[str] = set()

    @contextlib.contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """It stays open, unless something is raised."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def write(self, contexts: Contexts, *entries: Mapping[str, Any]) -> None:
        """The entries, and the nodes that were not there last time: those of a turn's context before it, its own after
        it. All of it is in the file, or nothing; then nothing can be written any more."""
        if self._broken is not None:
            raise LogError(self._broken)
        fresh, keys = contexts.nodes[self._logged_nodes :], set[str]()
        turns = {entry["turn"] for entry in entries if "turn" in entry}
        own = [node for node in fresh if node.piece is not None and node.piece.turn and node.piece.turn.id in turns]
        before = [self._node(node, keys) for node in fresh if node not in own]
        lines = [*before, *entries, *(self._node(node, keys) for node in own)]
        left = data = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        try:
            while left:  # a full disk or a signal may leave a part
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._broken = f"{self.path}: cannot be written: {error.strerror}; make room and try again"
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._length)
            raise LogError(self._broken) from error
        self._length += len(data)
        self._logged_nodes += len(fresh)
        self._logged_keys |= keys

    def read_back(self) -> list[dict[str, Any]]:
        """What is in the file. Half a line at its end is cut off."""
        entries = read_log(self.path)
        self._length = self.path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file, self._length)
        return entries

    def holds(self, contexts: Contexts) -> None:
        """Everything of these contexts is in the file already."""
        self._logged_nodes = len(contexts.nodes)
        self._logged_keys = {node.piece.key for node in contexts.nodes if node.piece is not None}

    def _node(self, node: Node, keys: set[str]) -> dict[str, Any]:
        """``keys`` are those whose tokens are being written."""
        piece, parent = node.piece, node.parent
        assert piece is not None
        assert parent is not None  # only the root has none
        entry: dict[str, Any] = {"node": node.id, "parent": parent.id, "role": piece.role, "key": piece.key}
        if piece.turn is not None:
            entry |= {"of": piece.turn.id} | ({} if piece.thought else {"thought": False})
        elif piece.key not in self._logged_keys and piece.key not in keys:
            keys.add(piece.key)
            entry["tokens"] = piece.tokens
        return entry


def turn_entry(turn: Turn) -> dict[str, Any]:
    generation = turn.generation
    return {
        "turn": turn.id,
        "number": turn.number,
        "at": turn.at,
        "tokens": generation.tokens,
        "logprobs": generation.logprobs,
        "stop": generation.finish,
        "weights": generation.weights,
        "thread": turn.thread,
        "finish": turn.finish,
        "digest": turn.digest,
        "calls": len(turn.said.calls),
        "tools": turn.tools,
        "purpose": turn.purpose,
    }


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log, the first of which is how it begins. Half a line at its end is passed over."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    if not lines:
        raise LogError(f"{path}: there is not a whole line in it; delete it")
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = orjson.loads(line)
        except ValueError as error:
            raise LogError(f"{path}: line {number} is not JSON ({error}); this is no log of the tap") from None
        if not isinstance(entry, dict) or (number == 1 and entry.get("version") != VERSION):
            raise LogError(f"{path}: line {number} is none of a log of version {VERSION}; this is no log of the tap")
        entries.append(entry)
    return entries


def is_ended(path: Path) -> bool:
    """Whether the session of a log was closed."""
    return any("end" in entry for entry in read_log(path))


def restore_node(contexts: Contexts, entry: Mapping[str, Any]) -> None:
    parent, key = contexts.nodes[entry["parent"]], entry["key"]
    if "of" in entry:
        turn = contexts.turn(entry["of"])
        if turn is None:
            raise LogError(f"node {entry['node']} is of turn {entry['of']}, which is not in the log before it")
        piece = contexts.renderer.turn(turn, thought=entry.get("thought", True))
    else:
        tokens = entry.get("tokens", contexts.renderer.known(key))
        if tokens is None:
            raise LogError(f"node {entry['node']} has no tokens, and none before it has its key; lines are missing")
        piece = Piece(key, entry["role"], tuple(tokens))
    node = contexts.add(parent, piece)
    if node.id != entry["node"]:
        raise LogError(f"node {entry['node']} of the log is node {node.id}; lines of it are missing")


def restore_turn(contexts: Contexts, entry: Mapping[str, Any]) -> Turn:
    weights = tuple((str(version), int(count)) for version, count in entry["weights"])
    generation = Generation(tuple(entry["tokens"]), tuple(entry["logprobs"]), entry["stop"], weights)
    text = contexts.renderer.chat.text(generation.tokens)
    said = read_turn(text, entry["turn"], most_calls=entry["calls"])
    turn = Turn(
        id=entry["turn"],
        number=entry["number"],
        at=entry["at"],
        generation=generation,
        said=said,
        thread=entry["thread"],
        finish=entry["finish"],
        digest=entry["digest"],
        tools=entry["tools"],
        purpose=entry["purpose"],
    )
    contexts.add_turn(turn)
    return turn
