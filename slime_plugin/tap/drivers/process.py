"""An agent from start to end. Whatever ends it, nothing that it started outlives it.

Between us and the agent is a warden (``warden.py``), which stays as long as we hold a pipe to it open. So the agent
also ends when this task is cancelled, and when this process is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from slime_plugin.errors import ConfigError
from slime_plugin.tap.drivers import warden
from slime_plugin.tap.drivers.base import Driver, Errand, Finished, Launch

GRACE = 5.0
"""Seconds that an agent has to end by itself before it is killed."""
COMPANY = (".git", "CLAUDE.md", "AGENTS.md", "opencode.json", "opencode.jsonc", ".opencode")
"""What agents look for in all folders above the one they work in."""


async def run_agent(
    driver: Driver[Any], errand: Errand, *, home: Path, work: Path, seconds: float, stop: asyncio.Event, log: Path
) -> Finished:
    """Run an agent in these folders, for at most so long, until ``stop`` is set. What it says is kept below ``log``."""
    for folder in (home, work, log):
        folder.mkdir(parents=True, exist_ok=True)
    work = work.resolve()
    _refuse_company(work)
    launch = driver.prepare(errand, home.resolve(), work)
    task, told, complained = (log.resolve() / f"agent.{name}" for name in ("in", "out", "err"))
    task.write_text(launch.stdin, encoding="utf-8")
    with open(told, "wb") as stdout, open(complained, "wb") as stderr:
        code = await _wait(launch, task, work, stdout, stderr, seconds, stop)
    said, errors = (path.read_text("utf-8", errors="replace") for path in (told, complained))
    if code is not None:
        return driver.judge(code, said, errors)
    judged = driver.judge(128 + signal.SIGTERM, said, errors)  # for its output
    if stop.is_set():
        return replace(judged, status="aborted", code=None, reason="it was told to stop")
    return replace(judged, status="truncated", code=None, reason=f"it was not done after {seconds:g} seconds")


def _refuse_company(work: Path) -> None:
    for above in work.parents:
        for name in COMPANY:
            if (above / name).exists():
                raise ConfigError(
                    f"{work}: an agent that works here also reads {above / name}, which is none of its task; use a "
                    "folder elsewhere, such as a temporary one"
                )


async def _wait(
    launch: Launch, task: Path, work: Path, stdout: IO[bytes], stderr: IO[bytes], seconds: float, stop: asyncio.Event
) -> int | None:
    """The agent's code; None if we ended it. Nothing of it is left when this returns, or raises."""
    reader, writer = os.pipe()
    with open(reader, "rb") as stdin, open(writer, "wb") as hold:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", warden.__file__, str(GRACE), str(task), *launch.argv),
            env=launch.env,
            cwd=work,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # a Ctrl-C in the terminal is for us
        )
        ended, stopped = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((ended, stopped), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            stopped.cancel()
            hold.close()
            await asyncio.shield(ended)
