"""A session asked by a client that is a few lines of this file: retries, hang-ups, crashes, causes of breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.agents import any_thread_of
from slime_plugin.config.rollout import Rollout
from slime_plugin.record import Meta, Record
from slime_plugin.recovery.conversations import find_conversations
from slime_plugin.recovery.recover import Recovered, recover
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.engine.engine import Request
from slime_plugin.tap.payload import (
    Answer,
    ClientRequest,
    Part,
    Payload,
    Reply,
    TapError,
    Text,
    ToolCall,
    TooLongError,
    ToolResult,
    ToolSpec,
)
from slime_plugin.tap.session_log import LogError
from slime_plugin.tap.tap import Tap
from slime_plugin.tap.tap_session import SessionHistory, TapSession
from slime_plugin.tree import Trajectory, branches_of
from tests.conftest import ROOT
from tests.tap.engines import Scripted, spell

MODEL = ROOT / "examples" / "small_world" / "model"
TOOLS = (ToolSpec("look", "Look at something.", {"type": "object"}),)
SYSTEM, TASK = Text("system", "You look at things."), Text("user", "Look at all of it.")
WEIGHTS = {"summaries": 1.0, "subagents": 1.0, "auxiliary": 1.0}


class Client:
    """Keeps a conversation and asks."""

    def __init__(self, folder: Path, *, keep_thoughts: bool = True, **limits: Any) -> None:
        self.chat = ChatML.load(MODEL)
        self.said: list[str] = []
        self.engine = Scripted(self.chat, self._say)
        self.tap = Tap(
            self.chat, Rollout(**limits), folder, model="policy", thread_of=any_thread_of(), keep_thoughts=keep_thoughts
        )
        self.session, self.token = self.tap.open("s", self.engine, seed=1)
        self.next: str | None = None

    def _say(self, request: Request) -> str | None:
        return self.next

    async def ask(self, parts: list[Part], says: str | None, digest: str | None = None, **how: Any) -> Answer:
        self.next = says
        headers = how.pop("headers", {})
        payload = Payload("policy", tuple(parts), how.pop("tools", TOOLS), **how)
        return await self.session.answer(ClientRequest(payload, digest or repr(payload), headers))

    def recovered(self, **weights: float) -> Recovered:
        session = self.session
        return recover(session.contexts, session.parents, session.lost, WEIGHTS | weights)

    def record(self, **weights: float) -> Record:
        """Its branches train each token after exactly what the engine was sent."""
        recovered = self.recovered(**weights)
        record = recovered.record(Meta(id="s", extra=recovered.report.to_json()))
        prompts = [tuple(request.prompt) for request in self.engine.requests]
        for branch in branches_of(Trajectory.of(record)):
            tokens = record.tokens[branch.tape].tolist()
            for i in range(1, len(branch)):
                if branch.trained[i] and not branch.trained[i - 1]:
                    assert tuple(tokens[:i]) in prompts
        everything = sum(turn.sampled for turn in self.session.turns) + self.session.lost.total()
        untrained = sum(recovered.report.to_json().get("untrained", {}).values())
        assert int(record.generated.sum()) + untrained == everything
        return record

    def causes(self) -> list[str]:
        return [edit.extra["cause"] for edit in self.record().edits]


def record_of(history: SessionHistory) -> Record:
    recovered = recover(history.contexts, history.parents, history.lost, WEIGHTS)
    return recovered.record(Meta(id=history.id, extra=recovered.report.to_json()))


def back(answer: Answer, **changes: Any) -> Reply:
    given = {"text": answer.text, "calls": answer.calls, "thought": answer.thought, **changes}
    return Reply(**given)


def play(folder: Path, story: Callable[[Client], Awaitable[None]], **settings: Any) -> Client:
    async def told() -> Client:
        client = Client(folder, **settings)
        await story(client)
        return client

    return asyncio.run(told())


def looking(number: int, thought: str | None = None) -> str:
    return spell(f"Step {number}.", [("look", {"at": number})], thought)


async def three_turns(client: Client, thought: str | None = None) -> list[Part]:
    """A conversation with three turns and their results."""
    parts: list[Part] = [SYSTEM, TASK]
    for number in range(3):
        answer = await client.ask(parts, looking(number, thought and f"{thought} {number}"))
        parts += [back(answer), ToolResult(answer.calls[0].id, f"result {number}")]
    return parts


def test_a_request_that_comes_again_gets_the_same_answer(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        one = await client.ask([SYSTEM, TASK], looking(0), digest="same")
        two = await client.ask([SYSTEM, TASK], looking(1), digest="same")
        assert one == two
        together = await asyncio.gather(*(client.ask([SYSTEM, TASK], looking(2), digest="both") for _ in range(5)))
        assert len({answer.id for answer in together}) == 1

    client = play(tmp_path, story)
    assert len(client.engine.requests) == 2
    assert client.session.retries == 5


def test_a_turn_that_nobody_waits_for_is_aborted_and_counted(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        waiting = [asyncio.create_task(client.ask([TASK], Scripted.HANG, digest="x")) for _ in range(2)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert not client.session.lost  # the other one still waits
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert client.session.lost == {"cancelled": 3}
        await client.ask([TASK], looking(0), digest="x")

    client = play(tmp_path, story)
    assert client.recovered().report.to_json()["untrained"] == {"cancelled": 3}
    assert len(client.session.turns) == 1


def test_a_tap_that_died_goes_on_where_it_was(tmp_path: Path) -> None:
    """Half a line is what it was writing; the answer that a client did not get is there for its retry."""

    async def story(client: Client) -> None:
        parts = await three_turns(client)
        answer = await client.ask(parts, looking(3), digest="last")
        before = client.record()
        with pytest.raises(LogError, match="another tap writes to it"):
            client.tap.reopen(client.tap.log_of("s"), client.engine)
        path = tmp_path / "copy.tap.jsonl"
        path.write_bytes(client.tap.log_of("s").read_bytes() + b'{"turn": "half of')
        assert record_of(client.tap.read(path)) == before
        client.tap = Tap(client.chat, Rollout(), tmp_path, model="policy")
        client.session = client.tap.reopen(path, client.engine)
        assert client.tap.session(client.token) is client.session
        assert client.record() == before
        again = await client.ask(parts, looking(4), digest="last")
        assert (again.id, again.text, again.calls) == (answer.id, answer.text, answer.calls)
        await client.ask([*parts, back(answer), ToolResult(answer.calls[0].id, "result 3")], spell("Done."))

    client = play(tmp_path, story)
    assert len(client.record().views) == 1
    assert len(client.session.turns) == 5


def test_what_a_client_changes_without_meaning_it_breaks_nothing(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        parts = await three_turns(client, "because")
        changed: list[Part] = []
        for part in parts:
            if isinstance(part, Reply):
                call = part.calls[0]
                assert isinstance(call.arguments, dict)
                other = ToolCall(
                    "renamed", call.name.upper(), {key: float(value) for key, value in call.arguments.items()}
                )
                changed.append(Reply(f"  {part.text}\n", (other,), thought=None))
            else:
                changed.append(part)
        await client.ask(changed, spell("Done."))

    client = play(tmp_path, story)
    record = client.record()
    assert len(record.views) == 1
    assert record.meta.extra["retokenised"] == {"messages": 0, "tokens": 0}


def test_a_compaction(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        parts = await three_turns(client)
        summary = await client.ask([*parts, Text("user", "Summarise.")], spell("It was all looked at."))
        kept = [SYSTEM, Text("user", f"So far: {summary.text}"), *parts[-2:]]
        await client.ask(kept, spell("Done."))

    client = play(tmp_path, story)
    assert client.causes() == ["compaction"]
    conversations = find_conversations(client.session.contexts, client.session.parents)
    assert sorted(conversations.kinds.values()) == ["main"] * 4 + ["summary"]
    off = client.record(summaries=0.0)
    assert set(off.meta.extra["untrained"]) == {"summary"}
    half = client.record(summaries=0.5)
    assert [weight for *_, weight in half.meta.extra["weights"]] == [0.5]
    start, stop, _ = half.meta.extra["weights"][0]
    assert "It was all looked at." in client.chat.text(half.tokens[start:stop].tolist())


@pytest.mark.parametrize("tail", [(), (Text("user", "Go on."),)])
def test_a_summary_that_comes_back_as_the_turn_it_was(tail: tuple[Part, ...], tmp_path: Path) -> None:
    """An agent without tools, which reads calls in the text itself and folds its context into what the policy said."""

    async def story(client: Client) -> None:
        parts: list[Part] = [SYSTEM, TASK]
        for number in range(3):
            answer = await client.ask(parts, looking(number), tools=())
            assert (answer.calls, f'"at": {number}' in answer.text, answer.finish) == ((), True, "stop")
            parts += [back(answer), Text("user", f"result {number}")]
        summary = await client.ask([*parts, Text("user", "Summarise.")], spell("All of it."), tools=())
        await client.ask([SYSTEM, TASK, back(summary), *tail], spell("Done."), tools=())

    client = play(tmp_path, story)
    assert client.causes() == ["compaction"]
    kinds = find_conversations(client.session.contexts, client.session.parents).kinds
    assert [kinds[turn.id] for turn in client.session.turns] == ["main", "main", "main", "summary", "main"]
    record = client.record()
    assert len(record.views) == 2
    assert record.meta.extra["retokenised"] == {"messages": 0, "tokens": 0}


def test_a_window_over_the_last_turns(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        parts = await three_turns(client)
        await client.ask([*parts[:2], *parts[4:]], spell("Done."))

    client = play(tmp_path, story)
    assert client.causes() == ["compaction"]
    assert {*find_conversations(client.session.contexts, client.session.parents).kinds.values()} == {"main"}


@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_turns_are_limited_with_tools_and_without(tools: tuple[ToolSpec, ...], tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        parts: list[Part] = [SYSTEM, TASK]
        for number in range(3):
            if tools:
                await client.ask([Text("system", "A title."), TASK], spell(f"Title {number}."), tools=())
            parts += [back(await client.ask(parts, spell(f"Step {number}."), tools=tools)), Text("user", f"{number}.")]
        with pytest.raises(TapError, match=r"this rollout is over \(turns\)"):
            await client.ask(parts, spell("One too many."), tools=tools)

    play(tmp_path, story, turns=3)


def test_a_client_that_takes_one_call_at_a_time(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        two = spell("Both.", [("look", {"at": 1}), ("look", {"at": 2})])
        answer = await client.ask([SYSTEM, TASK], two, one_call=True)
        assert [call.arguments for call in answer.calls] == [{"at": 1}]
        again = client.tap.read(client.tap.log_of("s")).turns[0].content
        assert (again.text, again.calls) == (answer.text, answer.calls)
        await client.ask([SYSTEM, TASK, back(answer), ToolResult(answer.calls[0].id, "1")], spell("Done."))

    client = play(tmp_path, story)
    assert len(client.record().views) == 1
    assert client.recovered().report.to_json()["retokenised"]["messages"] == 0


@pytest.mark.parametrize("named", [True, False])
def test_what_a_client_says_its_requests_are_for(named: bool, tmp_path: Path) -> None:
    """Claude Code does, if it is asked to. Without that, a question that forks off looks like a rewind."""

    async def story(client: Client) -> None:
        def headers(what: str) -> dict[str, str]:
            return {"x-claude-code-request-class": what} if named else {}

        parts = await three_turns(client)
        aside = await client.ask([*parts[:4], Text("user", "A word?")], spell("Word."), headers=headers("side_reply"))
        assert aside.text == "Word."
        await client.ask([*parts, Text("user", "All in all?")], spell("Looked."), headers=headers("compaction"))
        await client.ask([*parts, Text("user", "Go on.")], spell("Done."), headers=headers("main"))

    client = play(tmp_path, story)
    kinds = find_conversations(client.session.contexts, client.session.parents).kinds
    found = [kinds[turn.id] for turn in client.session.turns]
    assert found[3:] == (["auxiliary", "summary", "main"] if named else ["auxiliary", "auxiliary", "main"])
    assert [turn.purpose for turn in client.tap.read(client.tap.log_of("s")).turns][3:] == (
        ["auxiliary", "summary", ""] if named else [""] * 3
    )


def test_a_prune(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        parts = await three_turns(client)
        first = parts.index(next(part for part in parts if isinstance(part, ToolResult)))
        parts[first] = ToolResult("x", "[cleared]")
        answer = await client.ask(parts, looking(3))
        await client.ask([*parts, back(answer), ToolResult(answer.calls[0].id, "more")], spell("Done."))

    client = play(tmp_path, story)
    assert client.causes() == ["prune"]
    assert len(client.record().views) == 2


def test_thoughts_that_a_template_strips(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        parts = await three_turns(client, "because")
        await client.ask([*parts, Text("user", "Go on.")], spell("Done."))

    kept = play(tmp_path / "kept", story)
    assert kept.causes() == []
    dropped = play(tmp_path / "dropped", story, keep_thoughts=False)
    assert dropped.causes() == ["template_strip"]
    last = dropped.chat.text(dropped.engine.requests[-1].prompt)
    assert "because" not in last
    assert "Step 2." in last


def test_drift(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        parts = await three_turns(client)
        last = parts[-2]
        assert isinstance(last, Reply)
        parts[-2] = Reply("What was said was improved.", last.calls)
        await client.ask(parts, spell("Done."))

    client = play(tmp_path, story)
    assert client.causes() == ["drift"]
    assert client.record().meta.extra["retokenised"]["messages"] == 1


def test_tools_that_change_are_drift(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        parts = await three_turns(client)
        await client.ask(parts, spell("Done."), tools=(*TOOLS, ToolSpec("more", "", {"type": "object"})))

    assert play(tmp_path, story).causes() == ["drift"]


def test_a_turn_that_is_asked_for_again_in_other_bytes_is_not_trained(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        await client.ask([SYSTEM, TASK], looking(0), digest="one")
        used = await client.ask([SYSTEM, TASK], looking(1), digest="two")
        await client.ask([SYSTEM, TASK, back(used), ToolResult(used.calls[0].id, "it")], spell("Done."))

    client = play(tmp_path, story)
    assert client.causes() == []
    assert set(client.record().meta.extra["untrained"]) == {"retry"}


@pytest.mark.parametrize("named", [True, False])
def test_a_subagent_whether_the_client_names_it_or_not(named: bool, tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        mine: dict[str, Any] = {"headers": {"x-session-id": "a"} if named else {}}
        its: dict[str, Any] = {"headers": {"x-session-id": "b", "x-parent-session-id": "a"} if named else {}}
        begun = await client.ask([SYSTEM, TASK], looking(0), **mine)
        sub: list[Part] = [Text("system", "You help."), Text("user", "Look there.")]
        one = await client.ask(sub, looking(1), **its)
        two = await client.ask([*sub, back(one), ToolResult(one.calls[0].id, "there")], spell("Seen."), **its)
        await client.ask([SYSTEM, TASK, back(begun), ToolResult(begun.calls[0].id, two.text)], spell("Done."), **mine)

    client = play(tmp_path, story)
    assert client.causes() == ["subagent", "subagent"]
    record = client.record(subagents=0.0)
    assert len(record.views) == 1
    assert set(record.meta.extra["untrained"]) == {"subagent"}


def test_a_title_is_not_part_of_the_conversation(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        await client.ask([Text("system", "Name it."), TASK], spell("Looking"), tools=())
        await three_turns(client)

    client = play(tmp_path, story)
    assert client.causes() == ["auxiliary"]
    assert len(client.record(auxiliary=0.0).views) == 1
    assert client.recovered().reply == "Step 2."


def test_a_context_that_does_not_fit_is_refused_with_its_numbers(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        with pytest.raises(TooLongError) as caught:
            await client.ask([TASK, Text("user", "word " * 200)], looking(0))
        assert caught.value.limit == 100
        assert caught.value.tokens == await client.session.count(
            Payload("policy", (TASK, Text("user", "word " * 200)), TOOLS)
        )
        with pytest.raises(TapError, match="no message"):
            await client.ask([], looking(0), tools=())

    assert not play(tmp_path, story, context_tokens=100).session.turns


def test_nothing_is_kept_of_what_is_only_counted_or_does_not_fit(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        parts = await three_turns(client)
        nodes, size = len(client.session.contexts.nodes), client.tap.log_of("s").stat().st_size
        for number in range(20):
            asked = [*parts, Text("user", f"{number} " * 3000)]
            payload = Payload("policy", tuple(asked), TOOLS)
            assert await client.session.count(payload) > 3000
            with pytest.raises(TooLongError):
                await client.ask(asked, looking(9))
        assert (len(client.session.contexts.nodes), client.tap.log_of("s").stat().st_size) == (nodes, size)
        await client.ask(parts, looking(3))

    assert len(play(tmp_path, story, context_tokens=3000).record().views) == 1


def test_names_of_sessions_are_no_paths(tmp_path: Path) -> None:
    chat = ChatML.load(MODEL)
    tap = Tap(chat, Rollout(), tmp_path / "logs", model="policy")
    for name in ("../../etc/passwd", "/etc/passwd", "a/b", "a\0b", ".hidden", "x" * 5000):
        session, _ = tap.open(name, Scripted(chat, lambda request: None))
        assert isinstance(session, TapSession)
        assert tap.log_of(name).parent == tmp_path / "logs"
        assert tap.log_of(name).is_file()
