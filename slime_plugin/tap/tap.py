"""The open sessions, by the token that their clients authenticate with.

Each session has a token of its own. Only its digest is kept, here and in the log.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from typing import Any

from slime_plugin.config.rollout import Rollout
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.chat.chat import Chat
from slime_plugin.rollout.engine.engine import Engine
from slime_plugin.rollout.messages import Message
from slime_plugin.tap.payload import Thread, ThreadOf
from slime_plugin.tap.session_log import Log, LogError, read_log
from slime_plugin.tap.tap_session import SessionHistory, TapSession

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
LOG_SUFFIX = ".tap.jsonl"


class Tap:
    """Opens, reopens and closes sessions."""

    def __init__(
        self,
        chat: Chat,
        limits: Rollout,
        logs: Path,
        *,
        model: str,
        thread_of: ThreadOf = lambda headers: Thread(),
        keep_thoughts: bool = True,
    ) -> None:
        self.chat, self.limits, self.logs, self.model = chat, limits, logs, model
        self._thread_of, self._keep_thoughts = thread_of, keep_thoughts
        self._fingerprint = _fingerprint(chat, keep_thoughts=keep_thoughts)
        self._open: dict[str, TapSession] = {}  # by the digest of their token

    @property
    def sessions(self) -> list[TapSession]:
        return list(self._open.values())

    def session(self, token: str) -> TapSession | None:
        return self._open.get(_digest(token))

    def log_of(self, id: str) -> Path:
        """Path of a session's log; an id that could form a path is replaced by its digest."""
        name = id if _NAME.fullmatch(id) else hashlib.blake2b(id.encode(), digest_size=12).hexdigest()
        return self.logs / f"{name}{LOG_SUFFIX}"

    def open(self, id: str, engine: Engine, seed: int | None = None) -> tuple[TapSession, str]:
        """Open a session; return it with its token."""
        path = self.log_of(id)
        if path.exists():
            raise ConfigError(f"{path}: a log of rollout {id} exists already; choose another name or another folder")
        token = secrets.token_urlsafe(24)
        log = Log(path)
        with log.closed_on_error():
            session = self._session(id, engine, log, seed)
            session.begin(_digest(token), self._fingerprint)
        self._open[_digest(token)] = session
        return session, token

    def reopen(self, path: Path, engine: Engine) -> TapSession:
        """Continue the session of a log; its clients keep their token."""
        log = Log(path)
        with log.closed_on_error():
            first, *entries = self._checked(log.read_back(), path)
            session = self._session(first["session"], engine, log, first["seed"])
            session.resume(entries)
        self._open[first["token"]] = session
        return session

    def read(self, path: Path) -> SessionHistory:
        """Read a log without changing it: another process may still be writing it."""
        first, *entries = self._checked(read_log(path), path)
        history = SessionHistory(first["session"], self.chat, keep_thoughts=self._keep_thoughts)
        for entry in entries:
            history.restore(entry)
        return history

    def _checked(self, entries: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
        if (written := entries[0].get("rendering")) != self._fingerprint:
            raise LogError(
                f"{path}: was written with rendering {written}, not {self._fingerprint}; use the model and the "
                "settings (rollout.chat, rollout.thinking, harness.thoughts) that it was written with"
            )
        return entries

    def close(self, session: TapSession) -> None:
        """Revoke the token of a session."""
        self._open = {digest: other for digest, other in self._open.items() if other is not session}

    def _session(self, id: str, engine: Engine, log: Log, seed: int | None) -> TapSession:
        return TapSession(
            *(id, self.chat, engine, self.limits, log),
            thread_of=self._thread_of,
            keep_thoughts=self._keep_thoughts,
            seed=seed,
        )


def _digest(token: str) -> str:
    return hashlib.blake2b(token.encode("utf-8", errors="replace"), digest_size=16).hexdigest()


def _fingerprint(chat: Chat, *, keep_thoughts: bool) -> str:
    """Equal for chats that render the same messages to the same tokens: a log holds tokens."""
    words = 'The 12 quick brown foxes, naïve as ever: {"over": [1.5]}\n\tlazy dogs. 東京 🦊'
    messages = [chat.render(Message(role, words)) for role in ("user", "tool")]
    turn = [chat.open_turn(), chat.reply(words), chat.close_turn([]), sorted(chat.stop_ids)]
    return hashlib.blake2b(repr([messages, turn, keep_thoughts]).encode(), digest_size=8).hexdigest()
