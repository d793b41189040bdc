"""Tools against real HTTP services on loopback: what they send, what they make of answers, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime_plugin.config import tools as config
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.retry import RateLimiter, Timing, parse_retry_after
from slime_plugin.rollout.tools import Tool, ToolError, open_tools
from slime_plugin.rollout.tools.api_keys import Key, read_key
from slime_plugin.rollout.tools.cache import cache_key
from slime_plugin.rollout.tools.search import Document, show
from tests.rollout.services import (
    Clock,
    Service,
    breaks_off,
    echoes_its_key,
    found,
    hangs,
    resets,
    says,
    serving,
)

KEY = "sk-s3cret/+key"  # with characters that change in an address
ENVIRONMENT = {"DASHSCOPE_API_KEY": KEY, "FIRECRAWL_API_KEY": "fc-0ther"}
PARIS = "France\nParis is the capital of France."


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def search_at(service: Service, **settings: Any) -> config.Search:
    return config.Search(backend=config.HttpRetriever(url=f"{service.url}/retrieve", **settings))


async def call(tool: config.ToolSettings, arguments: Mapping[str, Any], clock: Clock | None = None) -> str:
    async with open_tools([tool], ENVIRONMENT, (clock or Clock()).timing()) as tools:
        (opened,) = tools.values()
        return await opened(arguments)


def failure(run: Callable[[], Coroutine[Any, Any, object]]) -> str:
    with pytest.raises(ToolError) as caught:
        asyncio.run(run())
    return str(caught.value)


# What is sent and shown


def test_a_retrieval_server_is_asked_as_search_r1_asks_it() -> None:
    async def run() -> None:
        async with serving(found(PARIS, '"Rome"\nRome is\nin Italy.', "no title")) as service:
            result = await call(search_at(service), {"query": " capital of France "})
            assert result == ("[1] France: Paris is the capital of France.\n[2] Rome: Rome is in Italy.\n[3] no title")
            assert service.bodies == [{"queries": ["capital of France"], "topk": 3, "return_scores": True}]
            assert service.paths == ["/retrieve"]
            assert "Authorization" not in service.headers[0]

    asyncio.run(run())


def test_the_web_search_of_dashscope() -> None:
    docs = [
        {"title": "A &amp; B", "url": "https://a.example/x", "snippet": "the <em>first</em>\nhit", "hostname": "a"},
        {"title": "no text", "url": "https://b.example", "snippet": None},
        {"title": None, "url": "https://c.example", "snippet": "second"},
        {"title": "D", "url": None, "snippet": "third"},
        {"title": "E", "url": "https://e.example", "snippet": "beyond top_k"},
    ]

    async def run() -> None:
        answer = {"status": 0, "success": True, "message": "success", "data": {"total": 5, "docs": docs}}
        async with serving(says(answer)) as service:
            backend = config.DashScope(url=service.url, parameters={"scene": "turbo"})
            result = await call(config.Search(backend=backend), {"query": "q"})
            assert result.splitlines() == [
                "[1] A & B (https://a.example/x): the first hit",
                "[2] https://c.example: second",
                "[3] D: third",
            ]
            assert service.bodies == [{"uq": "q", "page": 1, "rows": 10, "scene": "turbo"}]
            assert service.headers[0]["Authorization"] == f"Bearer {KEY}"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"status": 0, "data": {"docs": []}}, "no results"),
        ({"status": 0, "data": None}, "no results"),
        ({"status": 0, "data": {"docs": None}}, "no results"),
        ({"status": 7, "message": "quota exceeded"}, "quota exceeded"),
        ({"code": "InvalidApiKey"}, "no reason given"),
        ([], "not an object"),
    ],
)
def test_what_dashscope_may_answer(answer: Any, words: str) -> None:
    async def run() -> str:
        async with serving(says(answer)) as service:
            return await call(config.Search(backend=config.DashScope(url=service.url)), {"query": "q"})

    if words == "no results":
        assert asyncio.run(run()) == words
    else:
        assert words in failure(run)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        None,
        {"result": []},
        {"result": [[], []]},
        {"result": [[{"document": {"text": "x"}}]]},
        {"result": [[3]]},
    ],
)
def test_an_answer_of_another_shape_is_none(answer: Any) -> None:
    async def run() -> str:
        async with serving(says(answer)) as service:
            return await call(search_at(service), {"query": "q"})

    assert failure(run).startswith("search failed: the server answered with")


def test_documents_are_shown_one_per_line() -> None:
    documents = [Document("one\r\ntwo\u2028three", "T\nt"), Document("x" * 30), Document("half \ud800 a character")]
    settings = config.Search(max_chars=20)
    assert show(documents, settings).split("\n") == [
        "[1] T t: one two three",
        f"[2] {'x' * 17}...",
        "[3] half ? a character",
    ]
    plain = show(documents, config.Search(numbered=False))
    assert plain.split("\n") == ["one two three", "x" * 30, "half ? a character"]
    assert show([], settings) == "no results"


def test_a_blank_query_is_told_to_the_policy() -> None:
    async def run() -> str:
        async with serving(found(PARIS)) as service:
            try:
                return await call(search_at(service), {"query": " \n"})
            finally:
                assert service.asked == 0

    assert "blank" in failure(run)


# The visit tool


def visit_at(pages: Service, summaries: Service, **settings: Any) -> config.Visit:
    return config.Visit(
        firecrawl=config.Firecrawl(url=f"{pages.url}/", cache=settings.pop("cache", None)),
        summariser=config.Summariser(url=f"{summaries.url}/v1", model="m"),
        **settings,
    )


def page(text: str) -> dict[str, Any]:
    return {"success": True, "data": {"markdown": text, "metadata": {"statusCode": 200}}}


def summary(text: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


def test_a_page_is_fetched_and_summarised() -> None:
    async def run() -> None:
        async with (
            serving(says(page("# Paris\nbuilt long ago"))) as pages,
            serving(says(summary(" It is old. "))) as llm,
        ):
            arguments = {"url": "https://paris.example/", "goal": "how old?"}
            assert await call(visit_at(pages, llm, max_page_chars=13), arguments) == "It is old."
            assert pages.paths == ["/v2/scrape"]
            assert pages.bodies == [{"url": arguments["url"], "formats": ["markdown"], "onlyMainContent": True}]
            assert pages.headers[0]["Authorization"] == "Bearer fc-0ther"
            assert llm.paths == ["/v1/chat/completions"]
            assert llm.headers[0]["Authorization"] == f"Bearer {KEY}"
            (body,) = llm.bodies
            assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 1024, 0)
            assert [message["role"] for message in body["messages"]] == ["system", "user"]
            assert body["messages"][1]["content"] == "Goal: how old?\n\nPage:\n# Paris\nbuilt"

    asyncio.run(run())


def test_without_a_summariser_the_page_is_the_result() -> None:
    async def run() -> None:
        async with serving(says(page("0123456789" * 2))) as pages:
            tool = config.Visit(firecrawl=config.Firecrawl(url=pages.url), summariser=None, max_chars=10)
            assert await call(tool, {"url": "http://x.example", "goal": "g"}) == "0123456..."

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (says({"success": False, "error": "blocked by the site"}), "blocked by the site"),
        (says({"success": False, "error": "no such site"}, 403), "403"),
        (says(page(" \n")), "no text on the page"),
        (says({"success": True, "data": {}}), "no text on the page"),
        (says([]), "not an object"),
    ],
)
def test_a_page_that_cannot_be_read(reply: Any, words: str) -> None:
    async def run() -> str:
        async with serving(reply) as pages, serving(says(summary("never"))) as llm:
            try:
                return await call(visit_at(pages, llm), {"url": "http://x.example", "goal": "g"})
            finally:
                assert llm.asked == 0

    assert words in failure(run)


@pytest.mark.parametrize("answer", [summary(None), summary(" "), summary("<think>so</think> "), {"choices": []}, {}])
def test_a_summariser_without_a_summary(answer: Any) -> None:
    async def run() -> str:
        async with serving(says(page("p"))) as pages, serving(says(answer)) as llm:
            return await call(visit_at(pages, llm), {"url": "http://x.example", "goal": "g"})

    assert "the summariser says nothing" in failure(run)


def test_thoughts_of_the_summariser_are_not_part_of_its_summary() -> None:
    async def run() -> None:
        async with serving(says(page("p"))) as pages, serving(says(summary("<think>hm</think>\n\n42"))) as llm:
            assert await call(visit_at(pages, llm), {"url": "http://x.example", "goal": "g"}) == "42"

    asyncio.run(run())


@pytest.mark.parametrize("url", ["", "paris", "ftp://x.example", "http://", "file:///etc/passwd", "http://[", "x y"])
def test_an_address_that_is_none_is_not_fetched(url: str) -> None:
    async def run() -> str:
        async with serving(says(page("p"))) as pages, serving(says(summary("s"))) as llm:
            try:
                return await call(visit_at(pages, llm), {"url": url, "goal": "g"})
            finally:
                assert pages.asked == 0

    assert "is not the address of a page" in failure(run)


# What goes wrong on the wire


@pytest.mark.parametrize("trouble", [says("busy", 500), says("", 503), says("", 429), resets, breaks_off])
def test_passing_trouble_is_waited_out(trouble: Any) -> None:
    async def run() -> None:
        clock = Clock()
        async with serving(trouble, trouble, found(PARIS)) as service:
            assert (
                await call(search_at(service), {"query": "q"}, clock) == "[1] France: Paris is the capital of France."
            )
            assert service.asked == 3
        assert clock.slept == [0.5, 1.0]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (says("out of\n order", 500), "the service answered 500: out of order, 3 times"),
        (resets, "the connection failed (ServerDisconnectedError), 3 times"),
        (breaks_off, "the connection failed (ClientPayloadError), 3 times"),
    ],
)
def test_lasting_trouble_ends_as_a_tool_error(trouble: Any, words: str) -> None:
    clock = Clock()

    async def run() -> str:
        async with serving(trouble) as service:
            try:
                return await call(search_at(service, retries=2), {"query": "q"}, clock)
            finally:
                assert service.asked == 3

    assert failure(run) == f"search failed: {words}"
    assert clock.slept == [0.5, 1.0]


def test_nobody_listens() -> None:
    async def run() -> str:
        async with serving(found()) as service:
            pass
        return await call(search_at(service, retries=1), {"query": "q"})

    assert failure(run) == "search failed: the connection failed (ClientConnectorError), 2 times"


@pytest.mark.parametrize("asked", ["7", "Thu, 01 Jan 1970 00:16:47 GMT"])  # the clock begins at 1000 s
def test_a_service_is_given_the_time_it_asks_for(asked: str) -> None:
    async def run() -> None:
        clock = Clock()
        async with serving(says("", 429, Retry_After=asked), found(PARIS)) as service:
            await call(search_at(service), {"query": "q"}, clock)
            assert service.asked == 2
        assert clock.slept == [7.0]

    asyncio.run(run())


def test_a_service_that_asks_for_too_much_time_is_not_waited_for() -> None:
    clock = Clock()

    async def run() -> str:
        async with serving(says("slow down", 429, Retry_After="3600")) as service:
            try:
                return await call(search_at(service), {"query": "q"}, clock)
            finally:
                assert service.asked == 1

    assert failure(run) == "search failed: the service answered 429: slow down, and asks for 3600 s, over 60"
    assert clock.slept == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (says("<html>"), "the answer is not JSON"),
        (says("[" * 100_000), "the answer is not JSON"),
        (says("", 204), "the answer is not JSON"),
        (says("", 404), "the service answered 404"),
        (says({"error": "no \x1b[2J credit"}, 402), '402: {"error": "no \\u001b[2J credit"}'),
        (says("", 302, Location="http://elsewhere.example"), "the service answered 302"),
        (says("x" * 2001), "the answer has more than 2000 bytes"),
    ],
)
def test_an_answer_that_will_not_get_better_is_not_asked_for_again(reply: Any, words: str) -> None:
    async def run() -> str:
        async with serving(reply) as service:
            try:
                return await call(search_at(service, max_bytes=200_000 if "JSON" in words else 2000), {"query": "q"})
            finally:
                assert service.asked == 1

    assert words in failure(run)


def test_a_small_answer_that_unpacks_into_a_huge_one() -> None:
    async def bomb(request: web.Request) -> web.StreamResponse:
        response = web.Response(body=b" " * 8_000_001)
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async def run() -> str:
        async with serving(bomb) as service:
            return await call(search_at(service), {"query": "q"})

    assert failure(run) == "search failed: the answer has more than 8000000 bytes"


def test_a_service_that_hangs() -> None:
    async def run() -> str:
        async with serving(hangs) as service:
            try:
                return await call(search_at(service, timeout=0.1), {"query": "q"})
            finally:
                assert service.asked == 1  # it has had its time

    assert failure(run) == "search failed: no answer within 0.1 s"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "refused"), (401, "key"), (402, "key"), (403, "key"), (404, "unavailable"), (422, "refused")),
        *((429, "rate limit"), (500, "unavailable"), (503, "unavailable")),
    ],
)
def test_failures_have_a_kind(status: int, kind: str) -> None:
    async def run() -> None:
        async with serving(says("no", status)) as service:
            await call(search_at(service, retries=0), {"query": "q"})

    with pytest.raises(ToolError) as caught:
        asyncio.run(run())
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "key"),
        (402, "key"),
        (403, "refused"),
        (404, "refused"),
        (429, "rate limit"),
        (500, "refused"),
        (503, "unavailable"),
    ],
)
def test_a_page_is_the_choice_of_the_policy(status: int, kind: str) -> None:
    """Firecrawl answers so for pages that are gone and sites that it does not read; the key is none the worse."""

    async def run() -> None:
        async with serving(says("no", status)) as service:
            visit = config.Visit(firecrawl=config.Firecrawl(url=service.url, retries=0), summariser=None)
            await call(visit, {"url": "https://example.com/gone", "goal": "g"})

    with pytest.raises(ToolError) as caught:
        asyncio.run(run())
    assert caught.value.kind == kind


def test_a_kind_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="'rate_limit' is not a kind of tool error; use 'rate limit'"):
        ToolError("slow down", "rate_limit")  # type: ignore[arg-type]  # on purpose
    assert ToolError("any", "timeout").kind == "timeout"


class OldError(ToolError):
    """As one could write it for 0.6."""

    def __init__(self, url: str) -> None:
        self.url = url


def test_errors_that_were_written_for_an_earlier_version() -> None:
    assert OldError("x").kind == "refused"
    assert ToolError().kind == "refused"


def test_what_is_not_http() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 smtp ready\r\n\r\n")
        writer.close()

    async def run() -> str:
        async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            backend = config.HttpRetriever(url=f"http://127.0.0.1:{port}")
            return await call(config.Search(backend=backend), {"query": "q"})

    assert "does not speak HTTP" in failure(run)


def test_a_cancelled_call_leaves_the_tool_usable() -> None:
    async def run() -> None:
        async with (
            serving(hangs, found(PARIS)) as service,
            open_tools([search_at(service)], ENVIRONMENT) as tools,
        ):
            task = asyncio.ensure_future(tools["search"]({"query": "q"}))
            while not service.asked:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert "Paris" in await tools["search"]({"query": "q"})

    asyncio.run(run())


def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(found(PARIS)) as proxy:
            monkeypatch.setenv("http_proxy", proxy.url)
            backend = config.HttpRetriever(url="http://search.invalid/retrieve", retries=0)
            assert "Paris" in await call(config.Search(backend=backend), {"query": "q"})
            assert proxy.paths == ["http://search.invalid/retrieve"]
            monkeypatch.setenv("no_proxy", "search.invalid")
            with pytest.raises(ToolError, match="connection failed"):
                await call(config.Search(backend=backend), {"query": "q"})
            assert proxy.asked == 1

    asyncio.run(run())


# Limits


def test_a_pace_is_kept_in_the_order_of_asking() -> None:
    async def run() -> None:
        clock = Clock()
        limiter = RateLimiter(4.0, clock.timing())
        turns: list[tuple[int, float]] = []

        async def rollout(number: int) -> None:
            for _ in range(2):
                await limiter.acquire()
                turns.append((number, clock.time))
                await asyncio.sleep(0)

        await asyncio.gather(*(rollout(number) for number in range(3)))
        assert turns == [(0, 0.0), (1, 0.25), (2, 0.5), (0, 0.75), (1, 1.0), (2, 1.25)]
        clock.time = 100.0  # a break is not saved up for a burst
        await asyncio.gather(rollout(0), rollout(1))
        assert [time for _, time in turns[6:]] == [100.0, 100.25, 100.5, 100.75]

    asyncio.run(run())


def test_a_turn_that_is_given_up_is_not_lost() -> None:
    async def run() -> None:
        clock = Clock()
        gate = asyncio.Event()

        async def sleep(seconds: float) -> None:
            await gate.wait()
            clock.time += seconds

        limiter = RateLimiter(1.0, Timing(now=lambda: clock.time, sleep=sleep))
        await limiter.acquire()
        first, second = asyncio.create_task(limiter.acquire()), asyncio.create_task(limiter.acquire())
        await asyncio.sleep(0)
        first.cancel()
        gate.set()
        await second
        assert clock.time == 1.0

    asyncio.run(run())


def test_all_rollouts_share_the_rate_and_repetitions_count() -> None:
    async def run() -> None:
        clock = Clock()
        async with serving(says("", 500, Retry_After="0"), found(PARIS)) as service:
            async with open_tools([search_at(service, rate=2.0)], ENVIRONMENT, clock.timing()) as tools:
                await asyncio.gather(*(tools["search"]({"query": str(i)}) for i in range(4)))
            assert service.asked == 5
        assert [seconds for seconds in clock.slept if seconds] == [0.5] * 4  # five requests, half a second apart

    asyncio.run(run())


def test_backoff_differs() -> None:
    assert Timing().jitter() != Timing().jitter()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("-3", None),
        ("1.5", None),
        ("²", None),
        ("0", 0.0),
        (" 12 ", 12.0),
        ("nonsense", None),
    ],
)
def test_what_retry_after_may_say(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, Timing()) == seconds


def test_a_date_in_the_past_asks_for_nothing() -> None:
    assert parse_retry_after("Thu, 01 Jan 1970 00:00:00 GMT", Timing()) == 0.0


# The cache


def test_an_answer_is_asked_for_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(found(PARIS), found("another")) as service:
            tool = search_at(service, cache=tmp_path / "new" / "cache")
            first = await call(tool, {"query": "q"})
            assert await call(tool, {"query": " q "}) == first
            assert (
                await call(tool.model_copy(update={"numbered": False}), {"query": "q"})
                == "Paris is the capital of France."
            )
            assert service.asked == 1
            assert await call(tool, {"query": "Q"}) != first  # another question
            assert await call(tool.model_copy(update={"top_k": 1}), {"query": "q"}) == "[1] another"  # another request
            assert service.asked == 3

    asyncio.run(run())


def test_rollouts_that_ask_the_same_at_once_share_one_request(tmp_path: Path) -> None:
    async def run() -> None:
        gate = asyncio.Event()

        async def slow(request: web.Request) -> web.StreamResponse:
            await gate.wait()
            return await found(PARIS)(request)

        async with serving(slow) as service:
            async with open_tools([search_at(service, cache=tmp_path)], ENVIRONMENT) as tools:
                calls = [asyncio.ensure_future(tools["search"]({"query": "q"})) for _ in range(16)]
                while not service.asked:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                calls[0].cancel()  # the one whose request it was
                gate.set()
                results = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(results[0], asyncio.CancelledError)
            assert set(results[1:]) == {"[1] France: Paris is the capital of France."}
            assert service.asked == 1

    asyncio.run(run())


def test_what_is_under_way_at_the_end_is_dropped(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(hangs) as service:
            async with open_tools([search_at(service, cache=tmp_path)], ENVIRONMENT) as tools:
                task = asyncio.ensure_future(tools["search"]({"query": "q"}))
                while not service.asked:
                    await asyncio.sleep(0.01)
                task.cancel()
            assert await asyncio.gather(task, return_exceptions=True)
            assert not [task for task in asyncio.all_tasks() if "Service._join" in repr(task)]

    asyncio.run(run())


@pytest.mark.parametrize("reply", [says("", 404), says("<html>"), says({"result": "?"})])
def test_failures_are_not_kept(reply: Any, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(reply, found(PARIS)) as service:
            tool = search_at(service, cache=tmp_path)
            with pytest.raises(ToolError):
                await call(tool, {"query": "q"})
            assert not list(tmp_path.rglob("*.json"))
            assert "Paris" in await call(tool, {"query": "q"})
            assert service.asked == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    "damage", [b"", b'{"key"', b"[]", b"\xff\xfe", b'{"key": "0", "answer": "{}"}', b'{"answer": 3}']
)
def test_a_damaged_entry_is_replaced(damage: bytes, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(found(PARIS)) as service:
            tool = search_at(service, cache=tmp_path)
            await call(tool, {"query": "q"})
            (entry,) = tmp_path.rglob("*.json")
            whole = entry.read_bytes()
            entry.write_bytes(damage)
            assert "Paris" in await call(tool, {"query": "q"})
            assert service.asked == 2
            assert entry.read_bytes() == whole
            assert [path for path in tmp_path.rglob("*") if path.is_file()] == [entry]

    asyncio.run(run())


def test_pages_are_kept_apart_from_what_was_made_of_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(says(page("p"))) as pages, serving(says(summary("s"))) as llm:
            tool = visit_at(pages, llm, cache=tmp_path)
            for goal in ("a", "b", "a"):
                await call(tool, {"url": "http://x.example", "goal": goal})
            assert (pages.asked, llm.asked) == (1, 3)

    asyncio.run(run())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tool = config.Search(backend=config.HttpRetriever(url="http://127.0.0.1:1", cache=tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"tools.0.backend.cache: .*cannot be created"):
        asyncio.run(call(tool, {"query": "q"}))


def test_a_disk_that_takes_no_more_costs_only_the_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with (
            serving(found(PARIS)) as service,
            open_tools([search_at(service, cache=tmp_path)], ENVIRONMENT) as tools,
        ):
            tmp_path.rmdir()  # from under its feet
            assert "Paris" in await tools["search"]({"query": "q"})

    asyncio.run(run())
    assert "an answer is not cached" in caplog.text


ELSEWHERE = """
import asyncio, sys
from slime_plugin.rollout.tools import open_tools
from slime_plugin.config.tools import HttpRetriever, Search

async def main(url, cache):
    backend = HttpRetriever(url=url, cache=cache)
    async with open_tools([Search(backend=backend)]) as tools:
        print(await tools["search"]({"query": "q"}))

asyncio.run(main(*sys.argv[1:]))
"""


def test_another_process_finds_the_answer(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(found(PARIS)) as service:
            tool = search_at(service, cache=tmp_path)
            here = await call(tool, {"query": "q"})
            command = [sys.executable, "-c", ELSEWHERE, f"{service.url}/retrieve", str(tmp_path)]
            there = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
            assert there.stdout == f"{here}\n"
            assert service.asked == 1

    asyncio.run(run())


WRITER = """
import sys
from pathlib import Path
from slime_plugin.rollout.tools.cache import Cache

cache, letter = Cache(Path(sys.argv[1]), "test"), sys.argv[2]
for _ in range(100):
    cache.write("0" * 64, "request", letter * 100_000)
    answer = cache.read("0" * 64)
    assert len(answer) == 100_000 and len(set(answer)) == 1, answer
"""


def test_processes_that_write_the_same_entry_do_not_mix(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), letter]) for letter in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_parts_of_a_request_do_not_run_together() -> None:
    assert cache_key("ab", "c") != cache_key("a", "bc")


# Keys


@pytest.mark.parametrize("variable", ["unset", "blank"])
def test_missing_keys_are_told_before_anything_starts(variable: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("not JSON")  # it would be told if the index were built
    configs: list[config.ToolSettings] = [
        config.Search(name="local", backend=config.Bm25(corpus=corpus)),
        config.Search(),
        config.Visit(),
    ]
    environment = {} if variable == "unset" else {"DASHSCOPE_API_KEY": " ", "FIRECRAWL_API_KEY": ""}

    async def run() -> None:
        async with open_tools(configs, environment):
            raise AssertionError

    with pytest.raises(ConfigError) as caught:
        asyncio.run(run())
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["tools.1.backend", "tools.2.firecrawl"]
    assert lines[0] == (
        "tools.1.backend: the environment variable DASHSCOPE_API_KEY is not set; it has to hold the service's key"
    )


@pytest.mark.parametrize("secret", ["two words", "a\nb", "schlüssel", "tab\there"])
def test_a_key_that_is_none_is_refused_unseen(secret: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_key("K", {"K": secret}, "tools.0")
    assert "K holds characters that no key has" in str(caught.value)
    assert secret not in str(caught.value)


def test_a_key_is_stripped_of_the_line_break_of_its_file() -> None:
    assert read_key("K", {"K": "abc\n"}, "x").header() == {"Authorization": "Bearer abc"}


def test_a_key_is_taken_out_in_every_form() -> None:
    key = Key('a"b/c+d', "K")
    assert key.redact('a"b/c+d a\\"b/c+d a%22b/c%2Bd a%22b%2Fc%2Bd') == "$K $K $K $K"
    assert 'a"b' not in f"{key!r} {key!s} {[key]}"


async def echoes_in_a_result(request: web.Request) -> web.StreamResponse:
    docs = [{"title": request.headers["Authorization"], "url": f"http://x/?key={KEY}", "snippet": f"key {KEY}"}]
    return web.json_response({"status": 0, "data": {"docs": docs}})


async def echoes_and_breaks(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="x" * 190 + request.headers["Authorization"])  # across the end of the excerpt


@pytest.mark.parametrize("reply", [echoes_its_key, echoes_in_a_result, echoes_and_breaks, resets, says({"status": 1})])
def test_a_key_is_shown_to_nobody(
    reply: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    shown: list[object] = []

    async def run() -> None:
        async with serving(reply) as service:
            tool = config.Search(backend=config.DashScope(url=service.url, cache=tmp_path, retries=1))
            async with open_tools([tool], ENVIRONMENT, Clock().timing()) as tools:
                shown.extend([tools, vars(tools["search"]), tool, tool.model_dump()])
                try:
                    shown.append(await tools["search"]({"query": "q"}))
                except ToolError as error:
                    shown.extend([error, repr(error), error.__cause__])
            assert service.headers[0]["Authorization"] == f"Bearer {KEY}"

    asyncio.run(run())
    printed = capfd.readouterr()
    kept = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert bool(kept) == (reply is echoes_in_a_result)
    for text in [*map(str, shown), *map(repr, shown), *kept, caplog.text, printed.out, printed.err]:
        assert "s3cret" not in text
    if reply is echoes_in_a_result:
        assert shown[-1] == "[1] Bearer $DASHSCOPE_API_KEY (http://x/?key=$DASHSCOPE_API_KEY): key $DASHSCOPE_API_KEY"


# Opening


def test_tools_are_named_and_described() -> None:
    configs: list[config.ToolSettings] = [
        config.Search(backend=config.HttpRetriever(url="http://127.0.0.1:1")),
        config.Search(name="wiki", description="D", backend=config.HttpRetriever(url="http://127.0.0.1:1")),
        config.Visit(),
    ]

    async def run() -> dict[str, Tool]:
        async with open_tools(configs, ENVIRONMENT) as tools:
            return tools

    tools = asyncio.run(run())
    assert list(tools) == ["search", "wiki", "visit"]
    assert tools["wiki"].schema.description == "D"
    assert json.loads(json.dumps(tools["visit"].schema.to_json()))["function"]["parameters"]["required"] == [
        "url",
        "goal",
    ]


def test_two_tools_of_one_name() -> None:
    configs = [config.Search(backend=config.HttpRetriever(url="http://127.0.0.1:1"))] * 2

    async def run(configs: Sequence[config.ToolSettings]) -> None:
        async with open_tools(configs):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"tools.1: there are two tools named 'search'"):
        asyncio.run(run(configs))


def test_to_import_tools_is_cheap() -> None:
    code = (
        "import sys, slime_plugin.rollout.tools, slime_plugin.rollout.reward, slime_plugin.config.tools\n"
        "print([name for name in ('aiohttp', 'bm25s', 'torch', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
