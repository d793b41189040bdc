"""The other side of the wire: small HTTP services on loopback that say what a test tells them to, and count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime_plugin.rollout.retry import Timing

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Service:
    """Gives its replies in turn; the last one for ever."""

    replies: Sequence[Reply]
    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    """What was sent, parsed."""
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def asked(self) -> int:
        return len(self.bodies)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(json.loads(await request.read()))
        self.headers.append(dict(request.headers))
        self.paths.append(request.raw_path)
        return await self.replies[min(len(self.bodies), len(self.replies)) - 1](request)


@asynccontextmanager
async def serving(*replies: Reply) -> AsyncIterator[Service]:
    service = Service(replies)
    app = web.Application()
    app.router.add_post("/{path:.*}", service.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)  # to aiohttp 0 is for ever
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield service
    finally:
        await runner.cleanup()


def says(value: Any, status: int = 200, **headers: str) -> Reply:
    """JSON, or text as it is."""

    async def reply(request: web.Request) -> web.StreamResponse:
        text = value if isinstance(value, str) else json.dumps(value)
        named = {name.replace("_", "-"): header for name, header in headers.items()}
        return web.Response(text=text, status=status, headers=named)

    return reply


def found(*contents: str) -> Reply:
    """As Search-R1's retrieval server."""
    return says({"result": [[{"document": {"contents": text}, "score": 1.0} for text in contents]]})


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def resets(request: web.Request) -> web.StreamResponse:
    """The connection breaks before a word is said."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """The connection breaks in the middle of the answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"result"')
    assert request.transport is not None
    request.transport.abort()
    return response


async def echoes_its_key(request: web.Request) -> web.StreamResponse:
    return web.Response(status=400, text=f"bad header {request.headers['Authorization']} of {request.path}")


class Clock:
    """Time that passes only while someone sleeps."""

    def __init__(self) -> None:
        self.time = 0.0
        self.slept: list[float] = []

    def timing(self) -> Timing:
        return Timing(now=lambda: self.time, wall=lambda: 1000.0 + self.time, sleep=self.sleep, jitter=lambda: 0.5)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)
