"""One rollout of an agent that is a black box: from a question to the record, like those of the bridge.

The agent is started in folders of its own and works until it is done or a limit ends it. What it asked for is in the
session of the tap that it was given; the record is recovered from there, also if the agent failed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from slime_plugin.bridge.chat import load_chat
from slime_plugin.bridge.chat.base import Chat
from slime_plugin.bridge.engine.base import Engine
from slime_plugin.bridge.harness import Surroundings, check_model, open_harness
from slime_plugin.bridge.messages import Question
from slime_plugin.bridge.reward import Outcome, build_reward, extract_answer
from slime_plugin.bridge.session import Ending
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Mask4d
from slime_plugin.config.rollout import Rollout
from slime_plugin.errors import ConfigError, MemoryWalkerError, RecordError
from slime_plugin.record import Meta, Record
from slime_plugin.record.checks import UNTRAINED
from slime_plugin.tap.drivers import Driver, Errand, Finished, driver_for, run_agent
from slime_plugin.tap.messages import Finish
from slime_plugin.tap.recovery import Recovered, recover
from slime_plugin.tap.session import TapSession
from slime_plugin.tap.tap import Tap

MODEL = "policy"
"""What agents are told that the policy is called: a name that none of them knows, so that none assumes anything."""
SERVER_PACKAGES = ("h11", "starlette", "uvicorn")
"""What only the server needs, and so no harness but a black box."""
_LIMITS: dict[Finish, str] = {"length": "turn tokens", "context": "context"}
_log = logging.getLogger(__name__)


class Agents:
    """The surroundings of the policy, where these are an agent of its own."""

    def __init__(
        self,
        cell: Cell,
        driver: Driver[Any],
        tap: Tap,
        url: str,
        reward: Callable[[Outcome], Awaitable[float]],
        folder: Path,
    ) -> None:
        self.name, self.limits, self.chat = cell.harness.type, cell.rollout, tap.chat
        self.driver, self.tap, self.url, self.reward, self.folder = driver, tap, url, reward, folder
        self.slots = asyncio.Semaphore(driver.settings.processes)

    def begin(self, engine: Engine, question: Question, id: str, seed: int | None = None) -> AgentRollout:
        return AgentRollout(self, engine, question, id, seed)


class AgentRollout:
    """One rollout of one question."""

    def __init__(self, agents: Agents, engine: Engine, question: Question, id: str, seed: int | None) -> None:
        self._agents, self._engine, self._question, self._id, self._seed = agents, engine, question, id, seed
        self._stop = asyncio.Event()
        self._stopped = False
        self._session: TapSession | None = None

    @property
    def turns(self) -> int:
        return 0 if self._session is None else len(self._session.turns)

    def stop(self) -> None:
        """End soon, as aborted, with what there is. May be called at any time, any number of times."""
        self._stopped = True
        self._stop.set()

    async def run(self) -> Record:
        """The record of the rollout. Raises nothing but cancellation."""
        agents = self._agents
        place = agents.folder / f"rollout-{secrets.token_hex(8)}"
        try:
            async with agents.slots:
                ending = await self._work(place)
            return await self._judged(ending)
        finally:
            if not agents.driver.settings.keep_folders:
                await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
                if self._session is not None:
                    agents.tap.log_of(self._session.id).unlink(missing_ok=True)

    async def _work(self, place: Path) -> Ending:
        agents = self._agents
        try:
            place.mkdir()
            self._session, token = agents.tap.open(f"{self._id}-{place.name}", self._engine, self._seed)
            try:
                return self._ending(await self._send(self._session, token, place))
            finally:
                agents.tap.close(self._session)
                await self._session.close({"status": "closed"})
        except (MemoryWalkerError, OSError) as error:
            _log.warning("rollout %s failed: %s", self._id, error)
            return Ending("failed", "error", str(error))

    async def _send(self, session: TapSession, token: str, place: Path) -> Finished:
        agents, limits = self._agents, self._agents.limits
        work, template = place / "work", agents.driver.settings.workspace
        if template is None:
            work.mkdir()
        elif not template.is_dir():
            raise ConfigError(f"harness.workspace: there is no folder {template}")
        else:
            await asyncio.to_thread(shutil.copytree, template, work, symlinks=True)
        errand = Errand(
            task=self._question.text,
            url=agents.url,
            token=token,
            model=agents.tap.model,
            context_tokens=limits.context_tokens,
            turn_tokens=limits.turn_tokens,
            turns=limits.turns,
        )
        over = asyncio.create_task(self._end_with(session))
        try:
            return await run_agent(
                agents.driver,
                errand,
                home=place / "home",
                work=work,
                seconds=limits.seconds or float(10**9),
                stop=self._stop,
                log=place,
            )
        finally:
            over.cancel()

    async def _end_with(self, session: TapSession) -> None:
        """An agent whose rollout is over would only ask again."""
        await session.over.wait()
        self._stop.set()

    def _ending(self, finished: Finished) -> Ending:
        assert self._session is not None
        told = self._session.ending
        if self._stopped:
            return Ending("aborted", "stopped")
        if told is not None and (self._session.over.is_set() or finished.status == "failed"):
            return told
        if finished.status == "completed" and not self._session.turns:
            return Ending("failed", "agent", "the agent ended without asking the policy anything")
        if finished.status == "truncated":
            return Ending("truncated", "time" if finished.code is None else "turns")
        if finished.status == "completed":
            return Ending("completed", "")
        return Ending("failed", "agent", finished.reason)

    def _settled(self, ending: Ending, recovered: Recovered, answer: str | None) -> Ending:
        """Agents fail, or give up without a word, when the policy is cut off or its context does not fit: these are
        limits, and a policy that runs into them has to hear of it."""
        assert self._session is not None
        if ending.stop not in ("", "agent"):
            return ending
        limit = "context" if self._session.overflowed else _LIMITS.get(recovered.finish)
        if limit is not None and (answer is None or ending.status == "failed"):
            return Ending("truncated", limit, ending.error)
        if ending.status == "failed":
            return ending
        return Ending("completed", "no answer" if answer is None else "answer")

    async def _judged(self, ending: Ending) -> Record:
        session = self._session
        if session is None:  # there is not even a log of it
            return self._without_tokens(ending, 0)
        train = self._agents.driver.settings.train
        reward = None
        recovered: Recovered | None = None
        try:
            weights = train.model_dump()
            recovered = await asyncio.to_thread(recover, session.contexts, session.parents, session.lost, weights)
            answer = extract_answer(recovered.reply)
            ending = self._settled(ending, recovered, answer)
            if ending.status in ("completed", "truncated"):
                outcome = Outcome(self._question, recovered.reply, answer, ending.status)
                reward = await asyncio.wait_for(self._agents.reward(outcome), self._agents.limits.tool_seconds)
        except TimeoutError:
            ending = Ending("failed", "error", "the reward gave no answer in time")
        except Exception as error:  # noqa: BLE001  # a bad rollout is data: its record says why, and the run goes on
            _log.exception("rollout %s failed", self._id)
            ending, reward = Ending("failed", "error", f"{type(error).__name__}: {error}"), None
        try:
            if recovered is not None and recovered.tokens:
                return recovered.record(self._meta(ending, reward, recovered.extra))
        except RecordError as error:  # a mistake of ours; the run goes on without what cannot be trained on
            _log.exception("rollout %s cannot be recorded", self._id)
            ending = Ending("failed", "error", str(error))
        return self._without_tokens(ending, sum(turn.sampled for turn in session.turns) + session.lost.total())

    def _without_tokens(self, ending: Ending, sampled: int) -> Record:
        """A record that says how a rollout ended, of which nothing else can be said."""
        extra = {"turns": [], "calls": 0, **({UNTRAINED: {"failed": sampled}} if sampled else {})}
        opening = self._agents.chat.open_turn()
        nothing = Recovered(list(opening), [float("nan")] * len(opening), [[(0, len(opening))]], [], extra, "", "stop")
        return nothing.record(self._meta(ending, None, extra))

    def _meta(self, ending: Ending, reward: float | None, extra: dict[str, Any]) -> Meta:
        session = self._session
        told: dict[str, Any] = {"stop": ending.stop, "question": self._question.digest, "seed": self._seed, **extra}
        if session is not None and session.retries:
            told["retries"] = session.retries
        if ending.error is not None:
            told["error"] = ending.error
        return Meta(
            id=self._id,
            harness=self._agents.name,
            group=self._question.id,
            reward=reward,
            status=ending.status,
            weight_version=None if session is None else session.weight_version,
            extra=told,
        )


@asynccontextmanager
async def open_surroundings(cell: Cell, chat: Chat | None = None) -> AsyncIterator[Surroundings]:
    """The harness of a cell, whether we can look into it or not."""
    driver = driver_for(cell.harness)
    if driver is None:
        async with open_harness(cell, chat) as harness:
            yield harness
        return
    check_black_box(cell, driver)
    if chat is None:
        chat = load_chat(check_model(cell), cell.rollout.chat, thinking=cell.rollout.thinking)
    from slime_plugin.tap.server import Listening  # check_black_box knows that it can be imported

    reward = build_reward(cell.reward)
    with _folder(keep=driver.settings.keep_folders) as folder:
        keep_thoughts = driver.settings.thoughts == "keep"
        tap = Tap(chat, cell.rollout, folder / "logs", model=MODEL, keep_thoughts=keep_thoughts)
        async with Listening(tap) as server:
            yield Agents(cell, driver, tap, server.url, reward, folder)


@contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    """Where rollouts have their folders."""
    if keep:
        folder = Path(tempfile.mkdtemp(prefix="memorywalker-kept-"))
        _log.warning("the folders of the rollouts stay in %s", folder)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="memorywalker-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def check_black_box(cell: Cell, driver: Driver[Any]) -> None:
    """What an agent of its own cannot do: told before anything starts."""
    for package in SERVER_PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"harness: {cell.harness.type} is served with {package}, which is not installed; "
                "pip install 'memorywalker[tap]'"
            )
    driver.program()
    if isinstance(cell.method, Mask4d) and cell.method.packing == "union":
        raise ConfigError(
            f"method.packing: union needs to know when each token left the context, which {cell.harness.type} does not "
            "tell; use packing trie, which shares what is equal"
        )
    if cell.tools:
        names = ", ".join(tool.type for tool in cell.tools)
        raise ConfigError(f"tools: {cell.harness.type} has tools of its own, and would not see {names}; leave them out")
    with tempfile.TemporaryDirectory() as place:  # settings that do not go together
        home, work = Path(place) / "home", Path(place) / "work"
        home.mkdir()
        work.mkdir()
        limits: Rollout = cell.rollout
        errand = Errand("", "http://127.0.0.1:1", "", MODEL, limits.context_tokens, limits.turn_tokens, limits.turns)
        driver.prepare(errand, home, work)
