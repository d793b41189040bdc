"""What a driver is: how one agent is started so that it talks to the tap and to nothing else.

A driver writes the agent's configuration into a home folder made for one rollout, and says what to run with which
environment. The environment is complete: nothing of ours is inherited but what :data:`INHERITED` names, so an agent
finds no keys, no proxies and no settings of whoever runs it. ``process.py`` does the rest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

from slime_plugin.config.harness import BlackBox
from slime_plugin.errors import ConfigError

S = TypeVar("S", bound=BlackBox)

INHERITED = ("PATH", "LANG", "LC_ALL", "TZ")
"""The variables of our environment that an agent sees."""
INSTALLED = Path(".harnesses") / "bin"
"""Where ``launch/harnesses.sh`` puts programs, below the current folder."""

Status = Literal["completed", "truncated", "aborted", "failed"]
"""As in a record: it was done; a limit ended it; we were told to stop; something went wrong."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What an agent is sent to do, and how much of the policy it may use."""

    task: str
    url: str
    """Of the tap, without ``/v1``."""
    token: str
    """By which the tap knows whose requests these are."""
    model: str
    """What the agent is told that the policy is called."""
    context_tokens: int
    turn_tokens: int
    turns: int
    """The tap counts these, too: not every agent keeps to a limit, and none counts its subagents."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command to run."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """All of it."""
    stdin: str = ""
    """The task goes here: a command line has a limit, is shown to everyone, and reads a leading dash as an option."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How an agent ended."""

    status: Status
    code: int | None
    """What it exited with, 128 and more if a signal ended it; None if it was ended by us."""
    reason: str
    """Empty if it was done."""
    output: str
    """Its last message."""


class Driver(ABC, Generic[S]):
    """Starts one kind of agent. A subclass is given the names below, and :meth:`prepare`."""

    Settings: ClassVar[type[BlackBox]] = BlackBox
    """The keys that ``harness:`` takes beside ``type``; checked before anything starts."""
    command: ClassVar[str]
    """What the program is called."""
    verified: ClassVar[str] = ""
    """The version that this driver was tried with; empty if it does not matter."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @abstractmethod
    def prepare(self, errand: Errand, home: Path, work: Path) -> Launch:
        """Write what the agent reads into its home and its working folder; both exist, and are absolute."""

    def judge(self, code: int, stdout: str, stderr: str) -> Finished:
        """How it went, from what a run left behind. Here: it prints its last message, and a code of 0 is success."""
        if code == 0:
            return Finished("completed", code, "", stdout.strip())
        return Finished("failed", code, self.complaint(code, stderr.strip() or stdout.strip()), stdout.strip())

    def complaint(self, code: int, said: str) -> str:
        """A reason for having failed: the last line of what was said."""
        last = (said.splitlines() or ["it said nothing"])[-1]
        return f"{self.command} exited with {code}: {last:.300}"

    def program(self) -> Path:
        """Where the program is."""
        given = self.settings.program
        for found in (given,) if given else (INSTALLED / self.command, shutil.which(self.command)):
            if found is not None and os.access(found, os.X_OK) and Path(found).is_file():
                return Path(found).resolve()
        if given:
            raise ConfigError(f"harness.program: {given} is no program; leave it out, and run launch/harnesses.sh")
        raise ConfigError(
            f"harness: {self.command} is neither in {INSTALLED} nor on PATH; run launch/harnesses.sh, which installs "
            "it, or name it as harness.program"
        )

    def version(self) -> str:
        """What the program says its version is, without the words around it."""
        program = self.program()
        with tempfile.TemporaryDirectory() as home:  # some write there at once
            said = subprocess.run(
                [program, "--version"], env=self.environment(Path(home)), capture_output=True, text=True, check=False
            )
        words = [word for word in said.stdout.split() if word[0].isdigit()]
        if said.returncode or not words:
            raise ConfigError(f"harness: {program} --version says {said.stdout + said.stderr!r:.200}; install it anew")
        return words[0]

    def request(self, errand: Errand) -> str:
        """The task with the instructions behind it."""
        return "\n\n".join(text for text in (errand.task, self.settings.instructions) if text)

    def environment(self, home: Path) -> dict[str, str]:
        """What every agent gets: everything that is looked up below a home is below this one."""
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


def compaction_point(command: str, asked: int | None, errand: Errand, *, free: int, least: int, room: int) -> int:
    """Tokens in the context at which an agent is to compact: as asked, or so that ``free`` tokens are left.

    ``least`` have to be left whatever was asked. An agent that compacts with less than ``room`` tokens in its context
    does nothing else: its own prompt and a summary fill it again.
    """
    point = errand.context_tokens - free if asked is None else asked
    if point < room and asked is None:
        raise ConfigError(
            f"harness: {command} needs a context of {room + free} tokens with turns of {errand.turn_tokens}, and has "
            f"{errand.context_tokens}; allow longer contexts or shorter turns, or set harness.compact_at"
        )
    if not room <= point <= errand.context_tokens - least:
        raise ConfigError(
            f"harness.compact_at: {point} tokens is not between {room}, which {command} fills again at once, and "
            f"{errand.context_tokens - least}, after which a summary does not fit; change it, or allow longer contexts"
        )
    return point
