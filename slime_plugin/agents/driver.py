"""The base class of drivers: a driver starts one kind of agent so that it talks to the tap and to nothing else.

It writes the agent's configuration into a home folder made for one rollout, and returns the command and its
environment. Of the current environment an agent inherits only :data:`INHERITED`, so it finds no keys, proxies or
settings of the user. ``agent_process.py`` runs the command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from slime_plugin.config.harness import BlackBox
from slime_plugin.config.workload import Workload
from slime_plugin.errors import ConfigError
from slime_plugin.record import Status
from slime_plugin.tap.payload import Thread

S = TypeVar("S", bound=BlackBox)

INHERITED = ("PATH", "LANG", "LC_ALL", "TZ")
"""Environment variables that an agent inherits."""
INSTALLED = Path(".harnesses") / "bin"
"""Where ``launch/harnesses.sh`` puts programs, below the current folder."""

_COMPLAINT = "Driver.complaint is now Driver.failure_reason; the old name is removed in 0.8"


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of an agent, the endpoint it talks to, and its limits."""

    task: str
    url: str
    """Base URL of the tap, without ``/v1``."""
    token: str
    """Identifies the rollout to the tap."""
    model: str
    """Name of the policy."""
    context_tokens: int
    turn_tokens: int
    turns: int
    """The tap enforces it too: not every agent obeys a limit, and none counts its subagents."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command to run."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment."""
    stdin: str = ""
    """The task: a command line has a limit, is visible to everyone, and reads a leading dash as an option."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How an agent ended."""

    status: Status
    code: int | None
    """Exit code, 128 and more if a signal ended it; None if it was terminated."""
    reason: str
    """Empty if it was completed."""
    output: str
    """Its last message."""


class Driver(ABC, Generic[S]):
    """Starts one kind of agent. A subclass defines the names below and :meth:`prepare`."""

    Settings: ClassVar[type[BlackBox]] = BlackBox
    """The keys that ``harness:`` takes beside ``type``; checked before anything starts."""
    command: ClassVar[str]
    """Name of the program."""
    verified: ClassVar[str] = ""
    """Version that this driver was tested with; empty if it does not matter."""
    inherited_files: ClassVar[tuple[str, ...]] = (".git", "AGENTS.md", "CLAUDE.md")
    """Files that the agent reads in all folders above its working folder."""
    client_env: ClassVar[Mapping[str, str]] = {}
    """Variables that the agent needs beside URL and token where the user starts it, for ``memorywalker tap serve``."""
    workload: ClassVar[Workload] = BlackBox.workload
    """Of a driver by import path: an average rollout, for ``memorywalker plan``."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @abstractmethod
    def prepare(self, task: AgentTask, home: Path, work: Path) -> Launch:
        """Write the agent's configuration into its home and its working folder; both exist, and are absolute."""

    @classmethod
    def thread_of(cls, headers: Mapping[str, str]) -> Thread:
        """Read from the headers of a request, whose names are in lower case, which conversation it belongs to.

        Here: ``x-session-id`` names it, and ``x-parent-session-id`` the one that started it.
        """
        return Thread(headers.get("x-session-id", ""), headers.get("x-parent-session-id") or None)

    def judge(self, code: int, stdout: str, stderr: str) -> Finished:
        """Judge a run by its exit code and output. Here: it prints its last message, and exits with 0 on success."""
        if code == 0:
            return Finished("completed", code, "", stdout.strip())
        return Finished("failed", code, self.failure_reason(code, stderr.strip() or stdout.strip()), stdout.strip())

    def failure_reason(self, code: int, output: str) -> str:
        """The exit code and the last line of some output."""
        last = (output.splitlines() or ["no output"])[-1]
        return f"{self.command} exited with {code}: {last:.300}"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "complaint" in vars(cls) and "failure_reason" not in vars(cls):  # a driver of 0.6
            warnings.warn(f"{cls.__qualname__}: {_COMPLAINT}", FutureWarning, stacklevel=2)
            cls.failure_reason = cls.complaint  # type: ignore[method-assign]

    def complaint(self, code: int, output: str) -> str:
        """Name of :meth:`failure_reason` in 0.6, until 0.8."""
        warnings.warn(_COMPLAINT, FutureWarning, stacklevel=2)
        is_old = type(self).failure_reason is type(self).complaint  # which calls this method as its super()
        return Driver.failure_reason(self, code, output) if is_old else self.failure_reason(code, output)

    def program(self) -> Path:
        """Path of the program."""
        given = self.settings.program
        for found in (given,) if given else (INSTALLED / self.command, shutil.which(self.command)):
            if found is not None and os.access(found, os.X_OK) and Path(found).is_file():
                return Path(found).resolve()
        if given:
            raise ConfigError(
                f"harness.program: {given} is not an executable; leave it out, and run launch/harnesses.sh"
            )
        raise ConfigError(
            f"harness: {self.command} is neither in {INSTALLED} nor on PATH; run launch/harnesses.sh, which installs "
            "it, or name it as harness.program"
        )

    def version(self) -> str:
        """The version number that ``--version`` prints."""
        program = self.program()
        with tempfile.TemporaryDirectory() as home:  # some write there immediately
            result = subprocess.run(
                [program, "--version"], env=self.environment(Path(home)), capture_output=True, text=True, check=False
            )
        words = [word for word in result.stdout.split() if word[0].isdigit()]
        if result.returncode or not words:
            raise ConfigError(f"harness: {program} --version says {result.stdout + result.stderr!r:.200}; reinstall it")
        return words[0]

    def request(self, task: AgentTask) -> str:
        """The task followed by the instructions."""
        return "\n\n".join(text for text in (task.task, self.settings.instructions) if text)

    def environment(self, home: Path) -> dict[str, str]:
        """The environment of every agent: all that is looked up below a home folder is below this one."""
        temporary = home / "tmp"
        temporary.mkdir(exist_ok=True)
        return {
            **{name: os.environ[name] for name in INHERITED if name in os.environ},
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local" / "share"),
            "XDG_STATE_HOME": str(home / ".local" / "state"),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
        }


def compaction_point(command: str, configured: int | None, task: AgentTask, *, free: int, least: int, room: int) -> int:
    """Tokens in the context at which an agent compacts: as configured, or so that ``free`` tokens are left.

    At least ``least`` have to be left in any case. An agent that compacts with less than ``room`` tokens in its context
    does nothing else: its own prompt and a summary fill it again.
    """
    point = task.context_tokens - free if configured is None else configured
    if point < room and configured is None:
        raise ConfigError(
            f"harness: {command} needs a context of {room + free} tokens with turns of {task.turn_tokens}, and has "
            f"{task.context_tokens}; allow longer contexts or shorter turns, or set harness.compact_at"
        )
    if not room <= point <= task.context_tokens - least:
        raise ConfigError(
            f"harness.compact_at: {point} tokens is not between {room}, which {command} fills again at once, and "
            f"{task.context_tokens - least}, after which a summary does not fit; change it, or allow longer contexts"
        )
    return point
