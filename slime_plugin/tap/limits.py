"""How much, how deep and how slow a request may be, and what happens to a connection that is not worth keeping.

Nobody needs a token to open a connection, so whatever one costs is bounded before the token is known: headers in bytes
and seconds, connections in number. A body is read only for a right token, and is bounded too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import h11
import orjson
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from slime_plugin.tap.dialects.base import MAX_DEPTH, too_deep
from slime_plugin.tap.messages import TapError

SMALL, MOST_SMALL = 256, 1000
"""Bytes of a chunk that is a crumb, and how many of these a body may have."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to listen and what to bear."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any that is free."""
    public: bool = False
    """Whether the host may be one that other machines reach. What they send is not encrypted."""
    max_bytes: int = 4 * 2**20
    """Of a body: about a million tokens of text. To tokenise as much takes 0.8 GB for a second."""
    max_held_bytes: int = 512 * 2**20
    """Of the bodies of all requests under way."""
    remembered_bytes: int = 2**20
    """Of a body, up to which what a session sent is remembered, so that it need not be read again."""
    max_brackets: int = 400_000
    """In a body, those in its texts included: objects and lists by the million take seconds to make."""
    max_depth: int = MAX_DEPTH
    """Of the JSON in a body."""
    max_head_bytes: int = 64 * 2**10
    """Of a request line with its headers."""
    max_connections: int = 1024
    """No more than a quarter of the files that the process may open. For one more, the oldest that has asked nothing is
    hung up on; if there is none, it is told to come back later, and hung up on itself beyond twice as many."""
    head_seconds: float = 10.0
    """From the opening of a connection, or the first byte of a further request, to the end of the headers."""
    body_seconds: float = 30.0
    """From the headers to the end of the body."""
    stall_seconds: float = 60.0
    """That a client may leave an answer unread."""
    idle_seconds: int = 75
    """That a connection stays open between requests. Tools run for longer than the usual five."""
    linger_seconds: float = 2.0
    """That the rest of a refused body is thrown away, so that its sender gets to read why."""
    keep_alive_seconds: float = 5.0
    """Between signs of life in a stream. Errors in the first such span still have a status of their own."""


class Held:
    """Bytes of the requests under way."""

    def __init__(self, most: int) -> None:
        self._left = most

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """For one request: takes so many more bytes, until the request is over. Raises ``TapError``."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if size > self._left:
                raise TapError("overloaded", "too much is being asked at once; come back later")
            self._left -= size
            taken += size

        try:
            yield take
        finally:
            self._left += taken


async def read_body(request: Request, settings: Settings, take: Callable[[int], None]) -> bytearray:
    """Stops at the first byte too many."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise TapError("invalid", "compressed bodies are not read; leave out Content-Encoding")
    most = settings.max_bytes
    length = request.headers.get("content-length", "0")
    body = bytearray()
    try:
        if int(length) > most:
            raise TapError("too_large", f"the body has {length} bytes; at most {most} are read")
        async with asyncio.timeout(settings.body_seconds):
            async for chunk in request.stream():
                take(len(chunk))
                body += chunk
                if len(body) > most:
                    raise TapError("too_large", f"the body has more than {most} bytes")
    except TimeoutError:
        raise TapError("slow", f"the body was not complete after {settings.body_seconds:g} seconds") from None
    return body


def parse_body(body: bytearray, settings: Settings) -> Mapping[str, Any]:
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
    """Agents cut texts in the middle of an emoji. JSON allows what is left of it, and orjson does not."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        if b"\\ud" not in body and b"\\uD" not in body:
            raise
    return json.loads(body, parse_constant=_no_number)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number")


class _Crumbs(h11.Connection):
    """Every chunk of a body costs the same, however small it is: one that comes in crumbs is refused."""

    seen = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.seen = 0
        elif isinstance(event, h11.Data) and len(event.data) < SMALL:
            self.seen += 1
            if self.seen > MOST_SMALL:
                raise h11.RemoteProtocolError(f"more than {MOST_SMALL} chunks of less than {SMALL} bytes")
        return event


def protocol(settings: Settings, full: ASGIApp) -> type[H11Protocol]:
    """HTTP/1.1 for connections with limits; ``full`` answers on those that are too many."""
    most = min(settings.max_connections, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
    silent: dict[H11Protocol, None] = {}  # connections on which nothing was asked yet, the oldest first

    class Limited(H11Protocol):
        head: asyncio.TimerHandle | None = None  # runs while headers are awaited that have begun
        stall: asyncio.TimerHandle | None = None  # runs while the client does not read

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            self.conn = _Crumbs(h11.SERVER, settings.max_head_bytes)
            transport.set_write_buffer_limits(high=0)  # what is left unread is noticed, however little it is
            if len(self.connections) > most and silent:
                oldest = next(iter(silent))
                del silent[oldest]
                oldest.transport.abort()
            elif len(self.connections) > 2 * most:
                transport.abort()
                return
            elif len(self.connections) > most:
                self.app = full
            silent[self] = None
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._busy():
                silent.pop(self, None)
                self._forget_head()
                if not self.cycle.more_body:
                    self._listen()
            elif self.head is None:
                self._expect_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            begun = self.conn.trailing_data[0] != b""
            if begun and not self._busy() and self.head is None:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            silent.pop(self, None)
            self._forget_head()
            self._forget_stall()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._forget_stall()
            self.stall = self.loop.call_later(settings.stall_seconds, self._stalled)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._forget_stall()

        def shutdown(self) -> None:
            if self._busy() and self.cycle.more_body:
                self.transport.abort()
            else:
                super().shutdown()

        def send_400_response(self, msg: str) -> None:
            """What came is no HTTP, so nobody knows in which dialect to say so."""
            if self.cycle is not None:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = orjson.dumps({"error": {"type": "invalid_request_error", "message": msg}})
                length = str(len(body)).encode()
                headers = [
                    (b"content-type", b"application/json"),
                    (b"content-length", length),
                    (b"connection", b"close"),
                ]
                for event in (h11.Response(status_code=400, headers=headers), h11.Data(body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _listen(self) -> None:
            """Go on reading while a request is answered, or that its client hangs up would not be noticed."""
            if len(self.conn.trailing_data[0]) > settings.max_head_bytes:
                self.transport.abort()
            else:
                self.flow.resume_reading()

        def _busy(self) -> bool:
            # uvicorn declares that there always is a cycle, and there is none before the first request.
            return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

        def _expect_head(self) -> None:
            self.head = self.loop.call_later(settings.head_seconds, self._head_is_late)

        def _head_is_late(self) -> None:
            self.head = None
            if not self._busy():
                self.transport.abort()

        def _stalled(self) -> None:
            """Reset, or the kernel would go on holding what nobody reads."""
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

        def _forget_head(self) -> None:
            if self.head is not None:
                self.head.cancel()
                self.head = None

        def _forget_stall(self) -> None:
            if self.stall is not None:
                self.stall.cancel()
                self.stall = None

    return Limited
