"""A tap whose policy is a function, served on a free port in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slime_plugin.tap.limits import ServerSettings
from slime_plugin.tap.payload import Answer, ClientRequest, Payload, Reply, StopReason, Text, ToolCall, ToolResult
from slime_plugin.tap.server import TapServer
from slime_plugin.tap.wire.parts_builder import ParseCache

TOKEN = "right"
MODEL = "policy"


def saying(
    text: str = "", *calls: ToolCall, thought: str | None = None, finish: StopReason | None = None, model: str = MODEL
) -> Answer:
    """An answer with round numbers."""
    return Answer(
        id="t1",
        model=model,
        text=text,
        calls=calls,
        thought=thought,
        finish=finish or ("calls" if calls else "stop"),
        prompt_tokens=100,
        sampled_tokens=20,
        thought_tokens=5 if thought else 0,
        created=1_700_000_000,
    )


def length(payload: Payload) -> int:
    """Characters stand in for tokens."""
    return sum(len(part.text) for part in payload.parts)


def repeats(ask: ClientRequest) -> Answer:
    """Says again what was said last."""
    last = ask.payload.parts[-1]
    assert isinstance(last, Text | ToolResult | Reply)
    return saying(f"heard {last.text}", model=ask.payload.model)


Policy = Callable[[ClientRequest], Answer | Awaitable[Answer]]


@dataclass
class Rollout:
    """A rollout that keeps what it was asked."""

    policy: Policy = repeats
    asked: list[ClientRequest] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    working: threading.Event = field(default_factory=threading.Event)
    parse_cache: ParseCache = field(default_factory=ParseCache)

    async def answer(self, ask: ClientRequest) -> Answer:
        self.asked.append(ask)
        self.working.set()
        try:
            answer = self.policy(ask)
            return answer if isinstance(answer, Answer) else await answer
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def count(self, payload: Payload) -> int:
        return length(payload)


@dataclass
class Rollouts:
    """A registry."""

    open: dict[str, Rollout] = field(default_factory=lambda: {TOKEN: Rollout()})
    model: str = MODEL

    def session(self, token: str) -> Rollout | None:
        return self.open.get(token)


@dataclass
class Serving:
    """What a test knows of the server."""

    url: str
    port: int
    rollouts: Rollouts

    @property
    def rollout(self) -> Rollout:
        return self.rollouts.open[TOKEN]


@contextmanager
def serving(policy: Policy = repeats, settings: ServerSettings | None = None) -> Iterator[Serving]:
    """Ends only when the server has stopped, and with the error that stopped it, if any."""
    rollouts = Rollouts({TOKEN: Rollout(policy)})
    started: threading.Event = threading.Event()
    state: dict[str, Serving] = {}
    errors: list[Exception] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with TapServer(rollouts, settings or ServerSettings()) as server:
            state["serving"] = Serving(server.url, server.port, rollouts)
            started.set()
            await stop.wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(main())
        except Exception as error:  # noqa: BLE001 - it is raised again, in the thread of the test
            errors.append(error)
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run, name="tap")
    thread.start()
    try:
        started.wait()
        if errors:
            raise errors[0]
        yield state["serving"]
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join()
    if errors:
        raise errors[0]
