"""The turn loop of one rollout: the policy thinks, calls tools and answers, while an editor rewrites its context.

Every rollout ends in a record with a status and a reason, and every token that was sampled is in it once:

* ``completed``: the policy called no tool, so it is done (``answer``, or ``no answer`` if it gave none);
* ``truncated``: a limit ended it (``turns``, ``turn tokens``, ``sampled tokens``, ``context``, ``time``);
* ``aborted``: it was stopped from outside (``stopped``), or the engine aborted it (``engine``);
* ``failed``: the engine does not answer (``engine``) or refuses a turn (``refused``), or the editor or the reward
  failed (``error``); ``meta.error`` says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from slime_plugin.errors import MemoryWalkerError, RecordError
from slime_plugin.record import Meta, Record, RolloutReport, TurnReport
from slime_plugin.rollout.chat.chat import encodable
from slime_plugin.rollout.context import Context, Segment
from slime_plugin.rollout.engine.engine import Engine, EngineError, Generation, RefusedError, Request
from slime_plugin.rollout.messages import Message, Question, split_thought
from slime_plugin.rollout.reward import Outcome, extract_answer
from slime_plugin.rollout.tool_calls import BadCall, Call, parse_calls, unknown_tool, wrong_arguments
from slime_plugin.rollout.tools.tool import Schema, ToolError

if TYPE_CHECKING:
    from slime_plugin.rollout.environment import EditorEnvironment  # it imports this module

Argument = TypeVar("Argument")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a rollout is over."""

    status: str
    stop: str
    error: str | None = None


class EditorRollout:
    """One rollout of one question, with an editor."""

    def __init__(
        self, environment: EditorEnvironment, engine: Engine, question: Question, id: str, seed: int | None = None
    ) -> None:
        self._environment = environment
        self._engine = engine
        self._question = question
        self._id = id
        self._seed = seed
        self._stopped = asyncio.Event()
        self._deadline = math.inf
        self._turns: list[TurnReport] = []
        self._sampled_tokens = 0
        self._weight_version: str | None = None
        self._reply = ""  # text of the last turn without its thought, unless the policy has to answer again
        self._calls = self._call_errors = 0
        self._context: Context | None = None
        self._ended_in_ask: Ending | None = None

    @property
    def turns(self) -> int:
        """Turns sampled so far, summaries included."""
        return len(self._turns)

    def stop(self) -> None:
        """End soon as aborted, keeping what was sampled. May be called at any time, any number of times."""
        self._stopped.set()

    async def run(self) -> Record:
        """Return the record of the rollout. Raises nothing but cancellation."""
        if self._environment.limits.seconds is not None:
            self._deadline = self._now() + self._environment.limits.seconds
        reward = None
        try:
            self._start()
            ending = await self._loop()
            if ending.status in ("completed", "truncated"):
                reward = await self._judge(ending)
                ending = ending if reward is not None else Ending("aborted", "stopped")
        except MemoryWalkerError as error:
            _log.warning("rollout %s failed: %s", self._id, error)
            of_engine = "refused" if isinstance(error, RefusedError) else "engine"
            stop = of_engine if isinstance(error, EngineError) else "error"
            ending = Ending("failed", stop, str(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            ending = Ending("failed", "error", "something that the rollout waited for was cancelled")
        except Exception as error:  # noqa: BLE001  # a bad rollout is data: its record says why, and the run continues
            _log.exception("rollout %s failed", self._id)
            ending = Ending("failed", "error", f"{type(error).__name__}: {error}")
        return self._record(ending, reward)

    def _start(self) -> None:
        environment, limits = self._environment, self._environment.limits
        self._editor = environment.editor()
        self._actions = {action.schema.name: action for action in self._editor.actions()}
        schemas = [tool.schema for tool in environment.tools.values()] + [a.schema for a in self._actions.values()]
        self._schemas: dict[str, Schema] = {schema.name: schema for schema in schemas}
        prompt = environment.chat.prompt(limits.system, self._question.text, schemas if limits.describe_tools else ())
        self._context = Context(environment.chat, prompt, self._question.text)

    @property
    def _live(self) -> Context:
        assert self._context is not None  # created by _start
        return self._context

    async def _loop(self) -> Ending:
        limits, context, editor = self._environment.limits, self._live, self._editor
        for turns_left in reversed(range(limits.turns)):
            if turns_left == 0:
                editor.before_answer(context, None)
            await editor.before_turn(context, self._ask)
            if self._ended_in_ask is not None:
                return self._ended_in_ask
            turn, ending = await self._sample(limits.turn_tokens)
            if turn is not None:
                self._reply = split_thought(turn.text)[1]
            if ending is not None:
                return ending
            calls = parse_calls(self._reply)
            if not calls:
                answered = extract_answer(self._reply) is not None
                if self._turns[-1].finish == "length" and not answered:
                    return Ending("truncated", "turn tokens")
                if turns_left and editor.before_answer(context, turn):
                    self._reply = ""
                    continue
                return Ending("completed", "answer" if answered else "no answer")
            for call in calls if turns_left else ():  # the policy would not see results of the last turn's calls
                if not self._stopped.is_set():
                    await self._execute(call)
        return Ending("truncated", "turns")

    async def _ask(self, message: Message, max_tokens: int) -> Segment | None:
        """The ``ask`` argument of editors."""
        if self._ended_in_ask is not None:
            return None
        request = self._live.append(message)
        answer, self._ended_in_ask = await self._sample(max_tokens, asked=True)
        if answer is None:
            self._live.take_back(request)
        return answer if self._ended_in_ask is None else None

    async def _sample(self, max_tokens: int, *, asked: bool = False) -> tuple[Segment | None, Ending | None]:
        """Sample a turn; return what was sampled, if anything, and why the rollout is over, if it is."""
        limits = self._environment.limits
        prompt = self._live.prompt()
        budgets = {"context": limits.context_tokens - len(prompt), "turn tokens": max_tokens}
        if limits.sampled_tokens is not None:
            budgets["sampled tokens"] = limits.sampled_tokens - self._sampled_tokens
        limit = min(budgets, key=lambda name: budgets[name])
        time_left = self._deadline - self._now()
        if self._stopped.is_set():
            return None, Ending("aborted", "stopped")
        if budgets[limit] < 1 or time_left <= 0:
            return None, Ending("truncated", limit if budgets[limit] < 1 else "time")
        timeout = None if time_left == math.inf else time_left
        seed = None if self._seed is None else turn_seed(self._seed, self.turns)
        generation = await self._engine.generate(
            Request(prompt, budgets[limit], self._id, seed, timeout, self._stopped)
        )
        if not generation.tokens and generation.finish != "abort":
            raise EngineError(f"0 tokens for a turn of {self._id}, though it finished with {generation.finish}")
        segment = self._append(generation, asked) if generation.tokens else None
        return segment, self._ending_after(generation, limit, budgets[limit])

    def _append(self, generation: Generation, asked: bool) -> Segment:
        segment = self._live.append_turn(generation)
        assert segment.sampled is not None  # it is a turn of the policy
        straddles = generation.weights if generation.straddles else ()
        self._turns.append(TurnReport(segment.sampled, generation.finish, asked=asked, straddles=straddles))
        self._sampled_tokens += len(generation.tokens)
        if generation.weights:
            self._weight_version = generation.weights[-1][0]
        return segment

    def _ending_after(self, generation: Generation, limit: str, budget: int) -> Ending | None:
        """Return why the rollout is over after a turn of at most ``budget`` tokens, which ``limit`` allowed."""
        if generation.finish == "abort":
            if self._stopped.is_set():
                return Ending("aborted", "stopped")
            return Ending("truncated", "time") if self._now() >= self._deadline else Ending("aborted", "engine")
        if generation.finish == "length":
            if len(generation.tokens) < budget:  # the engine's context is shorter than rollout.context_tokens
                return Ending("truncated", "context")
            if limit != "turn tokens":
                return Ending("truncated", limit)
        return None

    async def _execute(self, call: Call | BadCall) -> None:
        """Append the result of a call. A call that cannot be executed gets an error as its result."""
        self._calls += 1
        name = call.name if isinstance(call, Call) else None
        try:
            text = await self._result(call)
        except ToolError as error:
            self._call_errors += 1
            text = f"Error: {error}"
        if text is None:
            return
        text, longest = encodable(text), self._environment.limits.result_tokens
        if len(text.encode()) >= longest:  # a token has at least one byte, so most results need not be tokenized
            text = self._environment.chat.cut(text, longest)
        self._live.append(Message("tool", text, name, note=name in self._actions))

    async def _result(self, call: Call | BadCall) -> str | None:
        """Execute a call and return the text of the result; None if there is none."""
        if isinstance(call, BadCall):
            raise ToolError(call.reason)
        if call.name not in self._schemas:
            raise ToolError(unknown_tool(call.name, list(self._schemas)))
        wrong = wrong_arguments(self._schemas[call.name], call.arguments)
        if wrong:
            raise ToolError(wrong)
        if call.name in self._actions:
            return self._actions[call.name].run(self._live, call.arguments) or None
        environment = self._environment
        seconds = min(environment.limits.tool_seconds, max(0.0, self._deadline - self._now()))
        result: object = await self._run_user_code(call.name, environment.tools[call.name], call.arguments, seconds)
        if not isinstance(result, str) and not self._stopped.is_set():
            raise ToolError(f"{call.name} gave a {type(result).__name__} instead of a text")
        return result if isinstance(result, str) else None

    async def _judge(self, ending: Ending) -> float | None:
        """Return the reward; None if the rollout is stopped before there is one."""
        outcome = Outcome(self._question, self._reply, extract_answer(self._reply), ending.status)
        environment = self._environment
        return await self._run_user_code("the reward", environment.reward, outcome, environment.limits.tool_seconds)

    async def _run_user_code(
        self, what: str, work: Callable[[Argument], Awaitable[Result]], argument: Argument, seconds: float
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
            raise ToolError(
                f"{what} was cancelled" if task.done() else f"{what} gave no answer within {seconds:.3g} seconds"
            )
        except MemoryWalkerError:
            raise
        except Exception as error:  # noqa: BLE001  # a tool or reward may raise anything
            places = "".join(traceback.format_tb(error.__traceback__))
            _log.warning("%s failed in rollout %s with %s:\n%s", what, self._id, type(error).__name__, places)
            raise ToolError(f"{what} failed ({type(error).__name__})") from None
        finally:
            task.cancel()
            stopped.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    def _record(self, ending: Ending, reward: float | None) -> Record:
        context = self._context
        if context is None:  # the prompt could not be rendered, and a record holds at least one token
            context = Context(self._environment.chat, self._environment.chat.open_turn(), "")
        try:
            return context.record(self._meta(ending, reward))
        except RecordError as error:  # a bug of this package; the run continues without the tokens
            _log.exception("rollout %s cannot be recorded", self._id)
            empty = Context(self._environment.chat, self._environment.chat.open_turn(), "")
            self._turns, self._weight_version = [], None
            return empty.record(self._meta(Ending("failed", "error", str(error)), None))

    def _meta(self, ending: Ending, reward: float | None) -> Meta:
        report = RolloutReport(
            stop=ending.stop,
            error=ending.error,
            question=self._question.digest,
            seed=self._seed,
            calls=self._calls,
            call_errors=self._call_errors,
            turns=tuple(self._turns),
        )
        return Meta(
            id=self._id,
            harness=self._environment.name,
            group=self._question.id,
            reward=reward,
            status=ending.status,
            weight_version=self._weight_version,
            extra=report.to_json(),
        )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def rollout_seed(run_seed: int, id: str) -> int:
    """Return the seed of a rollout, independent of the order in which rollouts run."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{id}".encode(), digest_size=4).digest()) >> 1


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn. Engines take 31 bits."""
    return rollout_seed(seed, str(turn))
