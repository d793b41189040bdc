"""Limits on requests and connections.

Opening a connection takes no token, so its cost is bounded before the token is known: headers in bytes and seconds,
connections in number. A body is read only with a valid token, and is bounded too. Most limits are settings of uvicorn
and the kernel or time-outs in the app; :class:`LimitedProtocol` adds what uvicorn has no setting for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import h11
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from slime_plugin.tap.payload import TapError
from slime_plugin.tap.wire.wire_format import MAX_DEPTH, too_deep

SMALL_CHUNK_BYTES, MAX_SMALL_CHUNKS = 256, 1000
"""Per body: parsing a megabyte in chunks of one byte would block the loop for seconds."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where to listen, and the limits."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free port."""
    public: bool = False
    """Whether ``host`` may be reachable from other machines. Traffic is not encrypted."""
    max_body_bytes: int = 4 * 2**20
    """About a million tokens of text; tokenising as much takes 0.8 GB for a second."""
    max_inflight_bytes: int = 512 * 2**20
    """Bodies of all requests in flight together."""
    max_inline_bytes: int = 2**20
    """Larger bodies are parsed in a thread, and their messages are not cached."""
    max_brackets: int = 400_000
    """In a body, its strings included: creating objects and lists by the million takes seconds."""
    max_depth: int = MAX_DEPTH
    """Nesting of the JSON in a body."""
    max_head_bytes: int = 64 * 2**10
    """Request line and headers."""
    max_connections: int = 1024
    """At most a quarter of the files that the process may open. At the limit the oldest connection without a request is
    dropped; if there is none, requests on the new one are refused, and beyond twice the limit it is closed."""
    head_timeout_s: float = 10.0
    """From the opening of a connection, or the first byte of a further request, to the end of the headers."""
    body_timeout_s: float = 30.0
    """From the headers to the end of the body."""
    send_timeout_s: float = 60.0
    """How long a client may leave an answer unread."""
    keep_alive_timeout_s: int = 75
    """How long an idle connection is kept. Tools run for longer than uvicorn's default of five seconds."""
    discard_timeout_s: float = 2.0
    """How long the rest of a refused body is read and dropped, so that its sender gets to read why."""
    heartbeat_s: float = 5.0
    """Between keep-alive events of a stream. Errors before the first one have an HTTP status of their own."""

    def connection_limit(self) -> int:
        return min(self.max_connections, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


class ByteBudget:
    """Bounds the bytes held by all requests in flight."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes

    @contextlib.contextmanager
    def reserve(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes until the request ends. It raises ``TapError`` at the limit."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if size > self._left:
                raise TapError("overloaded", "too many bytes of requests in flight; retry later")
            self._left -= size
            taken += size

        try:
            yield take
        finally:
            self._left += taken


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Iterate over the body as it arrives; set ``request.state.body_read`` at its end. Unlike ``request.stream()``, it
    can be continued after an error."""
    while not request.state.body_read:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        request.state.body_read = not message.get("more_body", False)
        yield message.get("body", b"")


async def read_body(request: Request, settings: ServerSettings, take: Callable[[int], None]) -> bytearray:
    """Read a body up to the limits."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise TapError("invalid", "compressed bodies are not supported; leave out Content-Encoding")
    limit, length = settings.max_body_bytes, int(request.headers.get("content-length", "0"))  # h11 checks its form
    if length > limit:
        raise TapError("too_large", f"the body has {length} bytes; at most {limit} are read")
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in _chunks(request):
                take(len(chunk))
                body += chunk
                if len(body) > limit:
                    raise TapError("too_large", f"the body has more than {limit} bytes")
    except TimeoutError:
        raise TapError("slow", f"the body was not complete after {settings.body_timeout_s:g} seconds") from None
    return body


async def discard_body(receive: Receive, settings: ServerSettings) -> None:
    """Read and drop what is left of a body, within limits."""
    left = settings.max_body_bytes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.discard_timeout_s):
            while left >= 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def parse_body(body: bytearray, settings: ServerSettings) -> Mapping[str, Any]:
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > settings.max_brackets:
        raise TapError("too_large", f"the body has {brackets} brackets; at most {settings.max_brackets} are read")
    try:
        value = _loads(body)
    except (ValueError, RecursionError) as error:
        raise TapError("invalid", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TapError("invalid", "the body must be a JSON object")
    if too_deep(value, settings.max_depth):
        raise TapError("invalid", f"the body is nested more than {settings.max_depth} deep")
    return value


def _loads(body: bytearray) -> Any:
    """Parse JSON with lone surrogates, which orjson refuses: agents cut texts in the middle of an emoji."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        if b"\\ud" not in body and b"\\uD" not in body:
            raise
    return json.loads(body, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


class _ChunkLimit(h11.Connection):
    """Refuses bodies in many small chunks: every chunk costs the same, however small."""

    small_chunks = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.small_chunks = 0
        elif isinstance(event, h11.Data) and len(event.data) < SMALL_CHUNK_BYTES:
            self.small_chunks += 1
            if self.small_chunks > MAX_SMALL_CHUNKS:
                raise h11.RemoteProtocolError(f"more than {MAX_SMALL_CHUNKS} chunks under {SMALL_CHUNK_BYTES} bytes")
        return event


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for headers and limits on small chunks and unused connections.

    It also keeps reading while a request is answered: uvicorn stops at pipelined bytes, and would not notice that the
    client disconnects.
    """

    def __init__(self, settings: ServerSettings, refuse: ASGIApp, *args: Any, **kwargs: Any) -> None:
        """``refuse`` answers requests on connections beyond the limit."""
        super().__init__(*args, **kwargs)
        self._settings, self._refuse = settings, refuse
        self.conn = _ChunkLimit(h11.SERVER, settings.max_head_bytes)
        self._opened_s = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        limit = self._settings.connection_limit()
        if len(self.connections) > limit:
            open_ones = (
                other for other in self.connections if isinstance(other, LimitedProtocol) and other is not self
            )
            unused = [other for other in open_ones if other.cycle is None and not other.transport.is_closing()]
            if unused:
                min(unused, key=lambda one: one._opened_s).transport.abort()
            elif len(self.connections) > 2 * limit:
                transport.abort()
            else:  # not uvicorn's limit_concurrency, which refuses the next request on any connection
                self.app = self._refuse
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_busy():
            self._start_head_timer()
            return
        self._stop_head_timer()
        if self.cycle.more_body:
            return
        if len(self.conn.trailing_data[0]) > self._settings.max_head_bytes:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0] and not self._is_busy():  # the next request has started
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _is_busy(self) -> bool:
        # uvicorn declares that there always is a cycle; there is none before the first request.
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._settings.head_timeout_s, self._head_timed_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if not self._is_busy():
            self.transport.abort()
