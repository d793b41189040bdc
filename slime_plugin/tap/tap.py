"""The rollouts that are open, and who may speak in them.

Each has a token of its own, which is all that a client needs to know. Only its digest is kept, here and in the log.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from typing import Any

from slime_plugin.bridge.chat.base import Chat
from slime_plugin.bridge.engine.base import Engine
from slime_plugin.bridge.messages import Message
from slime_plugin.config.rollout import Rollout
from slime_plugin.errors import ConfigError
from slime_plugin.tap.log import Log, LogError, read_log
from slime_plugin.tap.session import History, TapSession

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
SUFFIX = ".tap.jsonl"
"""Of a log."""


class Tap:
    """A registry of sessions, as the server asks for them."""

    def __init__(self, chat: Chat, limits: Rollout, logs: Path, *, model: str, keep_thoughts: bool = True) -> None:
        self.chat, self.limits, self.logs, self.model = chat, limits, logs, model
        self._keep_thoughts = keep_thoughts
        self._fingerprint = _fingerprint(chat, keep_thoughts=keep_thoughts)
        self._open: dict[str, TapSession] = {}  # by the digest of their token

    @property
    def sessions(self) -> list[TapSession]:
        return list(self._open.values())

    def session(self, token: str) -> TapSession | None:
        return self._open.get(_digest(token))

    def log_of(self, id: str) -> Path:
        """A name with anything in it that a path could be made of is told apart by a digest instead."""
        name = id if _NAME.fullmatch(id) else hashlib.blake2b(id.encode(), digest_size=12).hexdigest()
        return self.logs / f"{name}{SUFFIX}"

    def open(self, id: str, engine: Engine, seed: int | None = None) -> tuple[TapSession, str]:
        """A new rollout and its token."""
        path = self.log_of(id)
        if path.exists():
            raise ConfigError(
                f"{path}: there is a log of a rollout {id} already; choose another name or another folder"
            )
        token = secrets.token_urlsafe(24)
        log = Log(path)
        with log.unless_it_fails():
            session = self._session(id, engine, log, seed)
            session.begin(_digest(token), self._fingerprint)
        self._open[_digest(token)] = session
        return session, token

    def reopen(self, path: Path, engine: Engine) -> TapSession:
        """A rollout of which there is a log: its clients go on with the tokens they have."""
        log = Log(path)
        with log.unless_it_fails():
            first, *entries = self._checked(log.read_back(), path)
            session = self._session(first["session"], engine, log, first["seed"])
            for entry in entries:
                session.restore(entry)
            session.go_on()
        self._open[first["token"]] = session
        return session

    def read(self, path: Path) -> History:
        """What a log tells. It is left as it is: whoever writes it may still be at work."""
        first, *entries = self._checked(read_log(path), path)
        history = History(first["session"], self.chat, keep_thoughts=self._keep_thoughts)
        for entry in entries:
            history.restore(entry)
        return history

    def _checked(self, entries: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
        if (written := entries[0].get("rendering")) != self._fingerprint:
            raise LogError(
                f"{path}: was written with rendering {written}, and here is {self._fingerprint}; take the model and "
                "the settings (rollout.chat, rollout.thinking, harness.thoughts) that it was written with"
            )
        return entries

    def close(self, session: TapSession) -> None:
        """From now on its token opens nothing."""
        self._open = {digest: other for digest, other in self._open.items() if other is not session}

    def _session(self, id: str, engine: Engine, log: Log, seed: int | None) -> TapSession:
        return TapSession(id, self.chat, engine, self.limits, log, keep_thoughts=self._keep_thoughts, seed=seed)


def _digest(token: str) -> str:
    return hashlib.blake2b(token.encode("utf-8", errors="replace"), digest_size=16).hexdigest()


def _fingerprint(chat: Chat, *, keep_thoughts: bool) -> str:
    """The same for chats that make the same tokens of the same messages: a log holds tokens."""
    words = 'The 12 quick brown foxes, naïve as ever: {"over": [1.5]}\n\tlazy dogs. 東京 🦊'
    messages = [chat.render(Message(role, words)) for role in ("user", "tool")]
    turn = [chat.open_turn(), chat.reply(words), chat.close_turn([]), sorted(chat.stop_ids)]
    return hashlib.blake2b(repr([messages, turn, keep_thoughts]).encode(), digest_size=8).hexdigest()
