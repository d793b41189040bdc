"""JSON over HTTP to a remote service, with rate limit, retries and cache, for all rollouts of a process.

Every failure is a :class:`ToolError`. The API key is redacted from answers before they are logged, cached or returned.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from slime_plugin.config.tools import Remote
from slime_plugin.errors import printable
from slime_plugin.rollout.retry import MAX_RETRY_AFTER_S, RateLimiter, Timing, backoff_s, parse_retry_after
from slime_plugin.rollout.tools.api_keys import Key, read_key
from slime_plugin.rollout.tools.cache import Cache, cache_key
from slime_plugin.rollout.tools.tool import ErrorKind, ToolError

FIRST_BACKOFF_S = 0.5
_KINDS: dict[int, ErrorKind] = {401: "key", 402: "key", 403: "key", 429: "rate limit"}
"""By status of an answer; those that a service refuses requests with are its own, all others mean unavailable."""
REFUSALS = frozenset({400, 413, 414, 422})
"""Statuses with which a service refuses what the policy asked for."""
_log = logging.getLogger(__name__)
Parsed = TypeVar("Parsed")


class _TransientError(Exception):
    """A failure that a retry may not meet again."""

    def __init__(self, message: str, kind: ErrorKind = "unavailable", retry_after: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after


class RemoteService:
    """One endpoint and its limits. With a cache, equal concurrent requests are sent once."""

    def __init__(
        self,
        label: str,
        url: str,
        remote: Remote,
        key: Key | None,
        cache: Cache | None,
        services: RemoteServices,
        refusals: frozenset[int],
    ) -> None:
        self._label = label
        self._url = url
        self._remote = remote
        self._key = key
        self._cache = cache
        self._refusals = refusals
        self._session = services.session
        self._timing = services.timing
        self._limiter = RateLimiter(remote.rate, services.timing)
        self._proxy = _proxy_for(url)
        self._pending: dict[str, asyncio.Task[str]] = {}

    async def ask(self, body: Mapping[str, Any], read: Callable[[Any], Parsed]) -> Parsed:
        """Return what ``read`` parses from the answer. Where it raises :class:`ToolError`, nothing is cached."""
        request = json.dumps(body, sort_keys=True)
        if self._cache is None:
            return read(self._parse(await self._fetch(request)))
        key = cache_key(self._url, request)
        cached = await asyncio.to_thread(self._cache.read, key)
        if cached is None:
            cached = await self._join(key, request, read, self._cache)
        return read(self._parse(cached))

    async def close(self) -> None:
        """Cancel pending requests."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)

    async def _join(self, key: str, request: str, read: Callable[[Any], object], cache: Cache) -> str:
        """Share one request among equal ones: samples of a question often begin with the same query."""

        async def fetch() -> str:
            text = await self._fetch(request)
            read(self._parse(text))  # only answers that can be parsed are cached
            await asyncio.to_thread(cache.write, key, request, text)
            return text

        task = self._pending.get(key)
        if task is None:
            task = self._pending[key] = asyncio.create_task(fetch())
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)  # a cancelled caller must not cancel it for the others

    def _forget(self, key: str, done: asyncio.Task[str]) -> None:
        del self._pending[key]
        if not done.cancelled():
            done.exception()  # retrieved, even if all callers were cancelled

    async def _fetch(self, request: str) -> str:
        """Send the request, with retries. Returns the text of the answer, without the key."""
        failures = 0
        while True:
            await self._limiter.acquire()
            try:
                return await self._post(request)
            except _TransientError as error:
                failures += 1
                wait = parse_retry_after(error.retry_after, self._timing)
                if failures > self._remote.retries:
                    raise self._failed(f"{error}, {failures} times", error.kind) from None
                if wait is None:
                    wait = backoff_s(failures, FIRST_BACKOFF_S, self._timing.jitter())
                elif wait > MAX_RETRY_AFTER_S:
                    asks = f"{error}, and asks for {wait:.0f} s, over {MAX_RETRY_AFTER_S:.0f}"
                    raise self._failed(asks, error.kind) from None
                await self._timing.sleep(wait)

    async def _post(self, request: str) -> str:
        headers = {"Content-Type": "application/json", **(self._key.header() if self._key else {})}
        try:
            async with (
                asyncio.timeout(self._remote.timeout),
                self._session.post(
                    self._url, data=request, headers=headers, proxy=self._proxy, allow_redirects=False
                ) as response,
            ):
                text = await self._body(response)
        except TimeoutError:
            raise self._failed(f"no answer within {self._remote.timeout:g} s", "timeout") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _TransientError(f"the connection failed ({type(error).__name__})") from None
        except aiohttp.ClientError as error:  # its repr shows the headers, and with them the key
            raise self._failed(f"the service does not speak HTTP ({type(error).__name__})") from None
        if 200 <= response.status < 300:
            return text
        problem = f"the service answered {response.status}: {printable(' '.join(text.split()), 200)}".rstrip(": ")
        kind = "refused" if response.status in self._refusals else _KINDS.get(response.status, "unavailable")
        if response.status == 429 or response.status >= 500:
            raise _TransientError(problem, kind, response.headers.get("Retry-After"))
        raise self._failed(problem, kind)

    async def _body(self, response: aiohttp.ClientResponse) -> str:
        """Read the body in chunks: a small compressed answer may unpack into a large one."""
        body = bytearray()
        async for piece in response.content.iter_chunked(1 << 16):
            body += piece
            if len(body) > self._remote.max_bytes:
                raise self._failed(f"the answer has more than {self._remote.max_bytes} bytes", "refused")
        text = body.decode("utf-8", "replace")
        return self._key.redact(text) if self._key else text

    def _parse(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._failed("the answer is not JSON") from None

    def _failed(self, message: str, kind: ErrorKind = "unavailable") -> ToolError:
        _log.warning("%s at %s: %s", self._label, self._url, message)  # the URL is for the log, not for the policy
        return ToolError(f"{self._label} failed: {message}", kind)


class RemoteServices:
    """Services that share an HTTP client session."""

    def __init__(self, env: Mapping[str, str], timing: Timing) -> None:
        self.timing = timing
        self.session = aiohttp.ClientSession(
            # Unlimited: waiting for a connection must not count towards the timeout of a request.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._env = env
        self._open: list[RemoteService] = []

    def open(
        self, label: str, url: str, remote: Remote, where: str, refusals: frozenset[int] = REFUSALS
    ) -> RemoteService:
        """Open a service. Raises :class:`ConfigError` if its key is missing or its cache cannot be written."""
        key = read_key(remote.key_variable, self._env, where) if remote.key_variable else None
        cache = Cache(remote.cache, where) if remote.cache else None
        service = RemoteService(label, url, remote, key, cache, self, refusals)
        self._open.append(service)
        return service

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for service in self._open:
            await service.close()
        await self.session.close()


def _proxy_for(url: str) -> str | None:
    """Proxy of the environment. aiohttp's ``trust_env`` also reads .netrc, which conflicts with API keys."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
