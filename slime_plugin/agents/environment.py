"""Rollouts of agents, from a question to the record.

The agent is started in folders of its own and works until it is done or a limit ends it. Its requests are in a session
of the tap; the record is recovered from that, even if the agent failed.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_plugin.agents import AgentTask, Driver, Finished, any_thread_of, run_agent
from slime_plugin.config.cell import Cell
from slime_plugin.config.rollout import Rollout
from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.record import Meta, Record, RolloutReport
from slime_plugin.recovery.recover import Recovered, recover
from slime_plugin.rollout.base_rollout import STOPPED, BaseRollout, Ending
from slime_plugin.rollout.chat.chat import Chat
from slime_plugin.rollout.engine.engine import Engine
from slime_plugin.rollout.environment import open_chat
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.reward import Outcome, build_reward, extract_answer
from slime_plugin.tap.payload import StopReason
from slime_plugin.tap.tap import Tap
from slime_plugin.tap.tap_session import TapSession

MODEL = "policy"
"""Model name given to agents: unknown to them, so they apply no model-specific defaults."""
SERVER_PACKAGES = {"h11": (0, 14), "starlette": (1, 0), "uvicorn": (0, 51)}
"""Packages that only agents need, and their oldest versions. slime's image is installed without dependencies."""
_STOPS: dict[StopReason, str] = {"length": "turn tokens", "context": "context"}
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class AgentEnvironment:
    """Opens rollouts of an agent."""

    name: str
    driver: Driver[Any]
    tap: Tap
    url: str
    reward: Callable[[Outcome], Awaitable[float]]
    folder: Path

    def __post_init__(self) -> None:
        self.limits, self.chat = self.tap.limits, self.tap.chat
        self.slots = asyncio.Semaphore(self.driver.settings.processes)

    def begin(self, engine: Engine, question: Question, id: str, seed: int | None = None) -> AgentRollout:
        return AgentRollout(self, engine, question, id, seed)


class AgentRollout(BaseRollout[AgentEnvironment]):
    """One rollout of one question, by an agent."""

    def __init__(
        self, environment: AgentEnvironment, engine: Engine, question: Question, id: str, seed: int | None
    ) -> None:
        super().__init__(environment, question, id, seed)
        self._engine = engine
        self._stop_agent = asyncio.Event()
        self._session: TapSession | None = None
        self._recovered: Recovered | None = None

    @property
    def turns(self) -> int:
        return 0 if self._session is None else len(self._session.turns)

    def stop(self) -> None:
        super().stop()
        self._stop_agent.set()

    async def _run(self) -> Ending:
        environment = self._environment
        folder = environment.folder / f"rollout-{secrets.token_hex(8)}"
        try:
            async with environment.slots:
                ending = await self._work(folder)
        finally:
            if not environment.driver.settings.keep_folders:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                if self._session is not None:
                    environment.tap.log_of(self._session.id).unlink(missing_ok=True)
        session = self._session
        if session is None:
            return ending
        self._sampled_tokens = sum(turn.sampled for turn in session.turns) + session.lost.total()
        self._weight_version = session.weight_version
        weights = environment.driver.settings.train.model_dump()
        found = await asyncio.to_thread(recover, session.contexts, session.parents, session.lost, weights)
        self._recovered, self._reply = found, found.reply
        return self._settled(ending, found)

    async def _work(self, folder: Path) -> Ending:
        tap = self._environment.tap
        try:
            folder.mkdir()
            self._session, token = tap.open(f"{self._id}-{folder.name}", self._engine, self._seed)
            try:
                return self._ending(await self._run_agent(self._session, token, folder))
            finally:
                tap.close(self._session)
                await self._session.close({"status": "closed"})
        except (MemoryWalkerError, OSError) as error:
            _log.warning("rollout %s failed: %s", self._id, error)
            return Ending("failed", "error", str(error))

    async def _run_agent(self, session: TapSession, token: str, folder: Path) -> Finished:
        driver, limits = self._environment.driver, self._environment.limits
        work, template = folder / "work", driver.settings.workspace
        if template is None:
            work.mkdir()
        elif not template.is_dir():
            raise ConfigError(f"harness.workspace: there is no folder {template}")
        else:
            await asyncio.to_thread(shutil.copytree, template, work, symlinks=True)
        task = _task(self._question.text, self._environment.url, token, limits)
        stop_with_session = asyncio.create_task(self._stop_with(session))
        try:
            return await run_agent(
                driver,
                task,
                home=folder / "home",
                work=work,
                seconds=limits.seconds or float(10**9),
                stop=self._stop_agent,
                log=folder,
            )
        finally:
            stop_with_session.cancel()

    async def _stop_with(self, session: TapSession) -> None:
        """Stop an agent whose session is over: it would only ask again."""
        await session.over.wait()
        self._stop_agent.set()

    def _ending(self, finished: Finished) -> Ending:
        assert self._session is not None
        ending = self._session.ending
        if self._stopped.is_set():
            return STOPPED
        if ending is not None and (self._session.over.is_set() or finished.status == "failed"):
            return ending
        if finished.status == "completed" and not self._session.turns:
            return Ending("failed", "agent", "the agent ended without asking the policy anything")
        if finished.status == "truncated":
            return Ending("truncated", "time" if finished.code is None else "turns")
        if finished.status == "completed":
            return Ending("completed", "")
        return Ending("failed", "agent", finished.reason)

    def _settled(self, ending: Ending, recovered: Recovered) -> Ending:
        """Agents fail, or end without an answer, when a turn is cut off or a context does not fit. That is a limit, so
        the rollout counts as truncated."""
        assert self._session is not None
        if ending.stop not in ("", "agent"):
            return ending
        answer = extract_answer(recovered.reply)
        limit = "context" if self._session.overflowed else _STOPS.get(recovered.finish)
        if limit is not None and (answer is None or ending.status == "failed"):
            return Ending("truncated", limit, ending.error)
        if ending.status == "failed":
            return ending
        return Ending("completed", "no answer" if answer is None else "answer")

    def _recorded(self, ending: Ending, reward: float | None) -> Record | None:
        found = self._recovered
        return found.record(self._meta(ending, reward, found.report)) if found is not None and found.tokens else None

    def _meta(self, ending: Ending, reward: float | None, report: RolloutReport) -> Meta:
        retries = None if self._session is None else self._session.retries or None
        return super()._meta(ending, reward, replace(report, retries=retries))


@asynccontextmanager
async def open_agent_environment(cell: Cell, driver: Driver[Any]) -> AsyncIterator[AgentEnvironment]:
    """The environment of an agent, with a tap of its own on a loopback address."""
    check_black_box(cell, driver)
    from slime_plugin.tap.server import TapServer  # check_black_box has checked that it can be imported

    chat, reward = open_chat(cell), build_reward(cell.reward)
    with _folder(keep=driver.settings.keep_folders) as folder:
        tap = make_tap(cell, driver, chat, folder / "logs")
        async with TapServer(tap) as server:
            yield AgentEnvironment(cell.harness.type, driver, tap, server.url, reward, folder)


def make_tap(cell: Cell, driver: Driver[Any] | None, chat: Chat, logs: Path) -> Tap:
    """The tap of an agent; without a driver, that of any client."""
    keep_thoughts = driver is None or driver.settings.thoughts == "keep"
    return Tap(chat, cell.rollout, logs, model=MODEL, thread_of=any_thread_of(driver), keep_thoughts=keep_thoughts)


@contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    """The parent of the folders of rollouts."""
    if keep:
        folder = Path(tempfile.mkdtemp(prefix="memorywalker-kept-"))
        _log.warning("the folders of the rollouts stay in %s", folder)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="memorywalker-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def check_black_box(cell: Cell, driver: Driver[Any]) -> None:
    """Raise for settings that do not work with an agent, before anything starts."""
    for package, oldest in SERVER_PACKAGES.items():
        found = _version(package)
        if found is None or tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
            state = (
                "not installed" if found is None else f"{found}, and has to be {'.'.join(map(str, oldest))} or newer"
            )
            raise ConfigError(
                f"harness: {cell.harness.type} is served with {package}, which is {state}; "
                "pip install 'memorywalker[tap]'"
            )
    driver.program()
    if cell.tools:
        names = ", ".join(tool.type for tool in cell.tools)
        raise ConfigError(f"tools: {cell.harness.type} has tools of its own, and would not see {names}; leave them out")
    with tempfile.TemporaryDirectory() as folder:  # settings that do not fit together
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        driver.prepare(_task("", "http://127.0.0.1:1", "", cell.rollout), home, work)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _task(text: str, url: str, token: str, limits: Rollout) -> AgentTask:
    return AgentTask(text, url, token, MODEL, limits.context_tokens, limits.turn_tokens, limits.turns)
