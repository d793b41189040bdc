"""One rollout of an agent: the requests of its conversations, answered by the policy.

Every request is answered once. A retry (clients send the same body again when they believe it lost) gets the answer
that was sampled for it, or waits for it; nothing is sampled twice. A turn is logged before it is answered. When no
client waits for a turn any more it is aborted, and the tokens that were sampled by then are counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_plugin.config.rollout import Rollout
from slime_plugin.rollout.base_rollout import Ending
from slime_plugin.rollout.chat.chat import Chat, ChatError
from slime_plugin.rollout.engine.engine import Engine, EngineError, Generation, RefusedError, Request
from slime_plugin.tap.blocks import Turn, parse_turn, thought_length
from slime_plugin.tap.context_tree import ContextTree, Node, PromptMatch
from slime_plugin.tap.payload import (
    Answer,
    ClientRequest,
    Payload,
    StopReason,
    TapError,
    Thread,
    ThreadOf,
    TooLongError,
)
from slime_plugin.tap.session_log import VERSION, Log, LogError, restore_node, restore_turn, turn_entry
from slime_plugin.tap.wire.parts_builder import ParseCache

_log = logging.getLogger(__name__)

MAX_THREAD_NAME_CHARS = 400
MAX_CONCURRENT_TURNS = 32
"""Of one session. Agents run a few subagents side by side."""
MAX_TURNS_FACTOR = 8
"""All turns of a session, titles, summaries and aborted ones included, are limited to this times ``rollout.turns``."""
THREADED_CHARS = 2**16
"""A request with more new characters is tokenized in a thread, so that other sessions do not wait."""


class SessionHistory:
    """The part of a rollout that its log restores; its record is recovered from it."""

    def __init__(self, id: str, chat: Chat, *, keep_thoughts: bool) -> None:
        self.id = id
        self.contexts = ContextTree(chat, keep_thoughts=keep_thoughts)
        self.parents: dict[str, str | None] = {}
        """Threads, and the thread that started each; None for a user's."""
        self.lost: Counter[str] = Counter()
        """Sampled tokens that reached no client, by cause."""

    @property
    def turns(self) -> list[Turn]:
        """In the order in which they finished."""
        return self.contexts.turns

    @property
    def weight_version(self) -> str | None:
        """Version of the weights that sampled last."""
        versions = [version for turn in self.turns[-1:] for version, _ in turn.generation.weights]
        return versions[-1] if versions else None

    def restore(self, entry: Mapping[str, Any]) -> None:
        """Apply an entry of a log, other than its first."""
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
                f"{dict(entry)!r:.80} does not fit the entries before it ({error!r}); lines are missing"
            ) from None


@dataclass(slots=True, eq=False)
class _PendingAnswer:
    """The answer to a request and all its retries."""

    answer: asyncio.Future[Answer]
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    clients: int = 0
    """Number of clients that wait for it."""

    @property
    def is_wanted(self) -> bool:
        return self.clients > 0 or not self.stop.is_set()

    @property
    def is_lost(self) -> bool:
        """Failed, or being aborted: a retry has to sample again."""
        if self.answer.done():
            return self.answer.cancelled() or self.answer.exception() is not None
        return self.stop.is_set()


class TapSession(SessionHistory):
    """Answers the requests of one rollout."""

    def __init__(
        self,
        id: str,
        chat: Chat,
        engine: Engine,
        limits: Rollout,
        log: Log,
        *,
        thread_of: ThreadOf,
        keep_thoughts: bool,
        seed: int | None,
    ) -> None:
        super().__init__(id, chat, keep_thoughts=keep_thoughts)
        self.parse_cache = ParseCache()
        self.retries = 0
        self.ending: Ending | None = None
        """Set once a limit is reached, or while the engine fails."""
        self.overflowed = False
        """Whether the last request of the user's conversation did not fit."""
        self.over = asyncio.Event()
        """Set once the ending is final."""
        self.seed = seed
        self._chat, self._engine, self._limits, self._log, self._thread_of = chat, engine, limits, log, thread_of
        self._pending: dict[str, _PendingAnswer] = {}  # by thread and digest
        self._running: set[asyncio.Future[Answer]] = set()
        self._contexts_lock = asyncio.Lock()
        self._closed = False
        self._next_number = 0
        # Numbers of turns: being sampled; requested with tools, including those being sampled; aborted.
        self._sampling = self._with_tools = self._aborted = 0
        self._sampled_tokens = 0

    def begin(self, token: str, rendering: str) -> None:
        """Write the first line of the log. ``token`` is a digest: the log opens no session."""
        first = {"session": self.id, "version": VERSION, "token": token, "seed": self.seed, "rendering": rendering}
        self._log.write(self.contexts, first)

    def resume(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Apply the entries after the first, and continue where the log ends."""
        for entry in entries:
            self.restore(entry)
            if "turn" in entry:
                turn = self.turns[-1]
                self._next_number = max(self._next_number, turn.number + 1)
                self._with_tools += turn.tools
                self._sampled_tokens += turn.sampled
                pending = _PendingAnswer(asyncio.get_running_loop().create_future())
                pending.answer.set_result(self._answer(turn, entry["model"]))
                self._pending[_key(turn.thread, turn.digest)] = pending
        self._log.mark_written(self.contexts)

    async def answer(self, request: ClientRequest) -> Answer:
        thread = self._thread_of(request.headers)
        parent = None if thread.parent is None else thread.parent[:MAX_THREAD_NAME_CHARS]
        thread = replace(thread, name=thread.name[:MAX_THREAD_NAME_CHARS], parent=parent)
        key = _key(thread.name, request.digest)
        pending = self._pending.get(key)
        if pending is None or pending.is_lost:
            pending = self._start(key, request, thread)
        else:
            self.retries += 1
        pending.clients += 1
        try:
            return await asyncio.shield(pending.answer)
        except asyncio.CancelledError:
            if pending.clients == 1 and not pending.answer.done():
                pending.stop.set()
            raise
        finally:
            pending.clients -= 1

    async def count(self, payload: Payload) -> int:
        async with self._contexts_lock:
            return self._prompt_tokens(await self._match(payload))

    def stop(self, ending: Ending) -> None:
        """Sample no more turns, and abort those being sampled."""
        self.ending = ending
        self.over.set()
        self._stop_all()

    async def close(self, ending: Mapping[str, Any]) -> None:
        """Sample no more turns, wait until aborted ones are counted, and end the log."""
        self._closed = True
        self._stop_all()
        await asyncio.gather(*self._running, return_exceptions=True)
        try:
            self._log.write(self.contexts, {"end": dict(ending)})
        except LogError as error:  # all that was answered is in it
            _log.warning("rollout %s: %s", self.id, error)
        finally:
            self._log.close()

    def _stop_all(self) -> None:
        for pending in self._pending.values():
            pending.stop.set()

    def _start(self, key: str, request: ClientRequest, thread: Thread) -> _PendingAnswer:
        pending = self._pending[key] = _PendingAnswer(asyncio.get_running_loop().create_future())
        pending.answer = asyncio.create_task(self._sample(request, thread, pending))
        self._running.add(pending.answer)

        def finished(answer: asyncio.Future[Answer]) -> None:
            self._running.discard(answer)
            if pending.is_lost and self._pending.get(key) is pending:
                del self._pending[key]  # its exception would keep the request alive

        pending.answer.add_done_callback(finished)
        return pending

    async def _sample(self, request: ClientRequest, thread: Thread, pending: _PendingAnswer) -> Answer:
        tools = bool(request.payload.tools)
        self._check_limits(tools)
        self._sampling += 1
        self._with_tools += tools
        overflowed = False
        try:
            turn = await self._turn(request, thread, pending)
        except TapError as error:
            overflowed = isinstance(error, TooLongError)
            self._with_tools -= tools
            raise
        finally:
            self._sampling -= 1
            if thread.parent is None and (tools or not self._with_tools):
                self.overflowed = overflowed
        return self._answer(turn, request.payload.model)

    async def _turn(self, request: ClientRequest, thread: Thread, pending: _PendingAnswer) -> Turn:
        """Sample and log one turn. Nothing of a request is kept before it has an answer."""
        payload = request.payload
        async with self._contexts_lock:
            match = await self._match(payload, thread.name)
        length = self._prompt_tokens(match)
        room = self._limits.context_tokens - length
        if room < 1:
            raise TooLongError(length, self._limits.context_tokens)
        max_tokens = min(self._limits.turn_tokens, payload.max_tokens or self._limits.turn_tokens, room)
        number, self._next_number = self._next_number, self._next_number + 1
        prompt = [*match.tokens(), *self._chat.open_turn()]
        generation = await self._generate(
            Request(prompt, max_tokens, self.id, self._seed_of(match), None, pending.stop)
        )
        if generation.finish == "abort" or not generation.tokens or not pending.is_wanted:
            self._aborted += 1
            self._count_lost("cancelled" if pending.stop.is_set() else "aborted", len(generation.tokens))
            raise TapError("overloaded", "the turn was aborted; retry")
        id = hashlib.blake2b(f"{self.id}\n{number}".encode(), digest_size=10).hexdigest()
        may_call = payload.may_call and bool(payload.tools)  # an agent without tools reads text as it is
        max_calls = 0 if not may_call else 1 if payload.one_call else None
        content = parse_turn(self._chat.text(generation.tokens), id, max_calls=max_calls)
        finish: StopReason = "calls" if content.calls else "stop"
        if generation.finish == "length":
            finish = "context" if len(generation.tokens) == room else "length"
        async with self._contexts_lock:
            turn = Turn(
                id=id,
                number=number,
                at=self.contexts.insert(match).id,
                generation=generation,
                content=content,
                thread=thread.name,
                finish=finish,
                digest=request.digest,
                tools=bool(payload.tools),
                purpose=thread.purpose,
            )
            self.contexts.add_turn(turn)
            self.parents.setdefault(thread.name, thread.parent)
            self._sampled_tokens += turn.sampled
            self._write({**turn_entry(turn), "parent": thread.parent, "model": payload.model, "time": time.time()})
        return turn

    def _answer(self, turn: Turn, model: str) -> Answer:
        content = turn.content
        return Answer(
            id=turn.id,
            model=model,
            text=content.text,
            calls=content.calls,
            thought=content.thought,
            finish=turn.finish,
            prompt_tokens=self._prompt_tokens(self.contexts.nodes[turn.at]),
            sampled_tokens=turn.sampled,
            thought_tokens=0 if content.thought is None else thought_length(self._chat, turn.generation.tokens),
            created=int(time.time()),
        )

    def _prompt_tokens(self, context: PromptMatch | Node) -> int:
        return context.length + len(self._chat.open_turn())

    async def _generate(self, request: Request) -> Generation:
        try:
            return await self._engine.generate(request)
        except RefusedError as error:
            raise TapError("invalid", f"the engine refuses the turn: {error}") from error
        except EngineError as error:
            _log.warning("rollout %s: %s", self.id, error)
            self.ending = Ending("failed", "engine", str(error))  # unless a later request succeeds
            raise TapError("overloaded", "the engine does not answer; retry") from error

    async def _match(self, payload: Payload, thread: str | None = None) -> PromptMatch:
        """Find the context of a request. The caller holds the lock."""
        if len(payload.parts) > self._limits.context_tokens:  # each takes at least one token
            raise TooLongError(len(payload.parts), self._limits.context_tokens)
        try:
            if payload.size > THREADED_CHARS and self.contexts.new_chars(payload) > THREADED_CHARS:
                match = await asyncio.to_thread(self.contexts.match, payload, thread)
            else:
                match = self.contexts.match(payload, thread)
        except ChatError as error:
            raise TapError("invalid", f"the conversation cannot be rendered: {error}", "messages") from error
        if not match.length:
            raise TapError("invalid", "there is no message in the request; send at least one", "messages")
        return match

    def _check_limits(self, tools: bool) -> None:
        limits = self._limits
        if not self.over.is_set():
            turns = len(self.turns) + self._aborted + self._sampling
            # In a session with tools, turns without (titles and the like) do not count.
            counted = self._with_tools if tools else 0 if self._with_tools else turns
            if counted >= limits.turns or turns >= MAX_TURNS_FACTOR * limits.turns:
                if self._sampling:  # those are still answered
                    raise TapError("overloaded", "the last turns of this rollout are being sampled; retry later")
                self.stop(Ending("truncated", "turns"))
            elif limits.sampled_tokens is not None and self._sampled_tokens >= limits.sampled_tokens:
                self.stop(Ending("truncated", "sampled tokens"))
        if self._closed or self.over.is_set():
            why = f" ({self.ending.stop})" if self.ending is not None else ""
            raise TapError("invalid", f"this rollout is over{why}; start another one")
        if self._sampling >= MAX_CONCURRENT_TURNS:
            raise TapError("overloaded", f"{MAX_CONCURRENT_TURNS} turns of this rollout are being sampled; retry later")
        self.ending = None

    def _write(self, entry: Mapping[str, Any]) -> None:
        try:
            self._log.write(self.contexts, entry)
        except LogError as error:
            self.stop(Ending("failed", "error", str(error)))
            raise TapError("internal", "the turn could not be logged") from error

    def _count_lost(self, cause: str, tokens: int) -> None:
        if tokens:
            self.lost[cause] += tokens
            self._write({"lost": cause, "tokens": tokens})

    def _seed_of(self, match: PromptMatch) -> int | None:
        """Return a seed that depends on the context and the number of turns sampled in it, not on the order of parallel
        conversations."""
        if self.seed is None:
            return None
        path = "/".join(block.key for block in match.blocks() if block.turn is None)
        words = f"{self.seed}/{self.contexts.turns_sampled_at(match)}/{path}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest()) >> 1


def _key(thread: str, digest: str) -> str:
    return f"{thread}\n{digest}"
