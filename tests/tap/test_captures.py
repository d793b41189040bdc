"""What real clients sent, replayed without them: the conversations and breaks that are in it have to be found.

The captures are requests of Claude Code 2.1.325 and OpenCode 1.18.33 to a scripted model, with what that answered. All
words of the clients' own are replaced by hashes, so that equal text is equal and no more.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.agents import any_thread_of
from slime_plugin.config.rollout import Rollout
from slime_plugin.record import Meta, Record
from slime_plugin.recovery.conversations import SessionConversations, find_conversations
from slime_plugin.recovery.recover import Recovered, recover
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.engine.engine import Request
from slime_plugin.tap.payload import ClientRequest, TapError
from slime_plugin.tap.tap import Tap
from slime_plugin.tap.tap_session import TapSession
from slime_plugin.tap.wire import WIRE_FORMATS
from slime_plugin.tree import Trajectory, branches_of
from tests.conftest import ROOT
from tests.tap.engines import Scripted, spell

CAPTURES = Path(__file__).parent / "captures"
ALL_ON = {"summaries": 1.0, "subagents": 1.0, "auxiliary": 1.0}


@dataclass
class Played:
    session: TapSession
    recovered: Recovered
    record: Record
    conversations: SessionConversations
    prompts: dict[str, list[int]] = field(default_factory=dict)
    """Of each request that was answered, by the id of its turn."""

    @property
    def causes(self) -> list[str]:
        return [edit.extra["cause"] for edit in self.record.edits]

    @property
    def names(self) -> list[str]:
        return [line.name for line in self.conversations.all]


def play(name: str, folder: Path, weights: dict[str, float] | None = None) -> Played:
    lines = [json.loads(line) for line in (CAPTURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return asyncio.run(_play([line for line in lines if "body" in line], folder, weights or ALL_ON))


async def _play(lines: list[dict[str, Any]], folder: Path, weights: dict[str, float]) -> Played:
    chat = ChatML.load(ROOT / "examples" / "small_world" / "model")
    current: dict[str, Any] = {}

    def say(request: Request) -> str | None:
        answer = current["answer"]
        if "fail" in answer:
            return None
        if "cut" in answer:
            return Scripted.HANG
        return spell(answer.get("text") or "", answer.get("tools") or (), answer.get("think"))

    limits = Rollout(context_tokens=10**6, turns=100)
    prompts = {}
    engine = Scripted(chat, say)
    session, _ = Tap(chat, limits, folder, model="policy", thread_of=any_thread_of()).open("s", engine)
    for line in lines:
        current.update(line)
        ask = ClientRequest(WIRE_FORMATS[line["path"]].read(line["body"]), line["sha"], line["headers"])
        if "cut" in line["answer"]:
            waiting = asyncio.create_task(session.answer(ask))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await asyncio.sleep(0.01)
            continue
        if "fail" in line["answer"]:
            with pytest.raises(TapError):
                await session.answer(ask)
            continue
        answer = await session.answer(ask)
        prompts[answer.id] = list(engine.requests[-1].prompt)
        assert answer.prompt_tokens == len(prompts[answer.id]) == await session.count(ask.payload)
    await session.close({})
    recovered = recover(session.contexts, session.parents, session.lost, weights)
    record = recovered.record(Meta(id="s", extra=recovered.report.to_json()))
    conversations = find_conversations(session.contexts, session.parents)
    return Played(session, recovered, record, conversations, prompts)


NAMES = sorted(path.stem for path in CAPTURES.glob("*.jsonl"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", [ALL_ON, {"summaries": 0.5, "subagents": 1.0, "auxiliary": 0.0}])
def test_every_sampled_token_is_trained_under_its_own_prompt_or_accounted_for(
    name: str, weights: dict[str, float], tmp_path: Path
) -> None:
    played = play(name, tmp_path, weights)
    record, turns = played.record, played.session.turns
    sampled = sum(turn.sampled for turn in turns) + sum(played.session.lost.values())
    untrained = played.recovered.report.to_json().get("untrained", {})
    assert int(record.generated.sum()) + sum(untrained.values()) == sampled
    # The prompt that the engine was sent, followed by what it sampled, is what each branch trains.
    wanted = Counter[tuple[int, ...]]()
    for turn in turns:
        tokens = turn.generation.tokens
        wanted.update(tuple(played.prompts[turn.id] + list(tokens[: i + 1])) for i in range(len(tokens)))
    trained = [
        tuple(record.tokens[branch.tape[: i + 1]].tolist())
        for branch in branches_of(Trajectory.of(record))
        for i in range(len(branch))
        if branch.trained[i]
    ]
    assert len(trained) == int(record.generated.sum())
    assert not Counter(trained) - wanted
    if weights is ALL_ON and set(untrained) <= {"cancelled"}:
        assert Counter(trained) == wanted


def test_claude_code_with_two_compactions(tmp_path: Path) -> None:
    played = play("claude_code_local_model_2compactions", tmp_path)
    main = played.conversations.all[0]
    assert [found.cause for found in main.breaks] == ["compaction", "compaction"]
    assert [len(chain.turns) for chain in main.chains] == [9, 4, 1]
    assert Counter(played.conversations.kinds.values()) == {"main": 14, "summary": 2}
    assert played.causes.count("compaction") == 2
    assert played.recovered.report.to_json()["retokenised"] == {"messages": 0, "tokens": 0}
    assert played.recovered.reply == "FINAL turn 2"


def test_opencode_with_two_compactions(tmp_path: Path) -> None:
    played = play("opencode_auto_compact_midloop_2x", tmp_path)
    main = played.conversations.all[0]
    assert [found.cause for found in main.breaks] == ["compaction", "compaction"]
    assert Counter(played.conversations.kinds.values())["summary"] == 2
    assert Counter(played.conversations.kinds.values())["auxiliary"] == 1  # the title
    assert played.recovered.report.to_json()["retokenised"] == {"messages": 0, "tokens": 0}


def test_retries_add_nothing(tmp_path: Path) -> None:
    played = play("claude_code_retries", tmp_path)
    assert played.names == ["main"]
    assert len(played.record.views) == 1
    assert len(played.session.turns) == 3
    assert played.session.lost == {"cancelled": 3}


@pytest.mark.parametrize("name", ["claude_code_subagents", "opencode_retries_subagents"])
def test_subagents_are_conversations_of_their_own(name: str, tmp_path: Path) -> None:
    played = play(name, tmp_path)
    agents = [line for line in played.conversations.all if line.kind == "subagent"]
    assert [[len(chain.turns) for chain in line.chains] for line in agents] == [[2], [2]]
    assert len(played.conversations.all[0].chains) == 1  # append-only: one layer
    assert "subagent" in played.causes
    assert set(played.causes) <= {"subagent", "auxiliary"}
    last = played.record.tokens[played.record.view_positions(-1)].tolist()
    final = played.conversations.all[0].chains[-1].turns[-1]
    assert last[: len(played.prompts[final.id])] == played.prompts[final.id]


def test_what_a_client_writes_in_another_way_is_the_same_turn(tmp_path: Path) -> None:
    """Spaces, escapes and 5000.0 for 5000 are the same; a call that OpenCode renames to ``invalid`` is not."""
    played = play("opencode_fidelity", tmp_path)
    main = played.conversations.all[0]
    assert [found.cause for found in main.breaks] == ["drift", "drift"]
    assert played.recovered.report.to_json()["retokenised"]["messages"] == 2
    assert [len(chain.turns) for chain in main.chains] == [4, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_a_log_gives_the_same_record(name: str, tmp_path: Path) -> None:
    played = play(name, tmp_path)
    tap = Tap(ChatML.load(ROOT / "examples" / "small_world" / "model"), Rollout(), tmp_path, model="policy")
    history = tap.read(tap.log_of("s"))
    recovered = recover(history.contexts, history.parents, history.lost, ALL_ON)
    assert recovered.record(Meta(id="s", extra=recovered.report.to_json())) == played.record
