"""Agents are started in a world of their own, and nothing that they start outlives them.

The agent here is a short script that does what agents do: it asks the tap, starts processes that leave its group, does
not listen when it is told to stop. That the real ones do as they are told is for the tests with the real tap.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.agents import (
    DRIVERS,
    AgentTask,
    Driver,
    Finished,
    Launch,
    Thread,
    agent_process,
    any_thread_of,
    driver_for,
    run_agent,
)
from slime_plugin.agents.claude_code import ClaudeCodeDriver
from slime_plugin.agents.opencode import OpenCodeDriver
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import File, Frozen, parse_config, parse_yaml
from slime_plugin.config.harness import BLACK_BOXES, BlackBox, ClaudeCode, CustomHarness, OpenCode, SearchR1, Train
from slime_plugin.errors import ConfigError
from tests.conftest import ROOT

ERRAND = AgentTask(
    task="-x is the first word of 'this' $TASK",
    url="http://127.0.0.1:4321",
    token="the-token",
    model="policy",
    context_tokens=40_000,
    turn_tokens=2_000,
    turns=7,
)
HERE = "tests.tap.test_drivers"


def harness(text: str) -> Any:
    return parse_config({"harness": parse_yaml(text, "cell.yaml")}, Cell, "cell.yaml").harness


# Settings


@pytest.mark.parametrize("name", BLACK_BOXES)
def test_what_is_trained_on_is_switched_or_weighed(name: str) -> None:
    given = harness(f"{{type: {name}, train: {{summaries: off, subagents: 0.5, auxiliary: on}}}}")
    assert given.train == Train(summaries=0.0, subagents=0.5, auxiliary=1.0)
    weights = given.train.model_dump().values()
    assert [type(weight) for weight in weights] == [float] * 3
    assert harness(f"{{type: {name}}}").train == Train(summaries=1, subagents=1, auxiliary=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{type: opencode, train: {summaries: -1}}", "harness.train.summaries: .*greater than or equal to 0"),
        ("{type: opencode, train: {summaries: .inf}}", "harness.train.summaries: .*finite"),
        ("{type: opencode, train: {summaries: some}}", "harness.train.summaries: .*valid number"),
        ("{type: opencode, train: {summary: on}}", "harness.train.summary: unknown key; use 'summaries'"),
        ("{type: claude_code, thoughts: some}", "harness.thoughts: .*'keep' or 'drop'"),
        ("{type: claude_code, processes: 0}", "harness.processes: .*greater than or equal to 1"),
        ("{type: claude_code, tools: []}", "harness.tools: .*at least 1"),
        ("{type: claude_code, prune: true}", "harness.prune: unknown key; it belongs to type opencode"),
    ],
)
def test_settings_that_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        harness(text)


def test_tools_are_a_list_in_yaml() -> None:
    assert harness("{type: claude_code, tools: [Read, Bash]}").tools == ("Read", "Bash")


# Which driver


class Scripted(BlackBox):
    script: str
    marks: File


class ScriptDriver(Driver[Scripted]):
    """Runs a script; ``marks`` is a folder in which the script writes down which processes it has started."""

    Settings = Scripted
    command = "python"
    inherited_files = OpenCodeDriver.inherited_files

    def prepare(self, errand: AgentTask, home: Path, work: Path) -> Launch:
        env = {**self.environment(home), "URL": errand.url, "TOKEN": errand.token, "MARKS": str(self.settings.marks)}
        return Launch((sys.executable, "-c", self.settings.script), env, self.request(errand))


class Loose(Frozen):
    pass


class LooseDriver(ScriptDriver):
    Settings = Loose  # type: ignore[assignment]  # what a user may do by mistake


def test_each_black_box_has_its_driver() -> None:
    assert set(DRIVERS) == set(BLACK_BOXES)
    for name in BLACK_BOXES:
        assert type(driver_for(harness(f"{{type: {name}}}"))) is DRIVERS[name]


def test_an_editor_has_none() -> None:
    assert driver_for(SearchR1()) is None
    assert driver_for(CustomHarness(type="slime_plugin.rollout.editors.search_r1:SearchR1Editor")) is None


def test_a_driver_of_ones_own() -> None:
    driver = driver_for(harness(f"{{type: '{HERE}:ScriptDriver', script: pass, marks: here, thoughts: drop}}"))
    assert driver is not None
    assert type(driver).__name__ == "ScriptDriver"
    assert (driver.settings.script, driver.settings.thoughts, driver.settings.train) == ("pass", "drop", Train())
    with pytest.raises(ConfigError, match="harness: scrip: unknown key; use 'script'"):
        driver_for(harness(f"{{type: '{HERE}:ScriptDriver', scrip: pass, script: pass, marks: here}}"))
    with pytest.raises(ConfigError, match=re.escape("has to derive from slime_plugin.config.harness.BlackBox")):
        driver_for(harness(f"{{type: '{HERE}:LooseDriver'}}"))


def test_a_driver_of_the_version_before_gives_its_reason_by_the_old_name() -> None:
    with pytest.warns(FutureWarning, match=r"OldDriver: Driver\.complaint is now Driver\.failure_reason"):

        class OldDriver(ScriptDriver):
            def complaint(self, code: int, output: str) -> str:
                with pytest.warns(FutureWarning, match="failure_reason"):
                    return f"alas: {super().complaint(code, output)}"

    settings = Scripted(script="pass", marks=Path("here"))
    assert OldDriver(settings).judge(3, "", "no luck").reason == "alas: python exited with 3: no luck"


def test_a_driver_may_ask_for_its_reason_by_the_old_name() -> None:
    class NewDriver(ScriptDriver):
        def failure_reason(self, code: int, output: str) -> str:
            return f"alas: {output}"

    with pytest.warns(FutureWarning, match="failure_reason"):
        assert NewDriver(Scripted(script="pass", marks=Path("here"))).complaint(3, "no luck") == "alas: no luck"


def test_headers_of_the_built_in_agents_are_read_for_any_driver() -> None:
    driver = driver_for(harness(f"{{type: '{HERE}:ScriptDriver', script: pass, marks: here}}"))
    sent = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    assert any_thread_of(driver)(sent) == ClaudeCodeDriver.thread_of(sent)
    assert any_thread_of(driver)({"x-session-id": "o"}).name == "o"


# Installed or not


def stand_in(path: Path, says: str, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", BLACK_BOXES)
def test_what_is_not_installed_is_said_with_the_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    driver = DRIVERS[name](harness(f"{{type: {name}}}"))
    with pytest.raises(ConfigError, match=rf"{driver.command} is neither in .harnesses/bin nor on PATH; run launch/"):
        driver.program()
    (tmp_path / "no_program").write_text("")
    for given in ("no_program", "nothing", "."):
        with pytest.raises(
            ConfigError, match=r"harness\.program: .* is not an executable; leave it out, and run launch/"
        ):
            DRIVERS[name](harness(f"{{type: {name}, program: {given}}}")).program()


def test_programs_are_found_as_given_then_in_the_project_then_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = stand_in(tmp_path / "bin" / "claude", "1")
    monkeypatch.setenv("PATH", f"{elsewhere.parent}:{os.environ['PATH']}")
    driver = DRIVERS["claude_code"](ClaudeCode())
    assert driver.program() == elsewhere
    project = stand_in(tmp_path / ".harnesses" / "bin" / "claude", "2")
    assert driver.program() == project
    own = stand_in(tmp_path / "own", "3")
    assert DRIVERS["claude_code"](ClaudeCode(program=Path("own"))).program() == own


def test_the_version_without_the_words_around_it(tmp_path: Path) -> None:
    good = stand_in(tmp_path / "good", "2.1.325 (Claude Code)")
    assert DRIVERS["claude_code"](ClaudeCode(program=good)).version() == "2.1.325"
    for says, code in (("broken", 0), ("1.0", 1)):
        bad = stand_in(tmp_path / "bad", says, code)
        with pytest.raises(ConfigError, match=f"bad --version says '{says}.*; reinstall it"):
            DRIVERS["claude_code"](ClaudeCode(program=bad)).version()


def test_what_is_installed_is_what_was_tried() -> None:
    script = (ROOT / "launch" / "harnesses.sh").read_text()
    pinned = dict(re.findall(r"^(\w+)_version=([\d.]+)", script, re.MULTILINE))
    assert pinned == {driver.command: driver.verified for driver in DRIVERS.values()}


# Which conversation a request belongs to


@pytest.mark.parametrize(
    ("name", "headers", "thread"),
    [
        ("claude_code", {}, Thread()),
        ("claude_code", {"x-claude-code-session-id": "s"}, Thread("s")),
        ("claude_code", {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, Thread("s/a", "s")),
        ("claude_code", {"x-claude-code-request-class": "compaction"}, Thread("", None, "summary")),
        ("claude_code", {"x-claude-code-request-class": "main"}, Thread()),
        ("opencode", {"x-session-id": "s"}, Thread("s")),
        ("opencode", {"x-session-id": "t", "x-parent-session-id": "s"}, Thread("t", "s")),
    ],
)
def test_conversations_are_named_in_headers(name: str, headers: dict[str, str], thread: Thread) -> None:
    assert DRIVERS[name].thread_of(headers) == thread
    assert any_thread_of()(headers) == thread


# What agents are given


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """Prepares an agent, in an environment full of what it must not see."""
    secrets = (
        "ANTHROPIC_API_KEY",
        "OPENAI_API_KEY",
        "HTTPS_PROXY",
        "http_proxy",
        "OPENCODE_CONFIG",
        "CLAUDE_CONFIG_DIR",
    )
    for name in (*secrets, "XDG_DATA_HOME", "PYTHONPATH", "NODE_OPTIONS", "LD_PRELOAD_NOT", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "secret-of-ours")
    monkeypatch.setenv("TZ", "UTC")
    program = stand_in(tmp_path / "program", "")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()

    def prepare(name: str, errand: AgentTask = ERRAND, **settings: Any) -> Launch:
        return driver_for(
            parse_config({"type": name, "program": str(program), **settings}, MODELS[name], "it")
        ).prepare(  # type: ignore[union-attr]  # None is for editors, and these are agents
            errand, home, work
        )

    return prepare


MODELS: dict[str, type[ClaudeCode | OpenCode]] = {"claude_code": ClaudeCode, "opencode": OpenCode}


@pytest.mark.parametrize("name", BLACK_BOXES)
def test_nothing_of_ours_leaks(name: str, launched: Callable[..., Launch], tmp_path: Path) -> None:
    launch = launched(name)
    files = [path.read_text() for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert "secret-of-ours" not in json.dumps([dict(launch.env), *launch.argv, launch.stdin, *files])
    assert launch.env["TZ"] == "UTC"
    assert launch.env["PATH"] == os.environ["PATH"]
    home = str(tmp_path / "home")
    below = {name: launch.env[name] for name in launch.env if name.startswith("XDG_") or name in ("HOME", "TMPDIR")}
    assert len(below) == 6
    assert all(path == home or path.startswith(f"{home}/") for path in below.values())
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("name", BLACK_BOXES)
def test_the_task_is_on_no_command_line(name: str, launched: Callable[..., Launch]) -> None:
    launch = launched(name, instructions="Be brief.")
    assert launch.stdin == f"{ERRAND.task}\n\nBe brief."
    assert not any("TASK" in word or "the-token" in word for word in launch.argv)
    assert launched(name, instructions="").stdin == ERRAND.task


def test_claude_code_is_told_of_the_tap_and_of_the_limits(launched: Callable[..., Launch], tmp_path: Path) -> None:
    launch = launched("claude_code", tools=["Read", "Bash"])
    env = launch.env
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"]) == ("http://127.0.0.1:4321", "the-token")
    assert {value for name, value in env.items() if name.endswith("_MODEL")} == {"policy"}
    assert (env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == ("40000", "2000")
    assert env["CLAUDE_CODE_DISABLE_BACKGROUND_TASKS"] == "1"
    options = dict(zip(launch.argv[1:], launch.argv[2:], strict=False))  # each word with the one behind it
    assert options["--tools"] == options["--allowedTools"] == "Read,Bash"
    assert options["--max-turns"] == "7"
    json.loads((tmp_path / "home" / ".claude" / "settings.json").read_text())
    assert "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS" not in launched("claude_code", background=True).env
    # It compacts 13000 tokens and an answer before what it takes for the end.
    assert launched("claude_code", compact_at=20_000).env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "35000"


def opencode_file(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "home" / ".config" / "opencode" / "opencode.json").read_text())
    return found


def test_opencode_is_told_of_the_tap_and_of_the_limits(launched: Callable[..., Launch], tmp_path: Path) -> None:
    launch = launched("opencode", tools=["read", "bash"])
    told = opencode_file(tmp_path)
    provider = told["provider"]["tap"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:4321/v1"
    assert provider["options"]["apiKey"] == "the-token"
    assert provider["models"]["policy"]["limit"] == {"context": 40_000, "input": 38_000, "output": 2_000}
    assert told["model"] == told["small_model"] == "tap/policy"
    assert list(told["permission"].items())[:3] == [("*", "deny"), ("read", "allow"), ("bash", "allow")]
    assert told["compaction"] == {"auto": True, "reserved": 0, "prune": False}
    assert "--title" in launch.argv
    launched("opencode", prune=True, keep_tokens=0, compact_at=20_000)
    told = opencode_file(tmp_path)
    assert told["compaction"] == {"auto": True, "reserved": 0, "prune": True, "preserve_recent_tokens": 0}
    assert told["provider"]["tap"]["models"]["policy"]["limit"]["input"] == 20_000


@pytest.mark.parametrize(("name", "least"), [("claude_code", 25_000), ("opencode", 16_000)])
def test_too_small_a_context_is_refused(name: str, least: int, launched: Callable[..., Launch]) -> None:
    def errand(tokens: int) -> AgentTask:
        return AgentTask("", ERRAND.url, "", "policy", tokens, 2_000, 7)

    launched(name, errand(least))
    with pytest.raises(
        ConfigError, match=f"needs a context of {least} tokens with turns of 2000, and has {least - 1};"
    ):
        launched(name, errand(least - 1))


@pytest.mark.parametrize(
    ("name", "low", "high"), [("claude_code", 10_000, 40_000 - 2_000 - 3_000), ("opencode", 14_000, 40_000 - 2_000)]
)
def test_compaction_that_comes_too_early_or_too_late_is_refused(
    name: str, low: int, high: int, launched: Callable[..., Launch]
) -> None:
    launched(name, compact_at=low)
    launched(name, compact_at=high)
    for point in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=f"compact_at: {point} tokens is not between {low}, .* and {high}, "):
            launched(name, compact_at=point)


# How it ended


def claude_says(**result: Any) -> str:
    return json.dumps({"type": "result", **result})


@pytest.mark.parametrize(
    ("code", "stdout", "expected"),
    [
        (0, claude_says(terminal_reason="completed", result="4"), Finished("completed", 0, "", "4")),
        (
            1,
            claude_says(terminal_reason="max_turns", errors=["Reached maximum number of turns (3)"]),
            Finished("truncated", 1, "claude exited with 1: max_turns: Reached maximum number of turns (3)", ""),
        ),
        (
            1,
            claude_says(terminal_reason="api_error", result="API Error: 400"),
            Finished("failed", 1, "claude exited with 1: api_error: API Error: 400", "API Error: 400"),
        ),
        (1, "", Finished("failed", 1, "claude exited with 1: refused", "")),
    ],
)
def test_how_claude_code_ended(code: int, stdout: str, expected: Finished) -> None:
    assert DRIVERS["claude_code"](ClaudeCode()).judge(code, stdout, "warning\nrefused\n") == expected


def event(kind: str, **part: Any) -> dict[str, Any]:
    return {"type": kind, "part": {"messageID": "m1", **part}}


OVERFLOW = {"type": "error", "error": {"name": "ContextOverflowError", "data": {"message": "too long"}}}
FIRST = [event("text", text="let me see"), event("step_finish", reason="tool-calls")]
LAST = [event("text", text="4", messageID="m2"), event("text", text="2", messageID="m2")]


@pytest.mark.parametrize(
    ("code", "events", "expected"),
    [
        (0, [*FIRST, *LAST, event("step_finish", reason="stop")], Finished("completed", 0, "", "42")),
        (1, [*FIRST, OVERFLOW, *LAST, event("step_finish", reason="stop")], Finished("completed", 1, "", "42")),
        (0, [*FIRST, *LAST, event("step_finish", reason="length")], Finished("completed", 0, "", "42")),
        (1, [*FIRST, OVERFLOW], Finished("failed", 1, "opencode exited with 1: too long", "let me see")),
        (1, FIRST, Finished("failed", 1, "opencode exited with 1: refused", "let me see")),
        (0, [], Finished("failed", 0, "opencode exited with 0: refused", "")),
    ],
)
def test_how_opencode_ended(code: int, events: list[dict[str, Any]], expected: Finished) -> None:
    stdout = "".join(f"{json.dumps(line)}\n" for line in events)
    assert (
        DRIVERS["opencode"](OpenCode()).judge(code, stdout + '{"type": "text", "part": {}', "warning\nrefused\n")
        == expected
    )


# Running


MARK = """
import os, pathlib, signal, subprocess, sys, time, urllib.request
marks = pathlib.Path(os.environ["MARKS"])
def mark(pid):
    part = marks / f"{pid}.part"
    part.touch()
    part.rename(marks / str(pid))
mark(os.getpid())
"""
BROOD = (
    MARK
    + """
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
for more in ({}, {"start_new_session": True}):
    child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, **more)
    child.stdout.readline()
    mark(child.pid)
# One whose parent is gone, in a session of its own.
found = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, text=True)
mark(int(found.stdout))
"""
)
STUBBORN = BROOD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(marks / 'ready').touch()\ntime.sleep(600)\n"


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where scripts write down their processes. None of them is there in the end."""
    monkeypatch.setattr(agent_process, "GRACE_S", 0.3)
    folder = tmp_path / "marks"
    folder.mkdir()
    yield folder
    assert alive(folder) == []


def alive(marks: Path) -> list[int]:
    return [int(path.name) for path in marks.iterdir() if path.name.isdecimal() and _runs(int(path.name))]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


async def send(
    script: str, marks: Path, *, url: str = "", seconds: float = 60, stop: asyncio.Event | None = None
) -> Finished:
    folder = marks.parent
    driver = ScriptDriver(Scripted(script=script, marks=marks, instructions="Hurry."))
    errand = AgentTask("Do it.", url, "the-token", "policy", 1000, 100, 3)
    places = {"home": folder / "home", "work": folder / "work", "log": folder / "log"}
    return await run_agent(driver, errand, **places, seconds=seconds, stop=stop or asyncio.Event())


async def ready(marks: Path) -> None:
    while not (marks / "ready").exists():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def tap(answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server with one answer, and what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def test_an_agent_that_asks_the_tap_and_is_done(marks: Path) -> None:
    script = f"""{MARK}
request = urllib.request.Request(os.environ["URL"], headers={{"Authorization": os.environ["TOKEN"]}})
print(sys.stdin.read(), os.getcwd(), urllib.request.urlopen(request).read().decode())
print("a word of warning", file=sys.stderr)
"""

    async def main() -> tuple[Finished, list[bytes]]:
        async with tap(b"four") as (url, asked):
            return await send(script, marks, url=url), asked

    finished, asked = asyncio.run(main())
    work = (marks.parent / "work").resolve()
    assert finished == Finished("completed", 0, "", f"Do it.\n\nHurry. {work} four")
    assert [b"the-token" in request for request in asked] == [True]
    assert (marks.parent / "log" / "agent.err").read_text() == "a word of warning\n"


def test_an_agent_sees_nothing_else_of_ours(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "secret-of-ours")
    script = f"{MARK}\nimport json\nprint(json.dumps([dict(os.environ), os.listdir('/proc/self/fd')]))"
    environment, descriptors = json.loads(asyncio.run(send(script, marks)).output)
    assert "SECRET" not in environment
    assert environment["HOME"] == str((marks.parent / "home").resolve())
    assert len(descriptors) == 4  # the three it has, and the one it looks with


def test_an_agent_that_fails(marks: Path) -> None:
    finished = asyncio.run(send(f"{MARK}\nprint('so far'); sys.exit('no luck')", marks))
    assert finished == Finished("failed", 1, "python exited with 1: no luck", "so far")
    killed = asyncio.run(send(f"{MARK}\nos.kill(os.getpid(), signal.SIGKILL)", marks))
    assert (killed.status, killed.code) == ("failed", 128 + 9)


def test_a_program_that_cannot_be_started(marks: Path, tmp_path: Path) -> None:
    class Missing(ScriptDriver):
        def prepare(self, errand: AgentTask, home: Path, work: Path) -> Launch:
            return Launch((str(tmp_path / "missing"),), self.environment(home))

    driver = Missing(Scripted(script="", marks=marks))
    places = {name: tmp_path / name for name in ("home", "work", "log")}
    finished = asyncio.run(run_agent(driver, ERRAND, **places, seconds=60, stop=asyncio.Event()))
    assert finished.status == "failed"
    assert "No such file or directory" in finished.reason


def test_much_output_is_no_trouble(marks: Path) -> None:
    finished = asyncio.run(
        send(f"{MARK}\nfor _ in range(1000): print('x' * 4000); print('y' * 4000, file=sys.stderr)", marks)
    )
    assert len(finished.output) == 1000 * 4001 - 1


def test_what_an_agent_leaves_running_ends_with_it(marks: Path) -> None:
    finished = asyncio.run(send(f"{BROOD}\nprint('done')", marks))
    assert (finished.status, finished.output) == ("completed", "done")
    assert len(list(marks.iterdir())) == 4


def test_an_agent_has_only_so_long(marks: Path) -> None:
    finished = asyncio.run(send(f"{MARK}\nprint('so far', flush=True)\ntime.sleep(600)", marks, seconds=1))
    assert finished.status == "truncated"
    assert finished.code is None
    assert finished.reason == "it did not finish within 1 seconds"


def test_an_agent_that_does_not_listen_is_stopped(marks: Path) -> None:
    async def main() -> Finished:
        stop = asyncio.Event()
        running = asyncio.create_task(send(STUBBORN, marks, stop=stop))
        await ready(marks)
        assert len(alive(marks)) == 4
        stop.set()
        return await running

    finished = asyncio.run(main())
    assert (finished.status, finished.code, finished.reason) == ("aborted", None, "it was stopped")


def test_an_agent_may_tidy_up_when_it_is_stopped(marks: Path) -> None:
    tidy = "signal.signal(signal.SIGTERM, lambda *_: (print('tidied'), sys.exit(0)))\n(marks / 'ready').touch()\n"

    async def main() -> Finished:
        stop = asyncio.Event()
        running = asyncio.create_task(send(f"{MARK}{tidy}time.sleep(600)", marks, stop=stop))
        await ready(marks)
        stop.set()
        return await running

    assert asyncio.run(main()).output == "tidied"


def test_nothing_is_left_when_we_are_cancelled(marks: Path) -> None:
    async def main() -> None:
        running = asyncio.create_task(send(STUBBORN, marks))
        await ready(marks)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert alive(marks) == []

    asyncio.run(main())


def test_nothing_is_left_when_we_are_killed(marks: Path) -> None:
    ours = f"""
import asyncio, pathlib
from slime_plugin.agents import agent_process
from {HERE} import STUBBORN, send
agent_process.GRACE_S = 0.3
asyncio.run(send(STUBBORN, pathlib.Path({str(marks)!r})))
"""
    with subprocess.Popen([sys.executable, "-c", ours], cwd=ROOT) as us:
        while not (marks / "ready").exists():
            assert us.poll() is None
            time.sleep(0.01)
        us.kill()
    while alive(marks):  # the supervisor outlives us for as long as it needs
        time.sleep(0.01)


def test_several_at_once_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_process, "GRACE_S", 0.3)
    script = f"{BROOD}\npathlib.Path('mine').write_text(os.environ['TOKEN'] + os.environ['HOME'])\nprint(os.getcwd())"
    places = [tmp_path / str(i) / "marks" for i in range(3)]
    for place in places:
        place.mkdir(parents=True)

    async def main() -> list[Finished]:
        return await asyncio.gather(*(send(script, place) for place in places))

    finished = asyncio.run(main())
    assert [one.output for one in finished] == [str((place.parent / "work").resolve()) for place in places]
    assert [alive(place) for place in places] == [[], [], []]


@pytest.mark.parametrize("name", OpenCodeDriver.inherited_files)
def test_an_agent_does_not_work_below_what_it_would_read(name: str, marks: Path) -> None:
    (marks.parent / name).mkdir()
    with pytest.raises(ConfigError, match=f"also reads .*{re.escape(name)}, .*; use a folder elsewhere"):
        asyncio.run(send(MARK, marks))
