"""``memorywalker rollout``."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import rich.progress
from rich.console import Console

from slime_plugin.cli.config import CONFIG, OVERRIDES
from slime_plugin.cli.inputs import check_installed, sound_records
from slime_plugin.cli.output import console, shown_stages
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.rollout import Engine
from slime_plugin.errors import ConfigError
from slime_plugin.record import Record
from slime_plugin.report.summary import summarise, summary_tables

if TYPE_CHECKING:
    from slime_plugin.bridge.chat import Chat
    from slime_plugin.bridge.engine.sglang import SglangEngine
    from slime_plugin.bridge.harness import Running
    from slime_plugin.bridge.run import Tally

_EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""

ENGINE = click.option(
    "--engine", metavar="URL", help="An SGLang server or router that runs already.  [default: engine.url]"
)


@click.command()
@CONFIG
@OVERRIDES
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder of the run.")
@click.option("--questions", type=click.IntRange(min=1), help="Only the first N questions.  [default: all]")
@click.option("--samples", type=click.IntRange(min=1), help="Rollouts per question.  [default: rollout.samples]")
@ENGINE
def rollout(
    config: Path,
    overrides: tuple[str, ...],
    out: Path,
    questions: int | None,
    samples: int | None,
    engine: str | None,
) -> None:
    """Run a harness: questions in, records out.

    CONFIG is a cell with harness, model, tools and questions; settings such as harness=tc_rag or rollout.turns=12
    replace its own. Without an engine to talk to, an SGLang server is started for the time of the run. Every rollout is
    written down as it ends: called again with the same folder, the command goes on where it stopped, and tries again
    what failed.

    Exits with 1 if rollouts failed or were aborted, and with 130 if it was interrupted.
    """
    cell = load_cell(config, overrides)
    if samples is not None:
        cell = cell.model_copy(update={"rollout": cell.rollout.model_copy(update={"samples": samples})})
    cell = with_engine(cell, engine)
    check_installed("rollout", "aiohttp", "bm25s", "orjson", "tokenizers")
    with as_mistakes_of(config):
        try:
            tally = asyncio.run(_run(cell, out, questions))
        except asyncio.CancelledError:  # by the second interrupt
            raise click.Abort from None
    _report(out)
    click.echo(f"wrote {out}; memorywalker record list {out} shows every rollout", err=True)
    left = {"failed": tally.statuses["failed"], "aborted": tally.statuses["aborted"], "not begun": tally.left}
    if any(left.values()):
        numbers = ", ".join(f"{number} {what}" for what, number in left.items() if number)
        log = out / "rollout.log"
        reasons = f"; {log} has the reasons" if log.exists() else ""
        click.echo(f"{numbers} of {tally.total} rollouts; call the command again to go on{reasons}", err=True)
    sys.exit(130 if tally.interrupted else 1 if any(left.values()) else 0)


def with_engine(cell: Cell, url: str | None) -> Cell:
    """The cell with the engine of the command line, if there is one."""
    if url is None:
        return cell
    there = parse_config({**cell.engine.model_dump(), "url": url}, Engine, "--engine")
    return cell.model_copy(update={"engine": there})


@contextmanager
def as_mistakes_of(config: Path) -> Iterator[None]:
    """Mistakes in a configuration that come out only when it is used name the file as well."""
    try:
        yield
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(f"{config}: {line}" for line in lines)) from None


async def _run(cell: Cell, out: Path, limit: int | None) -> Tally:
    """From a cell to a folder of records. All that can be wrong with the cell is told before an engine is started."""
    from slime_plugin.bridge.questions import read_questions
    from slime_plugin.bridge.run import Tally, jobs_left, open_run, run_jobs
    from slime_plugin.tap.run import open_surroundings

    if cell.rollout.questions is None:
        raise ConfigError("rollout.questions: missing; name a file of JSON lines with question and answers")
    questions = read_questions(cell.rollout.questions)[:limit]
    async with AsyncExitStack() as stack:
        harness = await stack.enter_async_context(open_surroundings(cell))
        store = stack.enter_context(open_run(out, cell))
        jobs = jobs_left(store.path, questions, cell.rollout.samples)
        tally = Tally(len(jobs))
        there = len(questions) * cell.rollout.samples - len(jobs)
        if there:
            click.echo(f"{there} rollouts are there already, {len(jobs)} are left", err=True)
        if jobs:
            stack.enter_context(log_file(out / "rollout.log"))
            stop = stack.enter_context(interrupts())
            engine = await stack.enter_async_context(open_engine(cell, harness.chat, out, stop))
            watch = stack.enter_context(_progress(tally))
            await run_jobs(harness, engine, jobs, store, watch, stop)
            tally.interrupted = stop.is_set()
    return tally


@asynccontextmanager
async def open_engine(cell: Cell, chat: Chat, out: Path, stop: asyncio.Event) -> AsyncIterator[SglangEngine]:
    """The engine of the configuration, or one that lives as long as the run."""
    from slime_plugin.bridge.engine.sglang import SglangEngine
    from slime_plugin.bridge.server import Flags, Server, ServerError, chosen_device

    stop_ids = chat.stop_ids
    if cell.engine.url is not None:
        async with SglangEngine(cell.engine.url, cell.engine, cell.rollout, stop_ids) as engine:
            await engine.check()
            yield engine
        return
    assert cell.model is not None  # or there were no tokenizer, and no harness
    server = Server(Flags(cell.model, chosen_device("auto")), log=out / "engine.log")
    try:
        server.start()
        click.echo(f"starting an SGLang server of {cell.model}", err=True)
        with shown_stages() as on_progress:
            healthy = asyncio.create_task(asyncio.to_thread(server.wait, on_progress))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait((healthy, stopped), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if not healthy.done():
                server.stop()
                with suppress(ServerError):  # that it was stopped
                    await healthy
                raise click.Abort
            await healthy
        async with SglangEngine(server.url, cell.engine, cell.rollout, stop_ids) as engine:
            yield engine
    finally:
        await asyncio.to_thread(server.stop)


@contextmanager
def interrupts(what: str = "rollouts under way end as aborted") -> Iterator[asyncio.Event]:
    """An event that an interrupt or a termination sets; the second one ends everything at once."""
    loop, stop, task = asyncio.get_running_loop(), asyncio.Event(), asyncio.current_task()

    def interrupted() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
            return
        click.echo(f"stopping: {what}; interrupt again to end at once", err=True)
        stop.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, interrupted)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextmanager
def _progress(tally: Tally) -> Iterator[Callable[[Record, Running], None]]:
    """Shows on a terminal what the run has come to, and now and then says it elsewhere."""
    begun = last = time.monotonic()

    def line() -> str:
        seconds = max(time.monotonic() - begun, 1e-9)
        reward = "-" if tally.reward is None else f"{tally.reward:.3f}"
        return (
            f"{tally.turns / seconds:.1f} turns/s, {tally.tokens / seconds:.0f} tokens/s, "
            f"{tally.edits} edits, reward {reward}"
        )

    columns = ("rollouts", rich.progress.BarColumn(), rich.progress.MofNCompleteColumn(), "{task.description}")
    bar = rich.progress.Progress(
        *columns, rich.progress.TimeElapsedColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty()
    )
    task = bar.add_task("", total=tally.total)

    def watch(record: Record, session: Running) -> None:
        nonlocal last
        tally.add(record, session.turns)
        bar.update(task, advance=1, description=line())
        if bar.disable and time.monotonic() - last > _EVERY:
            last = time.monotonic()
            click.echo(f"{tally.sessions} of {tally.total} rollouts, {line()}", err=True)

    with bar:
        yield watch
    seconds = time.monotonic() - begun
    click.echo(f"{tally.sessions} rollouts in {seconds:.1f} s: {line()}", err=True)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """What goes wrong in single rollouts, with tracebacks, for later."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("slime_plugin")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def _report(out: Path) -> None:
    """What edits did to all rollouts of the run."""
    problems: list[str] = []
    summary = summarise(sound_records([out], problems))
    for line in problems:
        click.echo(f"Error: {line}", err=True)
    console().print(summary_tables(summary)[0])
