"""``memorywalker rollout``."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import rich.progress
from rich.console import Console

from slime_plugin.cli.config import CONFIG, OVERRIDES, prefixed_errors
from slime_plugin.cli.inputs import check_installed, echo_errors, valid_records
from slime_plugin.cli.output import console, shown_stages
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.rollout import EngineSettings
from slime_plugin.record import Record
from slime_plugin.report.summary import summarise, summary_tables

if TYPE_CHECKING:
    from slime_plugin.rollout.chat import Chat
    from slime_plugin.rollout.engine.sglang_client import SglangEngine
    from slime_plugin.rollout.environment import RolloutHandle
    from slime_plugin.rollout.runner import RunTotals

T = TypeVar("T")
PROGRESS_INTERVAL_S = 10.0
"""Between two lines of progress if standard error is not a terminal."""

ENGINE = click.option("--engine", metavar="URL", help="A running SGLang server or router.  [default: engine.url]")


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
    override its own. Without an engine URL, an SGLang server is started for the run. Every record is stored as its
    rollout ends: called again with the same folder, the command resumes, and retries what failed.

    Exits with 1 if rollouts failed or were aborted, and with 130 if it was interrupted.
    """
    cell = load_cell(config, overrides)
    if samples is not None:
        cell = cell.model_copy(update={"rollout": cell.rollout.model_copy(update={"samples": samples})})
    cell = with_engine(cell, engine)
    check_installed("rollout", "aiohttp", "bm25s", "orjson", "tokenizers")
    with prefixed_errors(config):
        totals = run_async(_run(cell, out, questions))
    _report(out)
    click.echo(f"wrote {out}; memorywalker record list {out} shows every rollout", err=True)
    left = {"failed": totals.statuses["failed"], "aborted": totals.statuses["aborted"], "not started": totals.left}
    if any(left.values()):
        numbers = ", ".join(f"{number} {what}" for what, number in left.items() if number)
        log = out / "rollout.log"
        reasons = f"; {log} has the reasons" if log.exists() else ""
        click.echo(f"{numbers} of {totals.total} rollouts; run the command again to resume{reasons}", err=True)
    sys.exit(130 if totals.interrupted else 1 if any(left.values()) else 0)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command that the second interrupt cancels (:func:`interrupts`)."""
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise click.Abort from None


def with_engine(cell: Cell, url: str | None) -> Cell:
    """Return the cell with the engine of the command line, if one is given."""
    if url is None:
        return cell
    configured = parse_config({**cell.engine.model_dump(), "url": url}, EngineSettings, "--engine")
    return cell.model_copy(update={"engine": configured})


async def _run(cell: Cell, out: Path, limit: int | None) -> RunTotals:
    """Run the rollouts of a cell into a folder. Invalid settings are refused before an engine is started."""
    from slime_plugin.environments import open_environment
    from slime_plugin.rollout.questions import read_questions
    from slime_plugin.rollout.runner import RunTotals, open_run, run_tasks, tasks_left

    questions = read_questions(cell.require_questions())[:limit]
    async with AsyncExitStack() as stack:
        environment = await stack.enter_async_context(open_environment(cell))
        store = stack.enter_context(open_run(out, cell))
        tasks = tasks_left(store.path, questions, cell.rollout.samples)
        totals = RunTotals(len(tasks))
        done = len(questions) * cell.rollout.samples - len(tasks)
        if done:
            click.echo(f"{done} rollouts are done already, {len(tasks)} are left", err=True)
        if tasks:
            stack.enter_context(log_file(out / "rollout.log"))
            stop = stack.enter_context(interrupts())
            engine = await stack.enter_async_context(open_engine(cell, environment.chat, out, stop))
            watch = stack.enter_context(_progress(totals))
            await run_tasks(environment, engine, tasks, store, watch, stop)
            totals.interrupted = stop.is_set()
    return totals


@asynccontextmanager
async def open_engine(cell: Cell, chat: Chat, out: Path, stop: asyncio.Event) -> AsyncIterator[SglangEngine]:
    """Connect to the configured engine, or start one for the run."""
    from slime_plugin.rollout.engine.sglang_client import SglangEngine
    from slime_plugin.rollout.server import Flags, Server, ServerError, chosen_device

    stop_ids = chat.stop_ids
    if cell.engine.url is not None:
        async with SglangEngine(cell.engine.url, cell.engine, cell.rollout, stop_ids) as engine:
            await engine.check()
            yield engine
        return
    model = cell.require_model()
    server = Server(Flags(model, chosen_device("auto")), log=out / "engine.log")
    try:
        server.start()
        click.echo(f"starting an SGLang server of {model}", err=True)
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
def interrupts(what: str = "running rollouts end as aborted") -> Iterator[asyncio.Event]:
    """Yield an event that SIGINT or SIGTERM sets; a second signal cancels the task."""
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
def _progress(totals: RunTotals) -> Iterator[Callable[[Record, RolloutHandle], None]]:
    """Show the totals of a run: a progress bar on a terminal, otherwise a line every few seconds."""
    start = last = time.monotonic()

    def line() -> str:
        seconds = max(time.monotonic() - start, 1e-9)
        reward = "-" if totals.reward is None else f"{totals.reward:.3f}"
        return (
            f"{totals.turns / seconds:.1f} turns/s, {totals.tokens / seconds:.0f} tokens/s, "
            f"{totals.edits} edits, reward {reward}"
        )

    columns = ("rollouts", rich.progress.BarColumn(), rich.progress.MofNCompleteColumn(), "{task.description}")
    bar = rich.progress.Progress(
        *columns, rich.progress.TimeElapsedColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty()
    )
    task = bar.add_task("", total=totals.total)

    def watch(record: Record, rollout: RolloutHandle) -> None:
        nonlocal last
        totals.add(record, rollout.turns)
        bar.update(task, advance=1, description=line())
        if bar.disable and time.monotonic() - last > PROGRESS_INTERVAL_S:
            last = time.monotonic()
            click.echo(f"{totals.rollouts} of {totals.total} rollouts, {line()}", err=True)

    with bar:
        yield watch
    seconds = time.monotonic() - start
    click.echo(f"{totals.rollouts} rollouts in {seconds:.1f} s: {line()}", err=True)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Log failures of single rollouts, with tracebacks, to a file."""
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
    """Print what edits did to the rollouts of the run."""
    problems: list[str] = []
    summary = summarise(valid_records([out], problems))
    echo_errors(problems)
    console().print(summary_tables(summary)[0])
