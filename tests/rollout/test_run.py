"""Runs: written down as they go, resumed where they stopped, and refused before they start if they cannot be meant."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.small_world.tokenizer import build, save
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.harness import SearchR1
from slime_plugin.config.reward import ExactMatch
from slime_plugin.config.rollout import Rollout
from slime_plugin.errors import ConfigError, StoreError
from slime_plugin.record import Record, StoreWriter, read_records, scan_store
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.editors import editor_factory
from slime_plugin.rollout.engine.engine import EngineError, Generation, RefusedError, Request
from slime_plugin.rollout.environment import EditorEnvironment
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.questions import read_questions
from slime_plugin.rollout.reward import build_reward
from slime_plugin.rollout.runner import STORE, RolloutTask, open_run, run_tasks, tasks_left
from slime_plugin.rollout.turn_loop import rollout_seed
from tests.cli import run
from tests.rollout.policy import ANSWER, Lookup, Scripted, call

QUESTIONS = [Question(f"q{i}", "What is it?", ("blue",)) for i in range(4)]


def harness(concurrency: int = 3) -> EditorEnvironment:
    limits = Rollout(turns=4, concurrency=concurrency, system="append", describe_tools=False)
    chat, reward = ChatML(build()), build_reward(ExactMatch())
    return EditorEnvironment("search_r1", editor_factory(SearchR1()), {"search": Lookup({})}, chat, reward, limits)


def played(engine: Any, folder: Path, stop_after: int | None = None, concurrency: int = 3) -> list[Record]:
    """All that is left of the run in the folder; stopped after so many records."""
    done: list[Record] = []

    async def play() -> None:
        stop = asyncio.Event()

        def watch(record: Record, rollout: object) -> None:
            done.append(record)
            if len(done) == stop_after:
                stop.set()

        with StoreWriter(folder / STORE) as store:
            await run_tasks(harness(concurrency), engine, tasks_left(store.path, QUESTIONS, 2), store, watch, stop)

    asyncio.run(play())
    return done


def searching() -> Scripted:
    return Scripted(lambda prompt: ANSWER if "nothing about" in prompt else call("search", query="a"))


def names(records: list[Record]) -> list[str]:
    return sorted(str(record.meta.id) for record in records)


ALL = sorted(f"q{i}-{k}" for i in range(4) for k in range(2))


def test_a_run_samples_every_question_as_often_as_asked(tmp_path: Path) -> None:
    records = played(searching(), tmp_path)
    assert names(records) == ALL == names(list(read_records([tmp_path])))
    assert Counter(record.meta.group for record in records) == {f"q{i}": 2 for i in range(4)}
    assert played(searching(), tmp_path) == []


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = played(searching(), tmp_path, stop_after=3)
    assert len(first) < len(ALL)
    stopped = [record for record in first if record.meta.status == "aborted"]
    second = played(searching(), tmp_path)
    done = [record for record in first + second if record.meta.status == "completed"]
    assert sorted(str(record.meta.id).partition("~")[0] for record in done) == ALL
    again = {str(record.meta.id) for record in second if "~" in str(record.meta.id)}
    assert again == {f"{record.meta.id}~1" for record in stopped}


def test_what_failed_is_tried_again_with_the_same_seed(tmp_path: Path) -> None:
    class Fails(Scripted):
        async def generate(self, request: Request) -> Generation:
            if request.rollout == "q2-1":
                raise EngineError("not this one")
            return await super().generate(request)

    engine = Fails(searching().script)
    first = {record.meta.id: record for record in played(engine, tmp_path)}
    assert first["q2-1"].meta.status == "failed"
    (again,) = played(searching(), tmp_path)
    assert (again.meta.id, again.meta.status) == ("q2-1~1", "completed")
    assert again.meta.extra["seed"] == first["q2-1"].meta.extra["seed"] == rollout_seed(0, "q2-1")
    assert played(searching(), tmp_path) == []


def test_an_engine_that_is_gone_for_good_ends_the_run(tmp_path: Path) -> None:
    class Gone(Scripted):
        async def generate(self, request: Request) -> Generation:
            raise EngineError("nobody there")

    with pytest.raises(EngineError, match="8 rollouts in a row failed; the last: nobody there"):
        played(Gone([]), tmp_path)
    assert {record.meta.status for record in read_records([tmp_path])} == {"failed"}
    assert len(played(searching(), tmp_path)) == len(ALL)


def test_a_question_that_the_engine_refuses_does_not_stop_the_others(tmp_path: Path) -> None:
    class Refuses(Scripted):
        async def generate(self, request: Request) -> Generation:
            if request.rollout.startswith("q0"):
                raise RefusedError("too long")
            return await super().generate(request)

    for attempt in range(3):  # however often it is tried again, after the others
        records = played(Refuses(searching().script), tmp_path, concurrency=1)
        refused = [record for record in records if record.meta.extra["stop"] == "refused"]
        assert len(refused) == 2
        assert len(records) == (2 if attempt else len(ALL))


def test_a_disk_that_is_full_ends_the_run_and_loses_no_written_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, store = os.write, tmp_path / STORE

    def full(descriptor: int, data: bytes) -> int:
        found = os.fstat(descriptor)
        if store.exists() and os.path.samestat(found, store.stat()) and found.st_size > 1500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="was not written: No space left on device"):
        played(searching(), tmp_path)
    monkeypatch.undo()
    before = len(list(read_records([tmp_path])))
    assert 0 < before < len(ALL)
    assert len(played(searching(), tmp_path)) == len(ALL) - before


def test_other_questions_under_the_same_ids_are_refused(tmp_path: Path) -> None:
    played(searching(), tmp_path)
    others = [Question("q1", "What was it?", ("red",))]
    with pytest.raises(ConfigError, match=r"answers another question than the current q1"):
        tasks_left(tmp_path / STORE, others, 2)


def test_hundreds_of_rollouts_at_once(tmp_path: Path) -> None:
    class Busy(Scripted):
        here = most = 0

        async def generate(self, request: Request) -> Generation:
            self.here += 1
            self.most = max(self.most, self.here)
            await asyncio.sleep(0.02)
            self.here -= 1
            return await super().generate(request)

    engine = Busy(searching().script)
    questions = [Question(f"q{i}", "What is it?", ("blue",)) for i in range(300)]

    async def play() -> None:
        tasks = [RolloutTask(question, 0) for question in questions]
        with StoreWriter(tmp_path / STORE) as store:
            await run_tasks(harness(300), engine, tasks, store, lambda record, rollout: None, asyncio.Event())

    asyncio.run(play())
    assert engine.most == 300
    assert len(list(read_records([tmp_path]))) == 300


def test_a_folder_holds_one_configuration(tmp_path: Path) -> None:
    def cell(**settings: Any) -> Cell:
        return parse_config({"harness": {"type": "agentfold"}, **settings}, Cell, "cell.yaml")

    def opened(settings: Cell) -> None:
        with open_run(tmp_path, settings):
            pass

    opened(cell(harness={"type": "agentfold", "threshold": 5}))  # holds no rollout yet, so it may change
    opened(cell())
    played(searching(), tmp_path)
    opened(cell(rollout={"samples": 3, "concurrency": 1}, method={"type": "sdcc"}))
    with pytest.raises(ConfigError, match=r"rollouts with harness.threshold = 3000, not 9; choose another folder"):
        opened(cell(harness={"type": "agentfold", "threshold": 9}))
    with pytest.raises(ConfigError, match=r"with tools = 'digest \w+', not 'digest"):
        opened(cell(tools=[{"type": "a.b:C", "api_key": "sk-1"}]))
    assert "sk-1" not in (tmp_path / "run.json").read_text()


def test_a_folder_of_version_0_6_0_goes_on(tmp_path: Path) -> None:
    """It wrote keys of two parts, and below them blocks as they were."""
    cell = parse_config({"harness": {"type": "claude_code"}}, Cell, "cell.yaml")
    with open_run(tmp_path, cell):
        pass
    written = json.loads((tmp_path / "run.json").read_text())
    blocks: dict[str, Any] = {}
    for key, value in written["settings"].items():
        *outer, name = key.rsplit(".", 1) if key.count(".") > 1 else [key]
        blocks |= {outer[0]: {**blocks.get(outer[0], {}), name: value}} if outer else {name: value}
    assert isinstance(blocks["harness.train"], dict)
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "settings": blocks}))
    played(searching(), tmp_path)
    with open_run(tmp_path, cell):
        pass
    other = parse_config({"harness": {"type": "claude_code", "train": {"auxiliary": 0.5}}}, Cell, "cell.yaml")
    with pytest.raises(ConfigError, match=r"rollouts with harness.train.auxiliary = 0.0, not 0.5"):
        open_run(tmp_path, other).__enter__()


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / STORE), pytest.raises(StoreError, match="another writer has it open"):
        open_run(tmp_path, parse_config({}, Cell, "cell.yaml")).__enter__()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("{", ":1: not JSON"),
        ("[]", ":1: list instead of an object"),
        ('{"question": "x"}', ":1: answers is None, but must be a list of at least 1 string"),
        ('{"question": " ", "answers": ["a"]}', ":1: question is ' '"),
        ('{"question": "x", "answers": ["a"], "id": "a~1"}', ":1: id is 'a~1'"),
        (
            '{"question": "x", "answers": ["a"], "id": 1}\n\n{"question": "y", "answers": ["a"], "id": "1"}',
            ":3: id '1'",
        ),
        ("\n", ": holds 0 questions"),
    ],
)
def test_questions_that_are_none_are_named(lines: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(lines)
    with pytest.raises(ConfigError) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}{words}")


@pytest.fixture
def cell(tmp_path: Path) -> dict[str, Any]:
    """A cell that could run, if there were an engine."""
    save(tmp_path / "model")
    save(tmp_path / "smaller")
    (tmp_path / "smaller" / "config.json").write_text('{"vocab_size": 400}')
    corpus, questions = tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"
    corpus.write_text('{"text": "it is blue"}\n')
    questions.write_text('{"question": "What is it?", "answers": ["blue"]}\n')
    return {
        "model": str(tmp_path / "model"),
        "harness": {"type": "tc_rag"},
        "rollout": {"questions": str(questions), "samples": 1},
        "tools": [{"type": "search", "backend": {"type": "bm25", "corpus": str(corpus)}}],
        "engine": {"url": "http://127.0.0.1:9", "retries": 0},
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"harness": {"type": "tcrag"}}, "harness.type: there is no 'tcrag'; use 'tc_rag'"),
        ({"harness": {"type": "tc_rag", "evit": "oldest"}}, "harness.evit: unknown key; use 'evict'"),
        (
            {"harness": {"type": "agentfold", "threshold": -1}},
            "harness.threshold: Input should be greater than or equal",
        ),
        ({"rollout": {"turns": -3}}, "rollout.turns: Input should be greater than or equal to 1, but it is -3"),
        ({"rollout": {}}, "rollout.questions: missing; name a file of JSON lines"),
        ({"rollout": {"questions": "nowhere.jsonl"}}, "nowhere.jsonl: cannot be read: No such file or directory"),
        ({"model": None}, "model: missing; name the folder of a Hugging Face checkpoint"),
        ({"model": "nowhere"}, "model: there is no folder nowhere"),
        ({"model": "."}, "there is no tokenizer.json"),
        ({"model": "smaller"}, "the tokenizer has 432 tokens and the model 400; they do not belong together"),
        ({"tools": [{"type": "search", "backend": {"type": "bm25"}}]}, "tools.0.backend.corpus: missing"),
        ({"tools": [{"type": "search"}]}, "DASHSCOPE_API_KEY"),
        ({"tools": [{"type": "search", "name": "pop", "backend": {"type": "http", "url": "http://x"}}]}, "'pop'"),
        ({"reward": {"type": "nowhere:reward"}}, "there is no module 'nowhere'"),
        ({}, "the engine at http://127.0.0.1:9 does not answer"),
    ],
)
def test_what_cannot_run_is_one_line_before_anything_starts(
    change: dict[str, Any], words: str, cell: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DASHSCOPE_API_KEY", raising=False)
    path, out = tmp_path / "cell.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(cell | change))
    result = run("rollout", str(path), "--out", str(out))
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert words in line
    assert result.exit_code == 1
    assert not out.exists() or not list(scan_store(out / STORE))


def test_a_folder_that_cannot_be_written_is_one_line(cell: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "cell.yaml"
    path.write_text(json.dumps(cell))
    result = run("rollout", str(path), "--out", str(path / "out"))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "cannot be written" in line
