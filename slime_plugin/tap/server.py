"""HTTP: who may ask, how much, how long.

A turn is sampled whole, and written down, before the first byte of it goes out: no client can act on what the log does
not have. Streams are for clients that insist on them; they get signs of life until the answer is there.

No request takes the server down. What a client sends is data: it is parsed as JSON and names no file and no function.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.tap.dialects import DIALECTS, Dialect
from slime_plugin.tap.dialects.base import dump
from slime_plugin.tap.dialects.conversation import Memory
from slime_plugin.tap.limits import Held, Settings, parse_body, protocol, read_body
from slime_plugin.tap.messages import Answer, Payload, TapError
from slime_plugin.tap.serving import Ask, Registry, Served

log = logging.getLogger(__name__)

ANTHROPIC, CHAT = DIALECTS["/v1/messages"], DIALECTS["/v1/chat/completions"]
COUNTS = {"/v1/messages/count_tokens": "/v1/messages", "/v1/responses/input_tokens": "/v1/responses"}
"""Where prompts are only counted, and the path whose requests they are."""
MODELS = "/v1/models"
OPEN = ("/", "/health")
"""Anyone may ask whether there is a server."""


class ListenError(MemoryWalkerError):
    """An address that cannot be listened on."""


class App:
    """The ASGI application."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self.registry, self.settings = registry, settings
        self.working: set[asyncio.Future[Answer]] = set()
        """Turns that are being sampled."""
        self.held = Held(settings.max_held_bytes)
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(self, scope, receive, send).run()

    async def full(self, scope: Scope, receive: Receive, send: Send) -> None:
        """In place of the application, if there are too many connections."""
        await Exchange(self, scope, receive, send).fail(TapError("overloaded", "too many connections; come back later"))

    def close(self) -> None:
        """Those who wait, and those who still ask, are told to come back later."""
        self.closing = True
        for work in self.working:
            work.cancel()


class Exchange:
    """One request and its response."""

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._receive, self._send = app, receive, send
        self._request = Request(scope, receive)
        self._path: str = scope["path"]
        self._dialect = _dialect(self._path, self._request)
        self._id = f"req_{uuid.uuid4().hex}"
        self._unread = self._request.headers.get("content-length", "0") != "0"
        self._unread |= "transfer-encoding" in self._request.headers
        self._streaming = False
        self._last = True  # a connection stays for those who have shown a token

    async def run(self) -> None:
        """The one boundary: whatever happens becomes an answer."""
        try:
            await self._route()
        except ClientDisconnect:
            pass
        except TapError as error:
            await self.fail(error)
        except Exception:  # a mistake of ours: it is logged, and the client gets an answer all the same
            log.exception("request %s to %s failed", self._id, self._path)
            await self.fail(TapError("internal", "this is a fault of the server, which has logged it"))

    async def fail(self, error: TapError, status: int | None = None) -> None:
        if self._streaming:
            await self._write(self._dialect.error_event(error, self._id), more=False)
        else:
            usual, body = self._dialect.error(error, self._id)
            await self._respond(body, status or usual)

    async def _route(self) -> None:
        allowed = _method(self._path)
        method = self._request.method
        if allowed is None:
            raise TapError("not_found", "there is nothing at this path")
        if method != allowed and (method, allowed) != ("HEAD", "GET"):
            await self.fail(TapError("invalid", f"this path takes {allowed} only"), 405)
        elif self._path in OPEN:
            await self._respond(dump({"status": "ok"}))
        else:
            served = self._authenticate()
            self._last = False
            if allowed == "GET":
                await self._respond(self._models())
            else:
                await self._ask(served)

    def _authenticate(self) -> Served:
        scheme, _, bearer = self._request.headers.get("authorization", "").partition(" ")
        tokens = (bearer.strip() if scheme.lower() == "bearer" else "", self._request.headers.get("x-api-key", ""))
        for token in tokens:
            if token and (served := self._app.registry.session(token)) is not None:
                return served
        raise TapError("authentication", "a token of an open rollout is needed, as a Bearer token or x-api-key")

    def _models(self) -> bytes:
        name = self._app.registry.model
        if self._path == MODELS:
            return self._dialect.models([name])
        if self._path != f"{MODELS}/{name}":
            raise TapError("not_found", f"there is one model here, and it is called {name!r}", code="model_not_found")
        return self._dialect.model(name)

    async def _ask(self, served: Served) -> None:
        if self._app.closing:
            raise TapError("overloaded", "the tap is being closed")
        with self._app.held.room() as take:
            await self._answer(served, *await self._asked(served, take))

    async def _asked(self, served: Served, take: Callable[[int], None]) -> tuple[Payload, Mapping[str, Any], str]:
        """What a body says, what of it is shown again, and its digest. The body itself is not kept: it may be large,
        and the policy takes its time."""
        raw = await read_body(self._request, self._app.settings, take)
        self._unread = False
        digest = hashlib.blake2b(self._path.encode() + b"\0" + raw, digest_size=20).hexdigest()
        if len(raw) > self._app.settings.remembered_bytes:  # whoever asks for less does not wait for it
            return *await asyncio.to_thread(self._read, raw, None), digest
        return *self._read(raw, served.memory), digest

    async def _answer(self, served: Served, payload: Payload, echo: Mapping[str, Any], digest: str) -> None:
        if self._path in COUNTS:
            await self._respond(self._dialect.count(await served.count(payload)))
            return
        answer = await self._wait(served, Ask(payload, digest, dict(self._request.headers)))
        if answer is None:
            return
        if payload.stream:
            await self._begin_stream()
            await self._write(b"".join(self._dialect.events(answer, echo)), more=False)
        else:
            await self._respond(self._dialect.whole(answer, echo))

    def _read(self, raw: bytearray, memory: Memory | None) -> tuple[Payload, Mapping[str, Any]]:
        body = parse_body(raw, self._app.settings)
        return replace(self._dialect.read(body, memory), size=len(raw)), self._dialect.echo(body)

    async def _wait(self, served: Served, ask: Ask) -> Answer | None:
        """None if the client hangs up, which cancels the turn."""
        work = asyncio.ensure_future(served.answer(ask))
        gone = asyncio.ensure_future(self._hung_up())
        self._app.working.add(work)
        pause = self._app.settings.keep_alive_seconds if ask.payload.stream else None
        try:
            while True:
                await asyncio.wait({work, gone}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if work.cancelled():
                    raise TapError("overloaded", "the rollout is being closed")
                if work.done():
                    return work.result()
                if gone.done():
                    return None
                await self._begin_stream()
                await self._write(self._dialect.keep_alive)
        finally:
            self._app.working.discard(work)
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _begin_stream(self) -> None:
        if not self._streaming:
            await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
            self._streaming = True

    async def _respond(self, body: bytes, status: int = 200) -> None:
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        if self._unread or self._last:
            headers["connection"] = "close"
        await self._start(status, headers)
        await self._write(body, more=self._unread)
        if self._unread:
            await self._linger()
            await self._write(b"", more=False)

    async def _linger(self) -> None:
        """A connection that is closed with bytes unread is reset, and its client may never see the answer."""
        most = self._app.settings.max_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._app.settings.linger_seconds):
                while most > 0:
                    message = await self._receive()
                    most -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        pairs = [(name.encode(), value.encode()) for name, value in (headers | self._dialect.headers(self._id)).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _method(path: str) -> str | None:
    """What the path takes; None if there is nothing."""
    if path in DIALECTS or path in COUNTS:
        return "POST"
    return "GET" if path in OPEN or path == MODELS or path.startswith(f"{MODELS}/") else None


def _dialect(path: str, request: Request) -> Dialect:
    """Paths that are nobody's own answer in the dialect whose client asks."""
    path = COUNTS.get(path, path)
    if path in DIALECTS:
        return DIALECTS[path]
    anthropic = path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return ANTHROPIC if anthropic else CHAT


class _Server(uvicorn.Server):
    """Leaves signals to the program that it is part of."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class Listening:
    """A server in the running loop, for as long as the ``async with`` lasts.

    Leaving it cancels the turns that are being sampled; their clients are told to come back later.
    """

    def __init__(self, registry: Registry, settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        if not settings.public and not _loopback(settings.host):
            raise ListenError(
                f"the tap would listen on {settings.host}, where other machines reach it; "
                "listen on 127.0.0.1, or say --public if the network is yours"
            )
        self._app = App(registry, settings)
        self._config = uvicorn.Config(
            self._app,
            http=protocol(settings, self._app.full),
            ws="none",
            lifespan="off",
            backlog=128,  # as many are accepted at once, before anyone looks at how many there are
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=settings.max_head_bytes,
            timeout_keep_alive=settings.idle_seconds,
            timeout_graceful_shutdown=2,
        )
        self.port = settings.port
        """The real one, once it listens."""

    @property
    def url(self) -> str:
        """Without a path: clients add theirs."""
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"http://{host}:{self.port}"

    async def __aenter__(self) -> Listening:
        listener = _listen(self.settings.host, self.settings.port)
        self.port = listener.getsockname()[1]
        self._server = _Server(self._config)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            ready.cancel()
            await self._serving
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._app.close()
        self._server.should_exit = True
        await self._serving
        for connection in list(self._server.server_state.connections):
            transport: Any = connection.transport
            transport.abort()


def _listen(host: str, port: int) -> socket.socket:
    """TCP is named: asyncio turns off Nagle's algorithm only where it is, and 40 ms per answer are lost with it on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        where = f"{host}:{port}" if port else host
        raise ListenError(f"cannot listen on {where}: {error.strerror}; choose another --host or --port") from error
    return listener


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
