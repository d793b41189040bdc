"""The log of a session: one JSON object per line, appended before a client is answered.

``{"session": ..}`` begins a log. ``{"node": ..}`` is a block in the context tree, with its tokens the first time;
``{"turn": ..}`` a sampled turn and its request; ``{"lost": ..}`` sampled tokens that reached no client;
``{"end": ..}`` how the rollout ended. A process that dies loses no answered turn; an incomplete last line is what it
was writing, and is truncated. If the machine dies, entries that were not flushed to disk are lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.files import append_whole, complete_lines, cut_incomplete_line
from slime_plugin.rollout.engine.engine import Generation
from slime_plugin.tap.blocks import Block, Turn, parse_turn
from slime_plugin.tap.context_tree import ContextTree, Node

VERSION = 1


class LogError(MemoryWalkerError):
    """A log that cannot be read or written."""


class Log:
    """Appends whole lines. One process at a time has a log open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the process, however that ends
        except OSError:
            self.close()
            raise LogError(f"{path}: another tap writes to it; end that one, or choose another folder") from None
        self._failure: str | None = None
        self._written_nodes = 1  # the root is not written
        self._written_keys: set[str] = set()

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the log if the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def write(self, contexts: ContextTree, *entries: Mapping[str, Any]) -> None:
        """Append entries and the nodes that are new since the last write: those of a turn's context before it, its own
        after it. Either all of it is written, or nothing, and then no later write succeeds."""
        if self._failure is not None:
            raise LogError(self._failure)
        new_nodes, keys = contexts.nodes[self._written_nodes :], set[str]()
        turns = {entry["turn"] for entry in entries if "turn" in entry}
        own = [node for node in new_nodes if node.block is not None and node.block.turn and node.block.turn.id in turns]
        before = [self._node_entry(node, keys) for node in new_nodes if node not in own]
        lines = [*before, *entries, *(self._node_entry(node, keys) for node in own)]
        try:
            append_whole(self._file, b"".join(orjson.dumps(line) + b"\n" for line in lines))
        except OSError as error:
            self._failure = f"{self.path}: cannot be written: {error.strerror}; free some space and try again"
            raise LogError(self._failure) from error
        self._written_nodes += len(new_nodes)
        self._written_keys |= keys

    def read_back(self) -> list[dict[str, Any]]:
        """Read the entries, and truncate an incomplete last line."""
        entries = read_log(self.path)
        cut_incomplete_line(self._file, self.path)
        return entries

    def mark_written(self, contexts: ContextTree) -> None:
        """Mark all nodes as written."""
        self._written_nodes = len(contexts.nodes)
        self._written_keys = {node.block.key for node in contexts.nodes if node.block is not None}

    def _node_entry(self, node: Node, keys: set[str]) -> dict[str, Any]:
        """Return the entry of a node; a key whose tokens it holds is added to ``keys``."""
        block, parent = node.block, node.parent
        assert block is not None
        assert parent is not None  # only the root has none
        entry: dict[str, Any] = {"node": node.id, "parent": parent.id, "role": block.role, "key": block.key}
        if block.turn is not None:
            entry |= {"of": block.turn.id} | ({} if block.thought else {"thought": False})
        elif block.key not in self._written_keys and block.key not in keys:
            keys.add(block.key)
            entry["tokens"] = block.tokens
        return entry


_TURN_FIELDS = ("number", "at", "thread", "finish", "digest", "tools", "purpose")
"""Fields of :class:`Turn` that its entry holds under the same names."""


def turn_entry(turn: Turn) -> dict[str, Any]:
    generation = turn.generation
    return {
        "turn": turn.id,
        "tokens": generation.tokens,
        "logprobs": generation.logprobs,
        "stop": generation.finish,
        "weights": generation.weights,
        "calls": len(turn.content.calls),
        **{name: getattr(turn, name) for name in _TURN_FIELDS},
    }


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the entries of a log. An incomplete last line is skipped."""
    try:
        lines = complete_lines(path)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error
    if not lines:
        raise LogError(f"{path}: holds no complete line; delete it")
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = orjson.loads(line)
        except ValueError as error:
            raise LogError(f"{path}: line {number} is not JSON ({error}); this is not a log of the tap") from None
        if not isinstance(entry, dict) or (number == 1 and entry.get("version") != VERSION):
            raise LogError(f"{path}: line {number} is not an entry of version {VERSION}; this is not a log of the tap")
        entries.append(entry)
    return entries


def is_ended(path: Path) -> bool:
    """Whether the session of a log was closed."""
    return any("end" in entry for entry in read_log(path))


def restore_node(contexts: ContextTree, entry: Mapping[str, Any]) -> None:
    parent, key = contexts.nodes[entry["parent"]], entry["key"]
    if "of" in entry:
        turn = contexts.turn(entry["of"])
        if turn is None:
            raise LogError(
                f"node {entry['node']} is of turn {entry['of']}, which is not in the log before it; lines are missing"
            )
        block = contexts.renderer.turn(turn, thought=entry.get("thought", True))
    else:
        tokens = entry.get("tokens", contexts.renderer.known(key))
        if tokens is None:
            raise LogError(f"node {entry['node']} has no tokens, and none before it has its key; lines are missing")
        block = Block(key, entry["role"], tuple(tokens))
    node = contexts.add(parent, block)
    if node.id != entry["node"]:
        raise LogError(f"node {entry['node']} of the log would be node {node.id}; lines are missing")


def restore_turn(contexts: ContextTree, entry: Mapping[str, Any]) -> Turn:
    weights = tuple((str(version), int(count)) for version, count in entry["weights"])
    generation = Generation(tuple(entry["tokens"]), tuple(entry["logprobs"]), entry["stop"], weights)
    text = contexts.renderer.chat.text(generation.tokens)
    content = parse_turn(text, entry["turn"], max_calls=entry["calls"])
    fields = {name: entry[name] for name in _TURN_FIELDS}
    turn = Turn(id=entry["turn"], generation=generation, content=content, **fields)
    contexts.add_turn(turn)
    return turn
