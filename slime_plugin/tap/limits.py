"""How much, how deep and how slow a request may be, and what happens to a connection that is not worth keeping.

Nobody needs a token to open a connection, so whatever one costs is bounded before the token is known: headers in bytes
and seconds, connections in number. A body is read only for a right token, and is bounded too.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h11
import orjson
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from slime_plugin.tap.dialects.base import MAX_DEPTH, too_deep
from slime_plugin.tap.messages import TapError


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to listen and what to bear."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any that is free."""
    public: bool = False
    """Whether the host may be one that other machines reach. What they send is not encrypted."""
    max_bytes: int = 32 * 2**20
    """Of a body."""
    max_depth: int = MAX_DEPTH
    """Of the JSON in a body."""
    max_head_bytes: int = 64 * 2**10
    """Of a request line with its headers."""
    max_connections: int = 1024
    """Requests on more than these are told to come back later; more than twice as many are hung up on."""
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


async def read_body(request: Request, settings: Settings) -> bytearray:
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
                body += chunk
                if len(body) > most:
                    raise TapError("too_large", f"the body has more than {most} bytes")
    except TimeoutError:
        raise TapError("slow", f"the body was not complete after {settings.body_seconds:g} seconds") from None
    return body


def parse_body(body: bytearray, settings: Settings) -> Mapping[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TapError("invalid", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TapError("invalid", "the body must be a JSON object")
    if too_deep(value, settings.max_depth):
        raise TapError("invalid", f"the body is nested more than {settings.max_depth} deep")
    return value


def protocol(settings: Settings, full: ASGIApp) -> type[H11Protocol]:
    """HTTP/1.1 for connections with limits; ``full`` answers on those that are too many."""

    class Limited(H11Protocol):
        head: asyncio.TimerHandle | None = None  # runs while headers are awaited that have begun
        stall: asyncio.TimerHandle | None = None  # runs while the client does not read

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > 2 * settings.max_connections:
                transport.abort()
            elif len(self.connections) > settings.max_connections:
                self.app = full
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._busy():
                self._forget_head()
            elif self.head is None:
                self._expect_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            begun = self.conn.trailing_data[0] != b""
            if begun and not self._busy() and self.head is None:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
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

        def _busy(self) -> bool:
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
