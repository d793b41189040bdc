"""What rollouts of editors and of agents have in common: how they end, are stopped, judged and recorded."""

from __future__ import annotations

import asyncio
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from slime_plugin.errors import MemoryWalkerError, RecordError
from slime_plugin.record import Meta, Record, RolloutReport, Status
from slime_plugin.rollout.engine.engine import EngineError, RefusedError
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.reward import Outcome, extract_answer
from slime_plugin.rollout.tools.tool import ErrorKind, ToolError

if TYPE_CHECKING:
    from slime_plugin.rollout.environment import RolloutEnvironment  # it imports a subclass

Environment = TypeVar("Environment", bound="RolloutEnvironment")
Argument = TypeVar("Argument")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a rollout is over."""

    status: Status
    stop: str
    error: str | None = None


STOPPED = Ending("aborted", "stopped")


class BaseRollout(ABC, Generic[Environment]):
    """One rollout of one question. ``run`` is called once."""

    def __init__(self, environment: Environment, question: Question, id: str, seed: int | None) -> None:
        self._environment, self._question, self._id, self._seed = environment, question, id, seed
        self._stopped = asyncio.Event()
        self._reply = ""  # text of the last turn, which is judged
        self._sampled_tokens = 0
        self._weight_version: str | None = None  # of the weights that sampled last

    @property
    @abstractmethod
    def turns(self) -> int:
        """Turns sampled so far."""

    @abstractmethod
    async def _run(self) -> Ending:
        """Run to the end, before the reward. May raise."""

    @abstractmethod
    def _recorded(self, ending: Ending, reward: float | None) -> Record | None:
        """Return the record of everything that was sampled; None if there is no context."""

    def stop(self) -> None:
        """End soon as aborted, keeping what was sampled. May be called at any time, any number of times."""
        self._stopped.set()

    async def run(self) -> Record:
        """Return the record of the rollout. Raises nothing but cancellation."""
        reward = None
        try:
            ending = await self._run()
            if ending.status in ("completed", "truncated"):
                reward = await self._judge(ending.status)
                ending = ending if reward is not None else STOPPED
        except MemoryWalkerError as error:
            _log.warning("rollout %s failed: %s", self._id, error)
            of_engine = "refused" if isinstance(error, RefusedError) else "engine"
            ending = Ending("failed", of_engine if isinstance(error, EngineError) else "error", str(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            ending = Ending("failed", "error", "a task of the rollout was cancelled")
        except Exception as error:  # noqa: BLE001  # a bad rollout is data: its record says why, and the run continues
            _log.exception("rollout %s failed", self._id)
            ending = Ending("failed", "error", f"{type(error).__name__}: {error}")
        return self._record(ending, reward)

    async def _judge(self, status: Status) -> float | None:
        """Return the reward; None if the rollout is stopped before there is one."""
        environment = self._environment
        outcome = Outcome(self._question, self._reply, extract_answer(self._reply), status)
        return await self._run_user_code("the reward", environment.reward, outcome, environment.limits.tool_seconds)

    async def _run_user_code(
        self,
        what: str,
        work: Callable[[Argument], Awaitable[Result]],
        argument: Argument,
        seconds: float,
        late: ErrorKind = "timeout",
    ) -> Result | None:
        """Return what a tool or reward returns, or None if the rollout is stopped before that.

        Its failure is a :class:`ToolError` that names only the exception's type: the message may hold an API key.
        """

        async def called() -> Result:
            return await work(argument)

        task, stopped = asyncio.create_task(called()), asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((task, stopped), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            if not task.done() and self._stopped.is_set():
                return None
            if task.done():
                raise ToolError(f"{what} was cancelled", "crashed")
            raise ToolError(f"{what} timed out after {seconds:.3g} seconds", late)
        except MemoryWalkerError:
            raise
        except Exception as error:  # noqa: BLE001  # a tool or reward may raise anything
            traceback_text = "".join(traceback.format_tb(error.__traceback__))
            _log.warning("%s failed in rollout %s with %s:\n%s", what, self._id, type(error).__name__, traceback_text)
            raise ToolError(f"{what} failed ({type(error).__name__})", "crashed") from None
        finally:
            task.cancel()
            stopped.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    def _record(self, ending: Ending, reward: float | None) -> Record:
        try:
            record = self._recorded(ending, reward)
        except RecordError as error:  # a bug of this package; the run continues without the tokens
            _log.exception("rollout %s cannot be recorded", self._id)
            record, ending, reward = None, Ending("failed", "error", str(error)), None
        return self._without_tokens(ending, reward) if record is None else record

    def _without_tokens(self, ending: Ending, reward: float | None) -> Record:
        """Return a record of how the rollout ended. A record holds at least one token: here the opening of a turn."""
        opening, sampled = self._environment.chat.open_turn(), self._sampled_tokens
        report = RolloutReport(calls=0, untrained={"failed": sampled} if sampled else {})
        meta = self._meta(ending, reward, report)
        return Record(list(opening), [0] * len(opening), [None] * len(opening), [[(0, len(opening))]], meta=meta)

    def _meta(self, ending: Ending, reward: float | None, report: RolloutReport) -> Meta:
        report = replace(report, stop=ending.stop, error=ending.error, question=self._question.digest, seed=self._seed)
        return Meta(
            id=self._id,
            harness=self._environment.name,
            group=self._question.id,
            reward=reward,
            status=ending.status,
            weight_version=self._weight_version,
        ).with_report(report)
