"""The HTTP server: routes, tokens, answers and streams.

A turn is sampled whole, and logged, before its first byte is sent: no client can act on a turn that the log does not
have. Until then a client that asks for a stream gets keep-alive events.

No request takes the server down. What a client sends is data: it is parsed as JSON, and never names a file or function.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import ipaddress
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.rollout.server.ports import bind, http_url
from slime_plugin.tap.limits import ByteBudget, LimitedProtocol, ServerSettings, discard_body, parse_body, read_body
from slime_plugin.tap.payload import Answer, ClientRequest, Payload, TapError
from slime_plugin.tap.wire import WIRE_FORMATS, WireFormat
from slime_plugin.tap.wire.parts_builder import ParseCache
from slime_plugin.tap.wire.wire_format import dump

log = logging.getLogger(__name__)

COUNTS = {"/v1/messages/count_tokens": "/v1/messages", "/v1/responses/input_tokens": "/v1/responses"}
"""Paths that only count the tokens of a prompt, and the path whose requests they take."""
EVENT_STREAM = "text/event-stream"


class ListenError(MemoryWalkerError):
    """An address that cannot be listened on."""


class Session(Protocol):
    """A rollout that is being served."""

    @property
    def parse_cache(self) -> ParseCache: ...

    async def answer(self, request: ClientRequest) -> Answer:
        """Raises :class:`~slime_plugin.tap.payload.TapError`. Cancelled if the client disconnects."""
        ...

    async def count(self, payload: Payload) -> int:
        """Return the number of prompt tokens, exactly as for :meth:`answer`. Raises ``TapError``."""
        ...


class Sessions(Protocol):
    """The open rollouts."""

    @property
    def model(self) -> str:
        """Name of the policy for clients."""
        ...

    def session(self, token: str) -> Session | None:
        """Look up a token, in the same time for a wrong token as for a right one."""
        ...


class TapApp:
    """The ASGI application."""

    def __init__(self, sessions: Sessions, settings: ServerSettings) -> None:
        self._sessions, self._settings = sessions, settings
        self._budget = ByteBudget(settings.max_inflight_bytes)
        self._turns: set[asyncio.Future[Answer]] = set()  # being sampled
        self._closing = False
        self._app = Starlette(
            routes=[
                *(Route(path, self._answer, methods=["POST"]) for path in WIRE_FORMATS),  # the usual ones come first
                *(Route(path, self._count, methods=["POST"]) for path in COUNTS),
                *(Route(path, self._models) for path in ("/v1/models", "/v1/models/{name:path}")),
                *(Route(path, self._health) for path in ("/", "/health")),
            ],
            exception_handlers={
                ClientDisconnect: self._disconnected,
                TapError: self._error,
                HTTPException: self._routing_error,
                Exception: self._fault,
            },
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _prepare(scope)
        await self._app(scope, receive, send)

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """In place of the application, on connections beyond the limit."""
        _prepare(scope)
        response = await self._error(Request(scope), TapError("overloaded", "too many connections; retry later"))
        await response(scope, receive, send)

    def close(self) -> None:
        """Cancel the turns that are being sampled; their clients get an error that asks to retry."""
        self._closing = True
        for turn in self._turns:
            turn.cancel()

    # Endpoints

    async def _health(self, request: Request) -> Response:
        return await self._respond(request, dump({"status": "ok"}))

    async def _models(self, request: Request) -> Response:
        self._authenticate(request)
        wire_format, model = _wire_format(request), self._sessions.model
        name = request.path_params.get("name")
        if name not in (None, model):
            raise TapError("not_found", f"the only model here is {model!r}", code="model_not_found")
        return await self._respond(request, wire_format.models([model]) if name is None else wire_format.model(model))

    async def _count(self, request: Request) -> Response:
        session = self._authenticate(request)
        with self._budget.reserve() as take:
            payload, _, _ = await self._read(request, session, take)
            return await self._respond(request, _wire_format(request).count(await session.count(payload)))

    async def _answer(self, request: Request) -> Response:
        session, wire_format = self._authenticate(request), _wire_format(request)
        async with contextlib.AsyncExitStack() as stack:
            payload, echo, digest = await self._read(request, session, stack.enter_context(self._budget.reserve()))
            turn = asyncio.ensure_future(session.answer(ClientRequest(payload, digest, dict(request.headers))))
            self._turns.add(turn)
            stack.push_async_callback(self._end, turn)
            disconnected = asyncio.create_task(_until_disconnected(request))
            heartbeat_s = self._settings.heartbeat_s if payload.stream else None
            try:
                await asyncio.wait({turn, disconnected}, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
                if disconnected.done() and not turn.done():
                    raise ClientDisconnect
            finally:
                disconnected.cancel()
            if not payload.stream:
                return await self._respond(request, wire_format.whole(_result(turn), echo))
            headers = {"cache-control": "no-cache", **wire_format.headers(request.state.id)}
            if turn.done():  # an error still has a status of its own, and nothing has to be streamed
                events = b"".join(wire_format.events(_result(turn), echo))
                return Response(events, headers=headers, media_type=EVENT_STREAM)
            return _EventStream(self._events(request, turn, echo), headers, stack.pop_all())

    async def _events(
        self, request: Request, turn: asyncio.Future[Answer], echo: Mapping[str, Any]
    ) -> AsyncIterator[bytes]:
        wire_format = _wire_format(request)
        try:
            while not turn.done():
                yield wire_format.keep_alive
                await asyncio.wait({turn}, timeout=self._settings.heartbeat_s)
            yield b"".join(wire_format.events(_result(turn), echo))
        except TapError as error:
            yield wire_format.error_event(error, request.state.id)
        except Exception:  # as in :meth:`_fault`, but the status is sent already
            log.exception("request %s to %s failed", request.state.id, request.url.path)
            yield wire_format.error_event(_internal_error(), request.state.id)

    async def _end(self, turn: asyncio.Future[Answer]) -> None:
        self._turns.discard(turn)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)

    # Requests

    def _authenticate(self, request: Request) -> Session:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        tokens = (bearer.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", ""))
        for token in tokens:
            if token and (session := self._sessions.session(token)) is not None:
                request.state.authenticated = True
                return session
        raise TapError("authentication", "the token of an open rollout is required, as a Bearer token or x-api-key")

    async def _read(
        self, request: Request, session: Session, take: Callable[[int], None]
    ) -> tuple[Payload, Mapping[str, Any], str]:
        """Return the payload, the fields that the answer echoes, and the digest. The body itself may be large, and is
        not kept while the policy samples."""
        if self._closing:
            raise TapError("overloaded", "the tap is shutting down")
        body = await read_body(request, self._settings, take)
        digest = hashlib.blake2b(request.scope["path"].encode() + b"\0" + body, digest_size=20).hexdigest()
        if len(body) > self._settings.max_inline_bytes:
            return *await asyncio.to_thread(self._parse, request, body, None), digest
        return *self._parse(request, body, session.parse_cache), digest

    def _parse(self, request: Request, body: bytearray, cache: ParseCache | None) -> tuple[Payload, Mapping[str, Any]]:
        value, wire_format = parse_body(body, self._settings), _wire_format(request)
        return replace(wire_format.read(value, cache), size=len(body)), wire_format.echo(value)

    # Responses

    async def _respond(self, request: Request, body: bytes, status: int = 200) -> Response:
        """Keep a connection open only if it is authenticated and its request was read to the end."""
        headers = _wire_format(request).headers(request.state.id)
        if not (request.state.authenticated and request.state.body_read):
            headers["connection"] = "close"
        unread = None if request.state.body_read else self._settings
        return _Response(body, status, headers, discard=unread)

    async def _error(self, request: Request, error: Exception, status: int | None = None) -> Response:
        assert isinstance(error, TapError)
        usual, body = _wire_format(request).error(error, request.state.id)
        return await self._respond(request, body, status or usual)

    async def _routing_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code != 405:
            return await self._error(request, TapError("not_found", "there is no such path"))
        allowed = (error.headers or {})["Allow"]
        return await self._error(request, TapError("invalid", f"this path accepts {allowed} only"), 405)

    async def _fault(self, request: Request, error: Exception) -> Response:
        """Log a bug and answer with an internal error."""
        log.error("request %s to %s failed", request.state.id, request.url.path, exc_info=error)
        return await self._error(request, _internal_error())

    async def _disconnected(self, request: Request, error: Exception) -> Response:
        return Response()  # never sent


class _Response(Response):
    """JSON. With ``discard`` the rest of the request's body is read and dropped after the answer: a connection that is
    closed with bytes unread is reset, and its client might never see the answer."""

    media_type = "application/json"

    def __init__(self, body: bytes, status: int, headers: Mapping[str, str], *, discard: ServerSettings | None) -> None:
        super().__init__(body, status, headers)
        self._discard = discard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": self._discard is not None})
        if self._discard is not None:
            await discard_body(receive, self._discard)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _EventStream(StreamingResponse):
    """Server-sent events. ``stack`` is closed however the stream ends."""

    media_type = EVENT_STREAM

    def __init__(
        self, events: AsyncIterator[bytes], headers: Mapping[str, str], stack: contextlib.AsyncExitStack
    ) -> None:
        super().__init__(events, headers=headers)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


def _prepare(scope: Scope) -> None:
    headers = Headers(scope=scope)
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    scope["state"] = {"id": f"req_{uuid.uuid4().hex}", "authenticated": False, "body_read": not has_body}


def _result(turn: asyncio.Future[Answer]) -> Answer:
    if turn.cancelled():
        raise TapError("overloaded", "the rollout is being closed")
    return turn.result()


def _internal_error() -> TapError:
    return TapError("internal", "internal error; see the log of the server")


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _wire_format(request: Request) -> WireFormat:
    """The format of the path; for other paths, the one whose clients send such requests."""
    path: str = request.scope["path"]
    path = COUNTS.get(path, path)
    if path in WIRE_FORMATS:
        return WIRE_FORMATS[path]
    anthropic = path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return WIRE_FORMATS["/v1/messages" if anthropic else "/v1/chat/completions"]


class TapServer:
    """An HTTP server in the running event loop, as an async context manager."""

    def __init__(self, sessions: Sessions, settings: ServerSettings | None = None) -> None:
        self.settings = settings = settings or ServerSettings()
        if not settings.public and not _is_loopback(settings.host):
            raise ListenError(
                f"the tap would listen on {settings.host}, where other machines reach it; "
                "listen on 127.0.0.1, or pass --public if the network is trusted"
            )
        self._app = TapApp(sessions, settings)
        config = uvicorn.Config(
            self._app,
            http=functools.partial(LimitedProtocol, settings, self._app.refuse),  # type: ignore[arg-type]  # only called
            ws="none",
            lifespan="off",
            backlog=128,  # accepted at once, before connections are counted
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_timeout_s,
            timeout_graceful_shutdown=2,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self.port = settings.port
        """The bound port, once the server listens."""

    @property
    def url(self) -> str:
        """Base URL; clients add the path."""
        return http_url(self.settings.host, self.port)

    async def __aenter__(self) -> TapServer:
        # uvicorn's serve() without its signal handlers: signals belong to the embedding program.
        self._listener = _listen(self.settings)
        self.port = self._listener.getsockname()[1]
        await self._server.startup([self._listener])
        self._main_loop = asyncio.create_task(self._server.main_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._app.close()
        self._server.should_exit = True
        await self._main_loop
        await self._server.shutdown([self._listener])
        for connection in list(self._server.server_state.connections):
            transport: Any = connection.transport
            transport.abort()


def _listen(settings: ServerSettings) -> socket.socket:
    host, port = settings.host, settings.port
    try:
        listener = bind(host, port)
    except OSError as error:
        where = f"{host}:{port}" if port else host
        raise ListenError(f"cannot listen on {where}: {error.strerror}; choose another --host or --port") from error
    # Connections inherit it: the kernel resets one whose client leaves an answer unread for this long.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.send_timeout_s * 1000))
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
