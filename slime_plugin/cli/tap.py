"""``memorywalker tap serve | run | recover``."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slime_plugin.cli.config import CONFIG, OVERRIDES, prefixed_errors
from slime_plugin.cli.inputs import check_installed
from slime_plugin.cli.output import console
from slime_plugin.cli.rollout import ENGINE, interrupts, log_file, open_engine, run_async, with_engine
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import read_yaml
from slime_plugin.config.harness import BLACK_BOXES, Train
from slime_plugin.config.overrides import load_cell, merged, parse_cell
from slime_plugin.record import Meta, Record, StoreWriter, scan_store
from slime_plugin.report.terminal import draw_staircase

if TYPE_CHECKING:
    from slime_plugin.tap.tap import Tap
    from slime_plugin.tap.tap_session import SessionHistory

STORE = "rollouts.records"
"""Name of the store of a served folder."""


@click.group()
def tap() -> None:
    """Serve unmodified agents, and record what they do.

    The tap serves Anthropic's and OpenAI's APIs. What an agent does to its context is recovered from its
    requests, and becomes a record like any other.
    """


@tap.command()
@CONFIG
@OVERRIDES
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder of the sessions.")
@click.option("--session", "names", multiple=True, metavar="NAME", help="A rollout to open; may be repeated.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on.  [default: a free one]")
@click.option("--public", is_flag=True, help="Allow a host that other machines reach; nothing is encrypted.")
@ENGINE
def serve(
    config: Path,
    overrides: tuple[str, ...],
    logs: Path,
    names: tuple[str, ...],
    host: str,
    port: int,
    public: bool,
    engine: str | None,
) -> None:
    """Serve any client until interrupted.

    Opens a rollout for every --session and prints its token. Rollouts with an unfinished log in --logs are resumed;
    their clients keep their tokens, and with the same --port also their URL. On interrupt, the records of all of them
    are added to rollouts.records in that folder.
    """
    _check()
    cell = with_engine(load_cell(config, overrides), engine)
    with prefixed_errors(config):
        run_async(_serve(cell, logs, names, (host, port, public)))


async def _serve(cell: Cell, logs: Path, names: tuple[str, ...], listen: tuple[str, int, bool]) -> None:
    from slime_plugin.agents import DRIVERS
    from slime_plugin.tap.limits import ServerSettings
    from slime_plugin.tap.server import TapServer
    from slime_plugin.tap.session_log import is_ended
    from slime_plugin.tap.tap import LOG_SUFFIX

    host, port, public = listen
    settings = ServerSettings(host=host, port=port, public=public)
    tap, train = _tap(cell, logs)
    logs.mkdir(parents=True, exist_ok=True)
    unfinished = [path for path in sorted(logs.glob(f"*{LOG_SUFFIX}")) if not is_ended(path)]
    new = _new_names(names, tap, resumes=bool(unfinished))
    more = {name: driver.client_env for name, driver in DRIVERS.items() if driver.client_env}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(TapServer(tap, settings))  # first: the port may be taken
        stack.enter_context(log_file(logs / "tap.log"))
        stop = stack.enter_context(interrupts("open rollouts are closed and recorded"))
        engine = await stack.enter_async_context(open_engine(cell, tap.chat, logs, stop))
        for path in unfinished:
            session = tap.reopen(path, engine)
            click.echo(f"session {session.id} resumes after {len(session.turns)} turns, with the same token")
        for name in new:
            session, token = tap.open(name, engine)
            click.echo(f"session {session.id}, token {token}")
            click.echo(f"  ANTHROPIC_BASE_URL={server.url} ANTHROPIC_AUTH_TOKEN={token}")
            click.echo(f"  OPENAI_BASE_URL={server.url}/v1 OPENAI_API_KEY={token}")
            for agent, variables in more.items():
                click.echo(f"  {' '.join(f'{key}={value}' for key, value in variables.items())}  ({agent})")
        click.echo(f"listening on {server.url}; interrupt to end")
        await stop.wait()
        sessions = tap.sessions
        for session in sessions:
            tap.close(session)
            await session.close({"status": "closed"})
    _write([_recovered(session, train) for session in sessions if session.turns], logs / STORE)


def _new_names(names: tuple[str, ...], tap: Tap, *, resumes: bool) -> tuple[str, ...]:
    """The names of the rollouts to open: those given, or one if none is given and none is resumed."""
    taken = [name for i, name in enumerate(names) if name in names[:i] or tap.log_of(name).exists()]
    if taken:
        raise click.BadParameter(
            f"there is a rollout {taken[0]!r} already; choose another name", param_hint="--session"
        )
    if names or resumes:
        return names
    free = (f"rollout-{number}" for number in count())
    return (next(name for name in free if not tap.log_of(name).exists()),)


@tap.command()
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="LOG...")
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The cell that the tap served."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Store to add records to.")
def recover(logs: tuple[Path, ...], config: Path, out: Path) -> None:
    """Write the records of sessions from their logs.

    LOG is a log of the tap, or a folder of logs. They are only read: a running tap is not disturbed.
    """
    _check()
    cell = load_cell(config, ())
    with prefixed_errors(config):
        _recover(cell, logs, out)


def _recover(cell: Cell, logs: tuple[Path, ...], out: Path) -> None:
    from slime_plugin.tap.tap import LOG_SUFFIX

    tap, train = _tap(cell, Path())
    paths = [file for path in logs for file in (sorted(path.glob(f"*{LOG_SUFFIX}")) if path.is_dir() else [path])]
    if not paths:
        raise click.UsageError(f"there is no *{LOG_SUFFIX} in {', '.join(map(str, logs))}")
    histories = [tap.read(path) for path in paths]
    _write([_recovered(history, train) for history in histories if history.turns], out)


@tap.command()
@click.option(
    "--harness", required=True, metavar="TYPE", help=f"The agent: {', '.join(BLACK_BOXES)}, or your own driver."
)
@click.option("--task", required=True, help="What the agent is to do.")
@click.option("--answer", "answers", multiple=True, help="An accepted answer, for the reward; may be repeated.")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="A cell to take settings from.")
@OVERRIDES
@ENGINE
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Store to add the record to."
)
def run(
    harness: str,
    task: str,
    answers: tuple[str, ...],
    config: Path | None,
    overrides: tuple[str, ...],
    engine: str | None,
    out: Path,
) -> None:
    """Run one agent on one task, and record it.

    Settings such as model=FOLDER, rollout.context_tokens=65536 or harness.workspace=FOLDER replace those of --config.
    Without an engine URL, an SGLang server is started for the run. Exits with 1 if the rollout failed or was aborted.
    """
    _check()
    given = {} if config is None else read_yaml(config)
    value = merged(given, {"harness": {"type": harness}})
    cell = with_engine(parse_cell(value, overrides, str(config or "the command line")), engine)
    record = run_async(_run(cell, task, answers, out))
    draw_staircase(record, console())
    meta = record.meta
    reason = "" if meta.report.error is None else f": {meta.report.error}"
    reward = "" if meta.reward is None else f", reward {meta.reward:g}"
    click.echo(f"{meta.status} ({meta.report.stop}){reason}{reward}; wrote {out}", err=True)
    sys.exit(0 if meta.status in ("completed", "truncated") else 1)


async def _run(cell: Cell, task: str, answers: tuple[str, ...], out: Path) -> Record:
    from slime_plugin.environments import open_environment
    from slime_plugin.rollout.messages import Question

    question = Question("task", task, answers)
    out.parent.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        agents = await stack.enter_async_context(open_environment(cell))
        store = stack.enter_context(StoreWriter(out))
        stack.enter_context(log_file(out.with_suffix(".log")))
        stop = stack.enter_context(interrupts("the agent is terminated and its rollout recorded"))
        engine = await stack.enter_async_context(open_engine(cell, agents.chat, out.parent, stop))
        before = sum(isinstance(found, Record) for found in scan_store(out))
        rollout = agents.begin(engine, question, f"task-{before}", cell.rollout.seed)
        ending = asyncio.create_task(stop.wait())
        ending.add_done_callback(lambda task: None if task.cancelled() else rollout.stop())
        click.echo(f"{cell.harness.type} is running", err=True)
        record = await rollout.run()
        ending.cancel()
        store.append(record)
    return record


def _tap(cell: Cell, logs: Path) -> tuple[Tap, Train]:
    """The tap of a cell, and what is trained; the defaults for an editor."""
    from slime_plugin.agents import driver_for
    from slime_plugin.agents.environment import make_tap
    from slime_plugin.rollout.environment import open_chat

    driver = driver_for(cell.harness)
    return make_tap(cell, driver, open_chat(cell), logs), Train() if driver is None else driver.settings.train


def _recovered(history: SessionHistory, train: Train) -> Record:
    from slime_plugin.recovery.recover import recover

    found = recover(history.contexts, history.parents, history.lost, train.model_dump())
    meta = Meta(id=history.id, harness="tap", weight_version=history.weight_version, extra=found.report.to_json())
    return found.record(meta)


def _write(records: list[Record], out: Path) -> None:
    with StoreWriter(out) as store:
        for record in records:
            store.append(record)
    number = f"{len(records)} record{'s' * (len(records) != 1)}"
    hint = f"; memorywalker record list {out}" if records else ""
    click.echo(f"wrote {number} to {out}{hint}", err=True)


def _check() -> None:
    check_installed("tap", "aiohttp", "h11", "orjson", "starlette", "tokenizers", "uvicorn")
