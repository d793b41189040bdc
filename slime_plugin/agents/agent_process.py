"""Run one agent. No process it starts outlives it, even if the task is cancelled or this process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from slime_plugin.agents.driver import AgentTask, Driver, Finished, Launch
from slime_plugin.errors import ConfigError
from slime_plugin.run.processes import supervised

GRACE_S = 5.0
"""Seconds from SIGTERM to SIGKILL."""


async def run_agent(
    driver: Driver[Any], task: AgentTask, *, home: Path, work: Path, seconds: float, stop: asyncio.Event, log: Path
) -> Finished:
    """Run an agent in these folders until it exits, ``seconds`` have passed or ``stop`` is set. Logs go to ``log``."""
    for folder in (home, work, log):
        folder.mkdir(parents=True, exist_ok=True)
    work = work.resolve()
    _check_work_folder(work, driver.inherited_files)
    launch = driver.prepare(task, home.resolve(), work)
    stdin, out, err = (log.resolve() / f"agent.{name}" for name in ("in", "out", "err"))
    stdin.write_text(launch.stdin, encoding="utf-8")
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        code = await _wait(launch, stdin, work, stdout, stderr, seconds, stop)
    output, errors = (path.read_text("utf-8", errors="replace") for path in (out, err))
    if code is not None:
        return driver.judge(code, output, errors)
    judged = driver.judge(128 + signal.SIGTERM, output, errors)  # for its output
    if stop.is_set():
        return replace(judged, status="aborted", code=None, reason="it was stopped")
    return replace(judged, status="truncated", code=None, reason=f"it did not finish within {seconds:g} seconds")


def _check_work_folder(work: Path, inherited_files: tuple[str, ...]) -> None:
    for above in work.parents:
        for name in inherited_files:
            if (above / name).exists():
                raise ConfigError(
                    f"{work}: an agent that works here also reads {above / name}, which is not part of its task; "
                    "use a folder elsewhere, such as a temporary one"
                )


async def _wait(
    launch: Launch, stdin: Path, work: Path, stdout: IO[bytes], stderr: IO[bytes], seconds: float, stop: asyncio.Event
) -> int | None:
    """Return the agent's exit code, None if we terminated it. None of its processes is left when this returns."""
    reader, writer = os.pipe()
    with open(reader, "rb") as supervisor_stdin, open(writer, "wb") as hold:
        process = await asyncio.create_subprocess_exec(
            *supervised(launch.argv, GRACE_S, stdin),
            env=launch.env,
            cwd=work,
            stdin=supervisor_stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C in the terminal is for us
        )
        ended, stopped = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((ended, stopped), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            stopped.cancel()
            hold.close()
            await asyncio.shield(ended)
