"""``memorywalker tap`` and black boxes on a real server: served, killed, interrupted, recovered."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from slime_plugin.record import Record, read_records
from slime_plugin.rollout.server import Server
from tests.cli import INTERRUPTIBLE, run
from tests.conftest import ROOT
from tests.rollout.replay import check_replay

CELL = "configs/black_box.yaml"
AGENT = "examples.black_box.driver:FoldingAgentDriver"
QUESTION = "What is Leo Vance's friend's pet?"
CLIENT = openai.OpenAI(base_url="http://127.0.0.1:1", api_key="none", max_retries=0)


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


class Serving:
    """A ``tap serve`` in a process of its own, from when it listens."""

    def __init__(self, *arguments: str) -> None:
        command = [*INTERRUPTIBLE, "tap", "serve", CELL, *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if line.startswith("listening on "):
                break
        else:
            raise AssertionError(f"it does not listen: {self.said}{self.process.communicate()[1]}")

    @property
    def url(self) -> str:
        (found,) = re.findall(r"listening on (\S+);", self.said)
        return str(found)

    @property
    def tokens(self) -> dict[str, str]:
        return dict(re.findall(r"session (\S+), token (\S+)", self.said))

    def client(self, token: str) -> openai.OpenAI:
        return CLIENT.with_options(base_url=f"{self.url}/v1", api_key=token)

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors


@pytest.fixture
def serve(server: Server, tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def begin(*arguments: str) -> Serving:
        started.append(Serving("--logs", str(tmp_path / "logs"), "--engine", server.url, *arguments))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


def talk(client: openai.OpenAI, messages: list[Any], turns: int) -> list[Any]:
    """Go on with a conversation; every other answer is streamed."""
    messages = list(messages)
    for turn in range(turns):
        if turn % 2:
            with client.chat.completions.create(model="policy", messages=messages, stream=True) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        else:
            text = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Go on, {turn}."}]
    return messages


def the_record(path: Path) -> Record:
    assert run("record", "check", str(path)).exit_code == 0
    (record,) = read_records([path])
    return record


def test_a_served_client_goes_on_after_the_tap_was_killed(
    serve: Callable[..., Serving], policy: Any, tmp_path: Path
) -> None:
    first = serve("--session", "mine")
    token = first.tokens["mine"]
    begun = [{"role": "user", "content": QUESTION}]
    messages = talk(first.client(token), begun, 3)
    first.end(signal.SIGKILL)
    again = serve("--port", first.url.rpartition(":")[2])
    assert "session mine resumes after 3 turns" in again.said
    assert again.url == first.url
    repeated = talk(again.client(token), begun, 1)  # a retry of what was answered before the crash
    assert repeated == messages[:3]
    messages = talk(again.client(token), messages, 2)
    aside = talk(again.client(token), [*messages[:2], {"role": "user", "content": "A title?"}], 1)[-2]["content"]
    with pytest.raises(openai.AuthenticationError):
        talk(again.client("guessed"), begun, 1)
    taken = run("tap", "serve", CELL, "--logs", str(tmp_path / "others"), "--port", again.url.rpartition(":")[2])
    assert "Address already in use; choose another --host or --port" in taken.stderr
    code, errors = again.end(signal.SIGINT)
    assert (code, "Traceback" in errors) == (0, False), errors
    assert "wrote 1 record" in errors
    record = the_record(tmp_path / "logs" / "rollouts.records")
    check_replay([record], policy)
    assert len(record.meta.extra["turns"]) == 5
    assert record.meta.extra["retokenised"] == {"messages": 0, "tokens": 0}
    assert (list(record.untrained), bool(aside)) == (["auxiliary"], True)  # it is off unless it is asked for


def test_logs_of_a_tap_that_was_killed_become_records(
    serve: Callable[..., Serving], policy: Any, tmp_path: Path
) -> None:
    tap = serve("--session", "one", "--session", "two", "--session", "idle")
    assert list(tap.tokens) == ["one", "two", "idle"]
    for name in ("one", "two"):
        talk(tap.client(tap.tokens[name]), [{"role": "user", "content": f"{QUESTION} {name}"}], 2)
    tap.end(signal.SIGKILL)
    with open(tmp_path / "logs" / "two.tap.jsonl", "ab") as log:
        log.write(b'{"turn": "half a li')
    out = tmp_path / "recovered.records"
    result = run("tap", "recover", str(tmp_path / "logs"), "--config", CELL, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "2 records" in result.stderr
    records = list(read_records([out]))
    assert [record.meta.id for record in records] == ["one", "two"]
    check_replay(records, policy)
    (other := tmp_path / "other.yaml").write_text("model: examples/small_world/model\nrollout: {thinking: false}\n")
    wrong = run("tap", "recover", str(tmp_path / "logs"), "--config", str(other), "--out", str(tmp_path / "wrong"))
    assert (wrong.exit_code, "was written with rendering" in wrong.stderr) == (1, True)
    closed = serve("--session", "three")
    assert closed.end(signal.SIGINT)[0] == 0
    names = run("tap", "serve", CELL, "--logs", str(tmp_path / "logs"), "--session", "three")
    assert "there is a rollout 'three' already" in names.stderr
    fresh = serve()
    assert list(fresh.tokens) == ["rollout-0"]


def test_one_rollout_from_the_command_line(server: Server, policy: Any, tmp_path: Path) -> None:
    out = tmp_path / "task.records"
    task = ["--harness", AGENT, "--config", CELL, "--task", QUESTION, "--answer", "duck", "--engine", server.url]
    for number in range(2):
        result = run("tap", "run", *task, "--out", str(out), f"rollout.seed={number}")
        assert result.exit_code == 0, result.stderr
        assert "reward" in result.stderr
        assert "layer 0" in result.stdout
    records = list(read_records([out]))
    assert [record.meta.id for record in records] == ["task-0", "task-1"]
    assert {record.meta.status for record in records} == {"completed"}
    check_replay(records, policy)


def test_an_interrupt_ends_the_agent_and_keeps_what_it_did(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "task.records"
    harness = "tests.tap.own_driver:OwnDriver"
    options = ["--harness", harness, "--task", QUESTION, "--engine", server.url, "--out", str(out)]
    settings = ["model=examples/small_world/model", "harness.hang=true"]
    process = subprocess.Popen(
        [*INTERRUPTIBLE, "tap", "run", *options, *settings], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "is running" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1, errors
    assert "aborted (stopped)" in errors
    assert the_record(out).meta.status == "aborted"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--harness", "opncode", "--task", "x", "--out", "{out}"], "opncode"),
        (["run", "--harness", AGENT, "--task", "x", "--out", "{out}", "harness.corpus=README.md"], "model"),
        (["serve", CELL, "--logs", "{out}", "--host", "0.0.0.0"], "where other machines reach it"),
        (["recover", "README.md", "--config", CELL, "--out", "{out}"], "not a log of the tap"),
        (["recover", "configs", "--config", CELL, "--out", "{out}"], "there is no *.tap.jsonl in configs"),
        (
            ["run", "--harness", AGENT, "--config", CELL, "--task", "x", "--out", "{out}", "harness.corpus=nil"],
            "no file nil",
        ),
    ],
)
def test_mistakes_are_told_before_anything_starts(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = run("tap", *(argument.format(out=tmp_path / "out") for argument in arguments))
    assert result.exit_code != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.records"))


def test_rollouts_through_a_black_box_are_conditioned_as_they_were_sampled(
    server: Server, policy: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = run("rollout", CELL, "--out", str(out), "--engine", server.url, "--questions", "6", "--samples", "4")
    assert result.exit_code == 0, result.stderr
    records = list(read_records([out]))
    assert len(records) == 24
    check_replay(records, policy)
    causes = Counter(edit.extra["cause"] for record in records for edit in record.edits)
    assert set(causes) == {"compaction"}
    kinds = Counter(turn.get("kind", "main") for record in records for turn in record.meta.extra["turns"])
    assert kinds["summary"] == causes["compaction"] > 6
    assert sum(record.meta.extra["retokenised"]["messages"] for record in records) == 0
    assert sum(record.sampled for record in records) == sum(int(record.generated.sum()) for record in records)


def test_the_example_agent_finds_what_the_search_tool_finds() -> None:
    """So that the model of the small world sees what it was warmed up with."""
    import asyncio

    from examples.black_box.agent import Facts
    from slime_plugin.config import tools as config
    from slime_plugin.rollout.tools.bm25 import Bm25

    corpus = ROOT / "examples/small_world/data/corpus.jsonl"
    facts = Facts(corpus)

    async def both() -> None:
        async with Bm25(config.Bm25(corpus=corpus), "tools.0.backend") as index:
            for query in ("find Leo Vance's friend", "find Nora Boyd's pet", "find Elsa Lane's boss", "teacher", "zzz"):
                best = [document.text for document in await index.find(query, 3)]
                assert facts.search(query).splitlines() == (best or ["nothing found"])

    asyncio.run(both())
