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
from slime_plugin.tap.contexts import Contexts, Found
from slime_plugin.tap.dialects.conversation import Memory
from slime_plugin.tap.log import VERSION, Log, LogError, restore_node, restore_turn, turn_entry
from slime_plugin.tap.messages import Answer, Finish, Payload, TapError, TooLongError
from slime_plugin.tap.pieces import Purpose, Turn, read_turn, thought_length
from slime_plugin.tap.serving import Ask

_log = logging.getLogger(__name__)

SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id")
AGENT_HEADER = "x-claude-code-agent-id"
CLASS_HEADER = "x-claude-code-request-class"
PURPOSES: dict[str, Purpose] = {"compaction": "summary", "auxiliary": "auxiliary", "side_reply": "auxiliary"}
"""What a request of these classes is for; those of the others are turns of a conversation."""
PARENT_HEADER = "x-parent-session-id"
LONGEST_NAME = 200
MOST_AT_ONCE = 32
"""Turns of one session that are sampled at the same time. Agents have a few subagents side by side."""
MOST_ASIDE = 8
"""How often more than ``rollout.turns`` says a session may ask in all: titles, summaries, hang-ups."""
HEAVY = 2**16
"""Characters of a request that are new, from which on it is tokenised in a thread: other sessions do not wait."""


@dataclass(frozen=True, slots=True)
class Thread:
    """Which of its conversations a client says a request belongs to. Nothing, if it says nothing."""

    name: str
    parent: str | None
    """The conversation that this one works for; None for one that a user began."""
    purpose: Purpose = ""
    """Of the request, where a client says so."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Thread:
        """OpenCode has a session for every agent and names its parent; agents of Claude Code share the session."""
        session = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")[:LONGEST_NAME]
        agent = headers.get(AGENT_HEADER, "")[:LONGEST_NAME]
        purpose = PURPOSES.get(headers.get(CLASS_HEADER, ""), "")
        if agent:
            return cls(f"{session}/{agent}", session, purpose)
        return cls(session, headers.get(PARENT_HEADER, "")[:LONGEST_NAME] or None, purpose)


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is being answered, or was."""

    answer: asyncio.Future[Answer]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    """Clients."""

    @property
    def is_wanted(self) -> bool:
        return self.waiting > 0 or not self.stop.is_set()


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

    @property
    def weight_version(self) -> str | None:
        """Of the weights that sampled last."""
        versions = [version for turn in self.turns[-1:] for version, _ in turn.generation.weights]
        return versions[-1] if versions else None

    def restore(self, entry: Mapping[str, Any]) -> None:
        """Take the next line of a log, which is not its first."""
        try:
            if "node" in entry:
                restore_node(self.contexts, entry)
            elif "turn" in entry:
                turn = restore_turn(self.contexts, entry)
                self.parents.setdefault(turn.thread, entry["parent"])
            elif "lost" in entry:
                self.lost[entry["lost"]] += entry["tokens"]
        except (LookupError, TypeError) as error:
            raise LogError(
                f"{dict(entry)!r:.80} does not fit what is before it ({error!r}); lines are missing"
            ) from None


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
        self._running: set[asyncio.Future[Answer]] = set()
        self._contexts_in_use = asyncio.Lock()
        self._closed = False
        self._number = 0
        self._sampling = 0  # turns under way
        self._with_tools = 0  # turns, those under way included
        self._hung_up = 0  # turns that nobody waited for
        self._sampled = 0

    def begin(self, token: str, rendering: str) -> None:
        """Write the first line of the log. ``token`` is a digest: the log opens no session."""
        first = {"session": self.id, "version": VERSION, "token": token, "seed": self.seed, "rendering": rendering}
        self._file.write(self.contexts, first)

    def restore(self, entry: Mapping[str, Any]) -> None:
        """After the last line, :meth:`go_on`."""
        super().restore(entry)
        if "turn" in entry:
            turn = self.turns[-1]
            self._number = max(self._number, turn.number + 1)
            self._with_tools += turn.tools
            self._sampled += turn.sampled
            asked = _Asked(asyncio.get_running_loop().create_future())
            asked.answer.set_result(self._answer(turn, entry["model"]))
            self._asked[f"{turn.thread}\n{turn.digest}"] = asked

    def go_on(self) -> None:
        """Everything that the log holds was taken."""
        self._file.holds(self.contexts)

    # What the server asks

    async def answer(self, ask: Ask) -> Answer:
        thread = Thread.of(ask.headers)
        key = f"{thread.name}\n{ask.digest}"
        asked = self._asked.get(key)
        if asked is None or _failed(asked.answer) or (asked.stop.is_set() and not asked.answer.done()):
            asked = self._begin(key, ask, thread)
        else:
            self.retries += 1
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.answer)
        except asyncio.CancelledError:
            if asked.waiting == 1 and not asked.answer.done():
                asked.stop.set()
            raise
        finally:
            asked.waiting -= 1

    async def count(self, payload: Payload) -> int:
        async with self._contexts_in_use:
            return (await self._find(payload)).length + len(self._chat.open_turn())

    def stop(self, ending: Ending) -> None:
        """Answer nothing more; turns under way are aborted."""
        self.ending = ending
        self.over.set()
        for asked in self._asked.values():
            asked.stop.set()

    async def close(self, ending: Mapping[str, Any]) -> None:
        """Answer nothing more, wait for what is under way to be counted, and end the log."""
        self._closed = True
        for asked in self._asked.values():
            asked.stop.set()
        await asyncio.gather(*self._running, return_exceptions=True)
        try:
            self._file.write(self.contexts, {"end": dict(ending)})
        except LogError as error:  # what was answered is in it; that it ended is not
            _log.warning("rollout %s: %s", self.id, error)
        finally:
            self._file.close()

    # How a turn comes about

    def _begin(self, key: str, ask: Ask, thread: Thread) -> _Asked:
        asked = self._asked[key] = _Asked(asyncio.get_running_loop().create_future())
        asked.answer = asyncio.create_task(self._sample(ask, thread, asked))
        self._running.add(asked.answer)

        def ended(answer: asyncio.Future[Answer]) -> None:
            self._running.discard(answer)
            if _failed(answer) and self._asked.get(key) is asked:
                del self._asked[key]  # its error would keep the request

        asked.answer.add_done_callback(ended)
        return asked

    async def _sample(self, ask: Ask, thread: Thread, asked: _Asked) -> Answer:
        tools = bool(ask.payload.tools)
        self._check_limits(tools)
        self._sampling += 1
        self._with_tools += tools
        overflowed = False
        try:
            turn = await self._turn(ask, thread, asked)
        except TapError as error:
            overflowed = isinstance(error, TooLongError)
            self._with_tools -= tools
            raise
        finally:
            self._sampling -= 1
            if thread.parent is None and (tools or not self._with_tools):
                self.overflowed = overflowed
        return self._answer(turn, ask.payload.model)

    async def _turn(self, ask: Ask, thread: Thread, asked: _Asked) -> Turn:
        """Nothing of a request is kept before there is an answer to it."""
        payload = ask.payload
        async with self._contexts_in_use:
            found = await self._find(payload, thread.name)
        length = found.length + len(self._chat.open_turn())
        room = self._limits.context_tokens - length
        if room < 1:
            raise TooLongError(length, self._limits.context_tokens)
        most = min(self._limits.turn_tokens, payload.max_tokens or self._limits.turn_tokens, room)
        number, self._number = self._number, self._number + 1
        prompt = [*found.tokens(), *self._chat.open_turn()]
        generation = await self._generate(Request(prompt, most, self.id, self._seed_of(found), None, asked.stop))
        if generation.finish == "abort" or not generation.tokens or not asked.is_wanted:
            self._hung_up += 1
            self._lose("cancelled" if asked.stop.is_set() else "aborted", len(generation.tokens))
            raise TapError("overloaded", "the turn was aborted; ask again")
        id = hashlib.blake2b(f"{self.id}\n{number}".encode(), digest_size=10).hexdigest()
        may_call = payload.may_call and bool(payload.tools)  # an agent without tools reads text as it is
        most_calls = 0 if not may_call else 1 if payload.one_call else None
        said = read_turn(self._chat.text(generation.tokens), id, most_calls=most_calls)
        finish: Finish = "calls" if said.calls else "stop"
        if generation.finish == "length":
            finish = "context" if len(generation.tokens) == room else "length"
        async with self._contexts_in_use:
            at = self.contexts.place(found).id
            tools, purpose = bool(payload.tools), thread.purpose
            turn = Turn(id, number, at, generation, said, thread.name, finish, ask.digest, tools, purpose)
            self.contexts.add_turn(turn)
            self.parents.setdefault(thread.name, thread.parent)
            self._sampled += turn.sampled
            self._write({**turn_entry(turn), "parent": thread.parent, "model": payload.model, "time": time.time()})
        return turn

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

    async def _find(self, payload: Payload, thread: str | None = None) -> Found:
        """Where a request belongs. Whoever asks has the contexts to itself."""
        if len(payload.parts) > self._limits.context_tokens:  # each of them is a token at least
            raise TooLongError(len(payload.parts), self._limits.context_tokens)
        try:
            if payload.size > HEAVY and self.contexts.news(payload) > HEAVY:
                found = await asyncio.to_thread(self.contexts.find, payload, thread)
            else:
                found = self.contexts.find(payload, thread)
        except ChatError as error:
            raise TapError("invalid", f"the conversation cannot be rendered: {error}", "messages") from error
        if not found.length:
            raise TapError("invalid", "there is no message in the request; send at least one", "messages")
        return found

    def _check_limits(self, tools: bool) -> None:
        limits = self._limits
        if not self.over.is_set():
            every = len(self.turns) + self._hung_up + self._sampling
            # Titles and the like, asked for without tools, do not count in a session that has some.
            counted = self._with_tools if tools else 0 if self._with_tools else every
            if counted >= limits.turns or every >= MOST_ASIDE * limits.turns:
                if self._sampling:  # what is under way is still answered
                    raise TapError("overloaded", "the last turns of this rollout are under way; ask again later")
                self.stop(Ending("truncated", "turns"))
            elif limits.sampled_tokens is not None and self._sampled >= limits.sampled_tokens:
                self.stop(Ending("truncated", "sampled tokens"))
        if self._closed or self.over.is_set():
            why = f" ({self.ending.stop})" if self.ending is not None else ""
            raise TapError("invalid", f"this rollout is over{why}; begin another one")
        if self._sampling >= MOST_AT_ONCE:
            raise TapError("overloaded", f"{MOST_AT_ONCE} turns are under way in this rollout; ask again later")
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

    def _seed_of(self, found: Found) -> int | None:
        """A seed that depends on the context and on how often the policy was asked in it, not on the order in which
        conversations that run side by side ask."""
        if self.seed is None:
            return None
        path = "/".join(piece.key for piece in found.pieces() if piece.turn is None)
        again = self.contexts.asked_at(found)
        words = f"{self.seed}/{again}/{path}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest()) >> 1


def _failed(answer: asyncio.Future[Answer]) -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)
