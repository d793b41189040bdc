"""A session asked too much, too often, or at the wrong moment: limits hold, everything is counted, nothing is kept."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.config.rollout import Rollout
from slime_plugin.recovery.causes import MAX_PAIRS, explain
from slime_plugin.rollout.base_rollout import Ending
from slime_plugin.rollout.chat import ChatML
from slime_plugin.tap import tap_session
from slime_plugin.tap.blocks import Block
from slime_plugin.tap.payload import Part, Payload, Reply, TapError, Text, ToolCall, ToolResult
from slime_plugin.tap.session_log import LogError
from slime_plugin.tap.tap import Tap
from tests.tap.engines import Scripted, spell
from tests.tap.test_session import MODEL, SYSTEM, TASK, TOOLS, Client, looking, play, record_of, three_turns


async def refused(client: Client, number: int, says: str | None = None) -> str:
    """Ask something that was not asked before; what it is told if it is refused."""
    try:
        await client.ask([SYSTEM, TASK, Text("user", f"{number}.")], says or looking(number))
    except TapError as error:
        return error.kind
    return ""


def sizes(client: Client) -> tuple[int, int]:
    """What a session keeps: nodes, and bytes of its log."""
    return len(client.session.contexts.nodes), client.tap.log_of("s").stat().st_size


def test_turns_are_limited_also_when_all_ask_at_once(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        kinds = await asyncio.gather(*(refused(client, number) for number in range(300)))
        assert Counter(kinds) == {"": 5, "overloaded": 295}  # what is under way is still answered
        assert not client.session.over.is_set()
        assert await refused(client, 300) == "invalid"

    client = play(tmp_path, story, turns=5)
    assert len(client.engine.requests) == 5
    assert client.session.ending == Ending("truncated", "turns")
    assert not client.session.lost


def test_only_so_many_turns_are_under_way(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        most = tap_session.MAX_CONCURRENT_TURNS
        waiting = [asyncio.create_task(refused(client, number, Scripted.HANG)) for number in range(most)]
        await asyncio.sleep(0.05)
        assert await refused(client, most) == "overloaded"
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert await refused(client, most) == ""

    assert play(tmp_path, story, turns=100).session.lost == {"cancelled": 3 * tap_session.MAX_CONCURRENT_TURNS}


def test_titles_do_not_go_on_for_ever(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        await client.ask([SYSTEM, TASK], looking(0))
        for number in range(15):
            await client.ask([TASK, Text("user", f"{number}.")], spell("A title."), tools=())
        with pytest.raises(TapError, match="this rollout is over"):
            await client.ask([TASK, Text("user", "One more.")], spell("A title."), tools=())

    play(tmp_path, story, turns=2)


def test_what_fails_or_is_hung_up_on_leaves_nothing(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        await three_turns(client)
        nodes, size = sizes(client)
        for number in range(20):
            with pytest.raises(TapError):
                await client.ask([SYSTEM, TASK, Text("user", f"{number} " * 50)], None)
            waiting = asyncio.create_task(client.ask([SYSTEM, Text("user", f"{number} " * 50)], Scripted.HANG))
            await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert sizes(client)[0] == nodes
        assert sizes(client)[1] - size < 20 * 40  # how much was lost, and nothing of what was asked

    assert play(tmp_path, story, turns=100).session.lost["cancelled"] > 0


def test_a_turn_that_is_aborted_while_its_retry_waits_is_counted_before_the_end(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        asked: list[Part] = [SYSTEM, TASK]
        first = asyncio.create_task(client.ask(asked, Scripted.HANG, digest="x"))
        await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.create_task(client.ask(asked, Scripted.HANG, digest="x"))
        await asyncio.sleep(0.01)
        await client.session.close({})
        await asyncio.gather(first, second, return_exceptions=True)
        assert len(client.engine.requests) == 2
        with pytest.raises(TapError, match="this rollout is over"):
            await client.ask(asked, looking(0), digest="y")

    client = play(tmp_path, story)
    assert client.session.lost == {"cancelled": 6}
    assert client.tap.read(client.tap.log_of("s")).lost == {"cancelled": 6}


def test_a_retry_gets_its_answer_although_the_rollout_is_over(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        answer = await client.ask([SYSTEM, TASK], looking(0), digest="x")
        client.session.stop(Ending("truncated", "time"))
        assert await client.ask([SYSTEM, TASK], looking(1), digest="x") == answer
        with pytest.raises(TapError, match="this rollout is over"):
            await client.ask([SYSTEM, TASK], looking(1), digest="y")

    play(tmp_path, story)


@pytest.mark.parametrize("part", [0, 1, 7, 150])
def test_a_log_that_cannot_be_written_keeps_what_was_answered(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a moment, after some bytes: from then on nothing is written, and nothing is wrong."""
    usual = os.write
    full = False

    def write(file: int, data: bytes) -> int:
        if not full:
            return usual(file, data)
        if part and len(data) > part:
            return usual(file, data[:part])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)

    async def story(client: Client) -> None:
        nonlocal full
        await three_turns(client)
        before = client.record()
        full = True
        with pytest.raises(TapError, match="could not be logged"):
            await client.ask([SYSTEM, TASK, Text("user", "More.")], looking(3))
        full = False
        with pytest.raises(TapError, match="over"):
            await client.ask([SYSTEM, TASK, Text("user", "Even more.")], looking(4))
        await client.session.close({})
        path = client.tap.log_of("s")
        assert record_of(client.tap.read(path)) == before
        assert len(client.tap.reopen(path, client.engine).turns) == 3

    ending = play(tmp_path, story).session.ending
    assert ending is not None
    assert ending.status == "failed"


def test_a_log_that_cannot_be_read_is_closed_again(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        path = tmp_path / "no.tap.jsonl"
        path.write_text("this is not a log\n")
        for _ in range(3):
            with pytest.raises(LogError, match="not a log of the tap"):
                client.tap.reopen(path, client.engine)

    play(tmp_path, story)


def test_long_texts_are_tokenised_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no other session waits for them."""
    where: dict[int, int] = {}

    async def story(client: Client) -> None:
        usual = client.session.contexts.match

        def match(payload: Payload, thread: str | None) -> Any:
            where[payload.size] = threading.get_ident()
            return usual(payload, thread)

        monkeypatch.setattr(client.session.contexts, "match", match)
        await client.ask([SYSTEM, TASK], looking(0))  # from now on, the system message and the tools are known
        heavy = "a" * (2 * tap_session.THREADED_CHARS)
        parts: list[Part] = [
            Text("user", "a"),
            Text("user", heavy),
            ToolResult("c", heavy),
            Reply("", (ToolCall("c", "look", {"at": [heavy]}),)),
            Reply("", (), heavy),
        ]
        for number, part in enumerate(parts, tap_session.THREADED_CHARS + 1):
            payload = Payload("policy", (SYSTEM, part), TOOLS, size=number)
            assert await client.session.count(payload) > part.size / 10

    play(tmp_path, story)
    del where[0]
    here = [where[size] == threading.get_ident() for size in sorted(where)]
    assert here == [True, False, False, False, False]


def test_more_messages_than_tokens_are_not_even_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(client: Client) -> None:
        monkeypatch.setattr(client.session.contexts, "match", None)
        with pytest.raises(TapError, match="the context has 101 tokens, at most 100 fit"):
            await client.ask([*[Text("user", "a")] * 101], looking(0))

    play(tmp_path, story, context_tokens=100)


@pytest.mark.parametrize("other", [{"thinking": False}, {"keep_thoughts": False}])
def test_a_log_is_read_with_the_settings_that_it_was_written_with(other: dict[str, bool], tmp_path: Path) -> None:
    """It holds tokens. With other settings, turns would be put together in another way."""

    async def story(client: Client) -> None:
        await three_turns(client)

    client = play(tmp_path, story)
    chat = ChatML.load(MODEL, thinking=other.get("thinking", True))
    tap = Tap(chat, Rollout(), tmp_path, model="policy", keep_thoughts=other.get("keep_thoughts", True))
    with pytest.raises(LogError, match="was written with rendering"):
        tap.read(client.tap.log_of("s"))


def test_a_log_with_lines_missing_is_refused(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        await three_turns(client)

    client = play(tmp_path, story)
    whole = client.tap.log_of("s")
    lines = whole.read_bytes().splitlines(keepends=True)
    refused = 0
    for missing in range(1, len(lines) - 1):
        (path := tmp_path / "less.jsonl").write_bytes(b"".join(lines[:missing] + lines[missing + 1 :]))
        try:
            found = record_of(client.tap.read(path))
        except LogError:
            refused += 1
        else:  # where a turn stands follows from the turn itself
            assert b'"of":' in lines[missing]
            assert found == record_of(client.tap.read(whole))
    assert refused > len(lines) / 2


def pieces(words: str) -> list[Block]:
    return [Block(word, "tool", (1,)) for word in words.split()]


def test_contexts_of_nothing_but_equal_pieces_are_compared_too() -> None:
    """With care this would take minutes."""
    many = 4000
    assert many**2 > MAX_PAIRS
    found = explain(pieces("h " + "a b " * many), pieces("h " + "a a b b " * (many // 2)))
    assert found.cause == "prune"
    gone = explain(pieces("h " + "a " * many), pieces("h " + "a " * (many - 10) + "c"))
    assert (gone.cause, gone.removed, gone.inserted) == ("prune", 10, 1)
