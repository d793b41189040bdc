"""One rollout as the tap sees it: requests of one or several conversations, answered by the policy.

Every request is answered once. One that comes again with the same body (clients retry what they believe lost) gets the
answer that was sampled for it, or waits for it; nothing is sampled twice. A turn is written to the log before it is
answered. When nobody waits for a turn any more it is aborted, and the tokens that were sampled by then are counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_plugin.bridge.chat.base import Chat, ChatError
from slime_plugin.bridge.engine.base import Engine, EngineError, Generation, RefusedError, Request
from slime_plugin.bridge.session import Ending
from slime_plugin.config.rollout import Rollout
from slime_plugin.tap.contexts import Contexts, Found, Node
from slime_plugin.tap.dialects.conversation import Memory
from slime_plugin.tap.log import Log, LogError, restore_node, restore_turn, turn_entry
from slime_plugin.tap.messages import Answer, Finish, Payload, TapError, TooLongError
from slime_plugin.tap.pieces import Turn, read_turn, thought_length
from slime_plugin.tap.serving import Ask

_log = logging.getLogger(__name__)

SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id")
AGENT_HEADER = "x-claude-code-agent-id"
PARENT_HEADER = "x-parent-session-id"
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Thread:
    """Which of its conversations a client says a request belongs to. Nothing, if it says nothing."""

    name: str
    parent: str | None
    """The conversation that this one works for; None for one that a user began."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Thread:
        """OpenCode has a session for every agent and names its parent; agents of Claude Code share the session."""
        session = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")[:LONGEST_NAME]
        agent = headers.get(AGENT_HEADER, "")[:LONGEST_NAME]
        if agent:
            return cls(f"{session}/{agent}", session)
        return cls(session, headers.get(PARENT_HEADER, "")[:LONGEST_NAME] or None)


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is being answered, or was."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Answer] | None = None
    waiting: int = 0


class History:
    """What happened in a rollout, as far as its log tells: all that a record is recovered from."""

    def __init__(self, id: str, chat: Chat, *, keep_thoughts: bool) -> None:
        self.id = id
        self.contexts = Contexts(chat, keep_thoughts=keep_thoughts)
        self.parents: dict[str, str | None] = {}
        """The threads, and which thread each works for."""
        self.lost: Counter[str] = Counter()
        """Sampled tokens that no client was given, by cause."""

    @property
    def turns(self) -> list[Turn]:
        """In the order in which they were finished."""
        return self.contexts.turns

    def restore(self, entry: Mapping[str, Any]) -> None:
        """Take the next line of a log, which is not its first."""
        if "node" in entry:
            restore_node(self.contexts, entry)
        elif "turn" in entry:
            turn = restore_turn(self.contexts, entry)
            self.parents.setdefault(turn.thread, entry["parent"])
        elif "lost" in entry:
            self.lost[entry["lost"]] += entry["tokens"]


class TapSession(History):
    """Answers the requests of one rollout."""

    def __init__(
        self, id: str, chat: Chat, engine: Engine, limits: Rollout, log: Log, *, keep_thoughts: bool, seed: int | None
    ) -> None:
        super().__init__(id, chat, keep_thoughts=keep_thoughts)
        self.memory = Memory()
        self.retries = 0
        """Requests that were answered with what had been sampled before."""
        self.ending: Ending | None = None
        """Set once the policy may be asked no more, or the engine failed."""
        self.overflowed = False
        """The last that was asked for did not fit."""
        self.over = asyncio.Event()
        """Set together with an ending that no client can do anything about."""
        self.seed = seed
        self._chat, self._engine, self._limits, self._file = chat, engine, limits, log
        self._asked: dict[str, _Asked] = {}
        self._number = 0
        self._with_tools = 0  # turns
        self._sampled = 0

    def begin(self, token: str) -> None:
        """Write the first line of the log. ``token`` is a digest: the log opens no session."""
        self._file.write(self.contexts, {"session": self.id, "version": 1, "token": token, "seed": self.seed})

    def restore(self, entry: Mapping[str, Any]) -> None:
        """After the last line, :meth:`go_on`."""
        super().restore(entry)
        if "turn" in entry:
            turn = self.turns[-1]
            self._number = max(self._number, turn.number + 1)
            self._with_tools += turn.tools
            self._sampled += turn.sampled
            done = asyncio.get_running_loop().create_task(_given(self._answer(turn, entry["model"])))
            self._asked[f"{turn.thread}\n{turn.digest}"] = _Asked(task=done)

    def go_on(self) -> None:
        """Everything that the log holds was taken."""
        self._file.holds(self.contexts)

    # What the server asks

    async def answer(self, ask: Ask) -> Answer:
        thread = Thread.of(ask.headers)
        key = f"{thread.name}\n{ask.digest}"
        asked = self._asked.get(key)
        if asked is None or asked.stop.is_set() or (asked.task is not None and _failed(asked.task)):
            asked = self._asked[key] = _Asked()
            asked.task = asyncio.create_task(self._sample(ask, thread, asked.stop))
        else:
            self.retries += 1
        assert asked.task is not None
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if asked.waiting == 1 and not asked.task.done():
                asked.stop.set()
                asked.task.add_done_callback(_quietly)
            raise
        finally:
            asked.waiting -= 1

    def count(self, payload: Payload) -> int:
        return self._find(payload).length + len(self._chat.open_turn())

    def stop(self, ending: Ending) -> None:
        """Answer nothing more; turns under way are aborted."""
        self.ending = ending
        self.over.set()
        for asked in self._asked.values():
            asked.stop.set()

    async def close(self, ending: Mapping[str, Any]) -> None:
        """Wait for what is under way to be counted, and end the log."""
        tasks = [asked.task for asked in self._asked.values() if asked.task is not None and not asked.task.done()]
        for asked in self._asked.values():
            asked.stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._file.write(self.contexts, {"end": dict(ending)})
        self._file.close()

    # How a turn comes about

    async def _sample(self, ask: Ask, thread: Thread, stop: asyncio.Event) -> Answer:
        self._check_limits(ask.payload)
        found = self._find(ask.payload)
        length = found.length + len(self._chat.open_turn())
        room = self._limits.context_tokens - length
        self.overflowed = room < 1
        if self.overflowed:
            raise TooLongError(length, self._limits.context_tokens)
        node = self.contexts.place(found)
        self._write()
        prompt = [*node.tokens(), *self._chat.open_turn()]
        most = min(self._limits.turn_tokens, ask.payload.max_tokens or self._limits.turn_tokens, room)
        number, self._number = self._number, self._number + 1
        self.parents.setdefault(thread.name, thread.parent)
        generation = await self._generate(Request(prompt, most, self.id, self._seed_of(node), None, stop))
        if generation.finish == "abort" or not generation.tokens:
            cause = "cancelled" if stop.is_set() else "aborted"
            self._lose(cause, len(generation.tokens))
            raise TapError("overloaded", "the turn was aborted; ask again")
        id = hashlib.blake2b(f"{self.id}\n{number}".encode(), digest_size=10).hexdigest()
        may_call = ask.payload.may_call and bool(ask.payload.tools)  # an agent without tools reads text as it is
        said = read_turn(self._chat.text(generation.tokens), id, may_call=may_call)
        finish: Finish = "calls" if said.calls else "stop"
        if generation.finish == "length":
            finish = "context" if most == room and len(generation.tokens) == room else "length"
        turn = Turn(id, number, node.id, generation, said, thread.name, finish, ask.digest, bool(ask.payload.tools))
        self.contexts.add_turn(turn)
        self._with_tools += turn.tools
        self._sampled += turn.sampled
        model = ask.payload.model
        self._write({**turn_entry(turn), "parent": thread.parent, "model": model, "time": time.time()})
        return self._answer(turn, model)

    def _answer(self, turn: Turn, model: str) -> Answer:
        thought = turn.said.thought
        return Answer(
            id=turn.id,
            model=model,
            text=turn.said.text,
            calls=turn.said.calls,
            thought=thought,
            finish=turn.finish,
            prompt_tokens=self.contexts.nodes[turn.at].length + len(self._chat.open_turn()),
            sampled_tokens=turn.sampled,
            thought_tokens=0 if thought is None else thought_length(self._chat, turn.generation.tokens),
            created=int(time.time()),
        )

    async def _generate(self, request: Request) -> Generation:
        try:
            return await self._engine.generate(request)
        except RefusedError as error:
            raise TapError("invalid", f"the engine refuses the turn: {error}") from error
        except EngineError as error:
            _log.warning("rollout %s: %s", self.id, error)
            self.ending = Ending("failed", "engine", str(error))  # unless the client asks again, with success
            raise TapError("overloaded", "the engine does not answer; ask again") from error

    def _find(self, payload: Payload) -> Found:
        try:
            found = self.contexts.find(payload)
        except ChatError as error:
            raise TapError("invalid", f"the conversation cannot be rendered: {error}", "messages") from error
        if not found.length:
            raise TapError("invalid", "there is no message in the request; send at least one", "messages")
        return found

    def _check_limits(self, payload: Payload) -> None:
        limits, sampled = self._limits, self._sampled
        # Titles and the like, asked for without tools, do not count in a session that has some.
        counts = bool(payload.tools) or not self._with_tools
        if not self.over.is_set() and counts and (self._with_tools or len(self.turns)) >= limits.turns:
            self.stop(Ending("truncated", "turns"))
        if not self.over.is_set() and limits.sampled_tokens is not None and sampled >= limits.sampled_tokens:
            self.stop(Ending("truncated", "sampled tokens"))
        if self.over.is_set() and self.ending is not None:
            raise TapError("invalid", f"this rollout is over ({self.ending.stop}); begin another one")
        self.ending = None

    def _write(self, *entries: Mapping[str, Any]) -> None:
        try:
            self._file.write(self.contexts, *entries)
        except LogError as error:
            self.stop(Ending("failed", "error", str(error)))
            raise TapError("internal", "the turn could not be written down") from error

    def _lose(self, cause: str, tokens: int) -> None:
        if tokens:
            self.lost[cause] += tokens
            self._write({"lost": cause, "tokens": tokens})

    def _seed_of(self, node: Node) -> int | None:
        """A seed that depends on the context and on how often the policy was asked in it, not on the order in which
        conversations that run side by side ask."""
        if self.seed is None:
            return None
        path = "/".join(piece.key for piece in node.pieces() if piece.turn is None)
        words = f"{self.seed}/{len(node.children)}/{path}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest()) >> 1


async def _given(answer: Answer) -> Answer:
    return answer


def _failed(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _quietly(task: asyncio.Task[Answer]) -> None:
    """Nobody waits for it; that it failed is no news."""
    if not task.cancelled():
        task.exception()
