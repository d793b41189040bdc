"""Client of SGLang's native ``/generate``: token ids in; ids, log-probabilities and weight versions out.

A turn is one request. It is retried only if it was never answered, and under a new request id, so no token is lost or
duplicated: tokens of an unanswered request were never part of a rollout.

* A turn that times out or is stopped is aborted on the engine, which then answers with what it has sampled.
* An engine that aborts a turn by itself (a pause, a weight update) answers the same way: finish ``abort``.
* An engine that fails until retries or time are used up, or whose answer cannot be recorded, is an
  :class:`EngineError`; one that refuses the turn a :class:`RefusedError`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import urllib.parse
import uuid
from collections.abc import Mapping
from typing import Any, Self

import aiohttp
import orjson

from slime_plugin.config import rollout as config
from slime_plugin.rollout.engine.engine import EngineError, Finish, Generation, RefusedError, Request
from slime_plugin.rollout.retry import backoff_s

ROUTING_HEADER = "X-SMG-Routing-Key"
"""The router uses it to keep a rollout on the server that has its prefix cached."""
ABORT_TIMEOUT_S = 10.0
"""Within which an aborted turn has to return what it sampled."""
RETRIED_STATUSES = frozenset({408, 409, 425, 429})
"""Client errors that a retry may not meet again; server errors are retried too."""
REFUSED_STATUSES = frozenset({400, 413, 422})
"""The turn itself is refused, such as one that is too long."""

_JSON = {"Content-Type": "application/json"}
_ABORTED = Generation((), (), "abort")
_log = logging.getLogger(__name__)


class _UnansweredError(Exception):
    """The turn has no answer; it may be retried."""


class SglangEngine:
    """Samples turns on an SGLang server, or on several behind a router. Use it as an async context manager."""

    def __init__(
        self, url: str, settings: config.EngineSettings, sampling: config.Rollout, stop_ids: frozenset[int]
    ) -> None:
        self._url = url.rstrip("/")
        self._settings = settings
        self._sampling = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": sorted(stop_ids),
            "no_stop_trim": True,  # or the stop token would be missing from the sampled ids
            "skip_special_tokens": False,
        }
        self._random = random.Random()  # separate: a run's seeded random numbers must not depend on retries
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)  # unlimited; the caller bounds the number of rollouts
        self._http = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def check(self) -> None:
        """Raise :class:`EngineError` if there is no healthy engine."""
        try:
            async with self._session.get(f"{self._url}/health", timeout=aiohttp.ClientTimeout(total=20)) as response:
                if response.status == 200:
                    return
                problem = f"answers {response.status}"
        except (aiohttp.ClientError, OSError) as error:
            problem = f"does not answer ({_reason(error)})"
        raise EngineError(
            f"the engine at {self._url} {problem}; start one with memorywalker engine, or leave engine.url out"
        )

    async def generate(self, request: Request) -> Generation:
        clock = asyncio.get_running_loop().time
        asked_for = math.inf if request.timeout is None else request.timeout
        until = clock() + min(asked_for, self._settings.timeout)
        attempts = self._settings.retries + 1
        problem, attempt = "", 0
        for attempt in range(1, attempts + 1):
            try:
                generation = await self._attempt(request, until - clock())
                if generation is not None:
                    return generation
                if asked_for <= self._settings.timeout:
                    return _ABORTED
                problem = f"no answer within {self._settings.timeout:g} seconds, nor to the abort"
            except _UnansweredError as error:
                problem = str(error)
            _log.info("turn of %s, attempt %d: %s", request.rollout, attempt, problem)
            if attempt < attempts:
                seconds = backoff_s(attempt, self._settings.backoff, self._random.random())
                await _wait(min(seconds, until - clock()), request.stop)
            if request.stop is not None and request.stop.is_set():
                return _ABORTED
            if clock() >= until:
                break
        raise EngineError(
            f"the engine at {self._url} did not answer a turn of {request.rollout} in {attempt} attempts; the last "
            f"one: {problem}. See its log; engine.retries and engine.timeout set how long to wait for it"
        )

    async def _attempt(self, request: Request, seconds: float) -> Generation | None:
        """Send a request once. None if it was aborted and the engine did not return what it had sampled."""
        name = uuid.uuid4().hex
        post = asyncio.ensure_future(self._post(request, name))
        tasks: list[asyncio.Future[Any]] = [post]
        try:
            await _wait(seconds, request.stop, post)
            if not post.done():
                tasks.append(asyncio.ensure_future(self._abort_until_done(post, name)))
                await asyncio.wait([post], timeout=ABORT_TIMEOUT_S)
            return self._read(post.result(), request) if post.done() else None
        except asyncio.CancelledError:
            await self._abort(name)
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _abort_until_done(self, post: asyncio.Future[Any], name: str) -> None:
        while not post.done():  # the engine ignores an abort that arrives before its request
            await self._abort(name)
            await asyncio.wait([post], timeout=1.0)

    async def _post(self, request: Request, name: str) -> Mapping[str, Any]:
        """Send the request and return the parsed body of a successful answer."""
        body = {
            "rid": name,
            "input_ids": list(request.prompt),
            "sampling_params": {**self._sampling, "max_new_tokens": request.max_tokens, "sampling_seed": request.seed},
            "return_logprob": True,
            "stream": False,
        }
        headers = {**_JSON, ROUTING_HEADER: urllib.parse.quote(request.rollout)}
        try:
            async with self._session.post(
                f"{self._url}/generate", data=orjson.dumps(body), headers=headers
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _UnansweredError(_reason(error)) from error
        if response.status != 200:
            raise self._failure(request, response.status, _excerpt(answer))
        try:
            value = orjson.loads(answer)
        except ValueError as error:
            raise _UnansweredError(f"the answer is not JSON: {_excerpt(answer)}") from error
        if not isinstance(value, dict) or not isinstance(value.get("meta_info"), dict):
            raise _UnansweredError(f"the answer has no meta_info: {_excerpt(answer)}")
        return value

    def _read(self, answer: Mapping[str, Any], request: Request) -> Generation:
        """Convert an answer, checking that its parts are consistent."""
        meta = answer["meta_info"]
        try:
            finish = self._finish(meta.get("finish_reason"), request)
            pairs = [(float(logprob), int(token)) for logprob, token, *_ in meta.get("output_token_logprobs") or ()]
            tokens, logprobs = tuple(token for _, token in pairs), tuple(logprob for logprob, _ in pairs)
            ids = tuple(answer.get("output_ids", tokens))
            weights = _weights(meta, len(tokens))
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # it may be any JSON
            raise self._unusable(request, f"no ids and log-probabilities ({_reason(error)})") from error
        if ids != tokens:
            raise self._unusable(request, f"{len(ids)} tokens and log-probabilities of {len(tokens)} others")
        if len(tokens) > request.max_tokens:
            raise self._unusable(request, f"{len(tokens)} tokens where at most {request.max_tokens} were requested")
        if weights and sum(count for _, count in weights) != len(tokens):
            raise self._unusable(request, f"{len(tokens)} tokens and the weight versions {weights}")
        if not tokens and finish != "abort":
            raise _UnansweredError(f"0 tokens, though the turn finished with {finish}")
        try:
            return Generation(tokens, logprobs, finish, weights)
        except EngineError as error:
            raise self._unusable(request, f"an impossible one ({error})") from None

    def _finish(self, reason: Any, request: Request) -> Finish:
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind == "abort":
            status = reason.get("status_code") if isinstance(reason, dict) else None
            if status is not None:  # an error in the body instead of the status line
                raise self._failure(request, int(status), str(reason.get("message")))
            return "abort"
        if kind in ("stop", "length"):
            return "stop" if kind == "stop" else "length"
        raise _UnansweredError(f"the turn finished with {reason!r:.80}")

    def _failure(self, request: Request, status: int, message: str) -> EngineError | _UnansweredError:
        if not 400 <= status < 500 or status in RETRIED_STATUSES:
            return _UnansweredError(f"{status} {message}")
        return (RefusedError if status in REFUSED_STATUSES else EngineError)(
            f"the engine at {self._url} refuses a turn of {request.rollout} of {len(request.prompt)} tokens and up to "
            f"{request.max_tokens} more: {status} {message}. If that is too long for it, lower rollout.context_tokens"
        )

    def _unusable(self, request: Request, what: str) -> EngineError:
        return EngineError(
            f"the engine at {self._url} answered a turn of {request.rollout} with {what}; that cannot be recorded. "
            "See its log, and check that its version is the one in requirements.sglang"
        )

    async def _abort(self, name: str) -> None:
        """Abort at the server; behind a router, at all servers, since it does not forward aborts."""
        if await self._abort_at(self._url, name) != 404:
            return
        try:
            urls = await worker_urls(self._session, self._url, ABORT_TIMEOUT_S)
        except EngineError as error:
            _log.info("%s knows no /abort_request, and %s", self._url, error)
            return
        await asyncio.gather(*(self._abort_at(url, name) for url in urls))

    async def _abort_at(self, url: str, name: str) -> int | None:
        """The HTTP status, or None without an answer."""
        body, seconds = orjson.dumps({"rid": name}), aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
        try:
            async with self._session.post(
                f"{url}/abort_request", data=body, headers=_JSON, timeout=seconds
            ) as response:
                return response.status
        except (aiohttp.ClientError, OSError) as error:
            _log.info("could not abort a turn at %s: %s", url, _reason(error))
            return None

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("enter the engine first: async with SglangEngine(...) as engine")
        return self._http


async def worker_urls(http: aiohttp.ClientSession, router: str, seconds: float) -> list[str]:
    """Return the URLs of the servers behind a router, which itself forwards only turns."""
    try:
        async with http.get(f"{router}/workers", timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
            return [str(worker["url"]) for worker in orjson.loads(await answer.read())["workers"]]
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:  # it may be any JSON
        raise EngineError(f"{router}/workers lists no servers: {_reason(error)}") from error


async def _wait(seconds: float, stop: asyncio.Event | None, *tasks: asyncio.Future[Any]) -> None:
    """Wait until the time is over, ``stop`` is set or a task is done."""
    stopped = asyncio.ensure_future((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait([stopped, *tasks], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()


def _weights(meta: Mapping[str, Any], tokens: int) -> tuple[tuple[str, int], ...]:
    spans = meta.get("weight_versions")
    if spans:
        return tuple((str(span["version"]), int(span["end"]) - int(span["start"])) for span in spans)
    version = meta.get("weight_version")
    return () if version is None else ((str(version), tokens),)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _excerpt(body: bytes) -> str:
    return " ".join(body[:300].decode("utf-8", errors="replace").split())
