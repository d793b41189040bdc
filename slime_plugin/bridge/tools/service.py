"""JSON over HTTP to one remote service, on behalf of all sessions of a process.

Whatever goes wrong with a request ends as a :class:`ToolError`; whatever comes back has lost the key before anything
else sees it: a log, an error, the cache or the policy.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from slime_plugin.bridge.tools.base import ToolError
from slime_plugin.bridge.tools.cache import Cache, cache_key
from slime_plugin.bridge.tools.keys import Key, read_key
from slime_plugin.bridge.tools.limits import LONGEST_WISH, Pace, Timing, pause, wish
from slime_plugin.config.tools import Remote
from slime_plugin.errors import printable

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class _PassingError(Exception):
    """May be gone if one asks again."""

    def __init__(self, message: str, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Service:
    """Asks within its limits. Equal requests that are under way at once are sent once if there is a cache."""

    def __init__(
        self, label: str, url: str, remote: Remote, key: Key | None, cache: Cache | None, services: Services
    ) -> None:
        self._label = label
        self._url = url
        self._remote = remote
        self._key = key
        self._cache = cache
        self._session = services.session
        self._timing = services.timing
        self._pace = Pace(remote.rate, services.timing)
        self._proxy = _proxy_for(url)
        self._under_way: dict[str, asyncio.Task[str]] = {}

    async def ask(self, body: Mapping[str, Any], read: Callable[[Any], Answer]) -> Answer:
        """What ``read`` makes of the answer. Where it raises :class:`ToolError` there was none, and none is kept."""
        request = json.dumps(body, sort_keys=True)
        if self._cache is None:
            return read(self._parse(await self._fetch(request)))
        key = cache_key(self._url, request)
        kept = await asyncio.to_thread(self._cache.read, key)
        if kept is None:
            kept = await self._join(key, request, read, self._cache)
        return read(self._parse(kept))

    async def close(self) -> None:
        """Drop what is under way."""
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    async def _join(self, key: str, request: str, read: Callable[[Any], object], cache: Cache) -> str:
        """Wait with all who ask the same: samples of one question often begin with the same query."""

        async def fetch() -> str:
            text = await self._fetch(request)
            read(self._parse(text))  # only what can be read is kept
            await asyncio.to_thread(cache.write, key, request, text)
            return text

        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(fetch())
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)  # one who gives up must not take the answer from the others

    def _forget(self, key: str, done: asyncio.Task[str]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # seen, even if all who asked have given up

    async def _fetch(self, request: str) -> str:
        """The text of the answer, without the key."""
        failures = 0
        while True:
            await self._pace.turn()
            try:
                return await self._post(request)
            except _PassingError as error:
                failures += 1
                asked = wish(error.retry_after, self._timing)
                if failures > self._remote.retries:
                    raise self._failed(f"{error}, {failures} times") from None
                if asked is not None and asked > LONGEST_WISH:
                    raise self._failed(f"{error}, and asks for {asked:.0f} s, over {LONGEST_WISH:.0f}") from None
                await self._timing.sleep(pause(failures, self._timing) if asked is None else asked)

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
            raise self._failed(f"no answer within {self._remote.timeout:g} s") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _PassingError(f"the connection failed ({type(error).__name__})") from None
        except aiohttp.ClientError as error:  # its repr shows the headers, and with them the key
            raise self._failed(f"the service does not speak HTTP ({type(error).__name__})") from None
        if 200 <= response.status < 300:
            return text
        said = f"the service answered {response.status}: {printable(' '.join(text.split()), 200)}".rstrip(": ")
        if response.status == 429 or response.status >= 500:
            raise _PassingError(said, response.headers.get("Retry-After"))
        raise self._failed(said)

    async def _body(self, response: aiohttp.ClientResponse) -> str:
        """The whole body. Read piece by piece: a small answer may unpack into a large one."""
        body = bytearray()
        async for piece in response.content.iter_chunked(1 << 16):
            body += piece
            if len(body) > self._remote.max_bytes:
                raise self._failed(f"the answer has more than {self._remote.max_bytes} bytes")
        text = body.decode("utf-8", "replace")
        return self._key.redact(text) if self._key else text

    def _parse(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._failed("the answer is not JSON") from None

    def _failed(self, message: str) -> ToolError:
        _log.warning("%s at %s: %s", self._label, self._url, message)  # the policy has no use for the address; we have
        return ToolError(f"{self._label} failed: {message}")


class Services:
    """Services on one HTTP session, closed together."""

    def __init__(self, environment: Mapping[str, str], timing: Timing) -> None:
        self.timing = timing
        self.session = aiohttp.ClientSession(
            # Sessions bound how much is asked at once; waiting for a connection must not count as time of a request.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._environment = environment
        self._open: list[Service] = []

    def open(self, label: str, url: str, remote: Remote, where: str) -> Service:
        """A service, if its key and its cache are at hand; else a :class:`ConfigError`."""
        key = read_key(remote.key_variable, self._environment, where) if remote.key_variable else None
        cache = Cache(remote.cache, where) if remote.cache else None
        service = Service(label, url, remote, key, cache, self)
        self._open.append(service)
        return service

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in self._open:
            await service.close()
        await self.session.close()


def _proxy_for(url: str) -> str | None:
    """The proxy of the environment. aiohttp's own way also reads .netrc, which collides with our keys."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
