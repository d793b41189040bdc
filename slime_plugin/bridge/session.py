"""One rollout: the policy thinks, calls tools and answers, while an editor rewrites its context.

A session always ends in a record. Whatever goes wrong on the way is a status and a reason in it, and every token that
was sampled until then is in it, once:

* ``completed``: the policy called no tool, so it is done (``answer``, or ``no answer`` if it gave none);
* ``truncated``: a limit ended it (``turns``, ``turn tokens``, ``sampled tokens``, ``context``, ``time``);
* ``aborted``: it was stopped from outside (``stopped``), or the engine dropped it (``engine``);
* ``failed``: the engine is gone (``engine``) or refuses a turn (``refused``), or the editor or the reward failed
  (``error``); the meta data say why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from slime_plugin.bridge.calls import BadCall, Call, parse_calls, spoken, unknown_tool, wrong_arguments
from slime_plugin.bridge.chat.base import encodable
from slime_plugin.bridge.context import Context, Segment
from slime_plugin.bridge.engine.base import Engine, EngineError, Generation, RefusedError, Request
from slime_plugin.bridge.messages import Message, Question
from slime_plugin.bridge.reward import Outcome, extract_answer
from slime_plugin.bridge.tools.base import Schema, ToolError
from slime_plugin.errors import MemoryWalkerError, RecordError
from slime_plugin.record import Meta, Record

if TYPE_CHECKING:
    from slime_plugin.bridge.harness import Harness  # which begins sessions

Argument = TypeVar("Argument")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a rollout is over."""

    status: str
    stop: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    segment: Segment
    generation: Generation
    asked: bool
    """By the editor, for a summary or the like: not a turn of the policy's own."""

    def to_json(self) -> dict[str, Any]:
        turn: dict[str, Any] = {"span": list(self.segment.sampled or ()), "finish": self.generation.finish}
        if self.asked:
            turn["asked"] = True
        if self.generation.straddles:
            turn["straddles"] = [list(part) for part in self.generation.weights]
        return turn


class Session:
    """One rollout of one question."""

    def __init__(self, harness: Harness, engine: Engine, question: Question, id: str, seed: int | None = None) -> None:
        self._harness = harness
        self._engine = engine
        self._question = question
        self._id = id
        self._seed = seed
        self._stopped = asyncio.Event()
        self._deadline = float("inf")
        self._ending: Ending | None = None
        self._turns: list[_Turn] = []
        self._reply = ""  # what the policy said last, if that still counts
        self._calls = self._call_errors = 0
        self._context: Context | None = None

    @property
    def turns(self) -> int:
        """How often the policy was asked, summaries included."""
        return len(self._turns)

    def stop(self) -> None:
        """End soon, as aborted, with what there is. May be called at any time, any number of times."""
        self._stopped.set()

    async def run(self) -> Record:
        """The record of the rollout. Raises nothing but cancellation."""
        if self._harness.limits.seconds is not None:
            self._deadline = self._now() + self._harness.limits.seconds
        reward = None
        try:
            self._begin()
            ending = await self._loop()
            if ending.status in ("completed", "truncated"):
                reward = await self._reward(ending)
                ending = ending if reward is not None else Ending("aborted", "stopped")
        except MemoryWalkerError as error:
            _log.warning("rollout %s failed: %s", self._id, error)
            stop = (
                "refused"
                if isinstance(error, RefusedError)
                else "engine"
                if isinstance(error, EngineError)
                else "error"
            )
            ending = Ending("failed", stop, str(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            ending = Ending("failed", "error", "something that the rollout waited for was cancelled")
        except Exception as error:  # noqa: BLE001  # a bad rollout is data: its record says why, and the run goes on
            _log.exception("rollout %s failed", self._id)
            ending = Ending("failed", "error", f"{type(error).__name__}: {error}")
        return self._record(ending, reward)

    def _begin(self) -> None:
        harness, limits = self._harness, self._harness.limits
        self._editor = harness.editor()
        self._actions = {action.schema.name: action for action in self._editor.actions()}
        schemas = [tool.schema for tool in harness.tools.values()] + [a.schema for a in self._actions.values()]
        self._schemas: dict[str, Schema] = {schema.name: schema for schema in schemas}
        prompt = harness.chat.prompt(limits.system, self._question.text, schemas if limits.describe_tools else ())
        self._context = Context(harness.chat, prompt, self._question.text)

    @property
    def _live(self) -> Context:
        assert self._context is not None  # the first thing that a session makes
        return self._context

    async def _loop(self) -> Ending:
        limits, context, editor = self._harness.limits, self._live, self._editor
        for left in reversed(range(limits.turns)):
            if left == 0:
                editor.before_answer(context, None)
            await editor.before_turn(context, self._ask)
            turn = await self._sample(limits.turn_tokens) if self._ending is None else None
            if turn is not None:
                self._reply = spoken(turn.text)
            if turn is None or self._ending is not None:
                break
            calls = parse_calls(self._reply)
            if not calls:
                answered = extract_answer(self._reply) is not None
                if self._turns[-1].generation.finish == "length" and not answered:
                    return Ending("truncated", "turn tokens")
                if left and editor.before_answer(context, turn):
                    self._reply = ""
                    continue
                return Ending("completed", "answer" if answered else "no answer")
            for call in calls if left else ():  # nobody would see what the calls of the last turn give
                if not self._stopped.is_set():
                    await self._carry_out(call)
        return self._ending or Ending("truncated", "turns")

    async def _ask(self, message: Message, max_tokens: int) -> Segment | None:
        asked = self._live.append(message)
        answer = await self._sample(max_tokens, asked=True)
        if answer is None:
            self._live.take_back(asked)
        return answer if self._ending is None else None

    async def _sample(self, max_tokens: int, *, asked: bool = False) -> Segment | None:
        """What the policy says next. Sets the ending if it may say no more."""
        limits = self._harness.limits
        prompt = self._live.prompt()
        rooms = {"context": limits.context_tokens - len(prompt), "turn tokens": max_tokens}
        if limits.sampled_tokens is not None:
            rooms["sampled tokens"] = limits.sampled_tokens - sum(len(turn.generation.tokens) for turn in self._turns)
        tightest = min(rooms, key=lambda name: rooms[name])
        time_left = self._deadline - self._now()
        if self._stopped.is_set():
            self._ending = Ending("aborted", "stopped")
            return None
        if rooms[tightest] < 1 or time_left <= 0:
            self._ending = Ending("truncated", tightest if rooms[tightest] < 1 else "time")
            return None
        timeout = None if time_left == float("inf") else time_left
        seed = None if self._seed is None else turn_seed(self._seed, self.turns)
        request = Request(prompt, rooms[tightest], self._id, seed, timeout, self._stopped)
        generation = await self._engine.generate(request)
        if not generation.tokens and generation.finish != "abort":
            raise EngineError(f"0 tokens for a turn of {self._id}, though it finished with {generation.finish}")
        segment = None
        if generation.tokens:
            segment = self._live.append_turn(generation)
            self._turns.append(_Turn(segment, generation, asked))
        if generation.finish == "abort":
            late = self._now() >= self._deadline and not self._stopped.is_set()
            aborted = Ending("aborted", "stopped" if self._stopped.is_set() else "engine")
            self._ending = Ending("truncated", "time") if late else aborted
        elif generation.finish == "length" and len(generation.tokens) < rooms[tightest]:
            self._ending = Ending("truncated", "context")  # the engine holds less than we would
        elif generation.finish == "length" and tightest != "turn tokens":
            self._ending = Ending("truncated", tightest)
        return segment

    async def _carry_out(self, call: Call | BadCall) -> None:
        """Answer a call. A call that cannot be carried out is answered too."""
        self._calls += 1
        name = call.name if isinstance(call, Call) else None
        try:
            text = await self._answer(call)
        except ToolError as error:
            self._call_errors += 1
            text = f"Error: {error}"
        if text is None:
            return
        text, longest = encodable(text), self._harness.limits.result_tokens
        if len(text.encode()) >= longest:  # a token is at least a byte, so that most results need no counting
            text = self._harness.chat.cut(text, longest)
        self._live.append(Message("tool", text, name, note=name in self._actions))

    async def _answer(self, call: Call | BadCall) -> str | None:
        """The text of the result; None if there is none to show."""
        if isinstance(call, BadCall):
            raise ToolError(call.reason)
        if call.name not in self._schemas:
            raise ToolError(unknown_tool(call.name, list(self._schemas)))
        wrong = wrong_arguments(self._schemas[call.name], call.arguments)
        if wrong:
            raise ToolError(wrong)
        if call.name in self._actions:
            return self._actions[call.name].run(self._live, call.arguments) or None
        seconds = min(self._harness.limits.tool_seconds, max(0.0, self._deadline - self._now()))
        result: object = await self._foreign(call.name, self._harness.tools[call.name], call.arguments, seconds)
        if not isinstance(result, str) and not self._stopped.is_set():
            raise ToolError(f"{call.name} gave a {type(result).__name__} instead of a text")
        return result if isinstance(result, str) else None

    async def _reward(self, ending: Ending) -> float | None:
        """None if the session is stopped before there is one."""
        outcome = Outcome(self._question, self._reply, extract_answer(self._reply), ending.status)
        return await self._foreign("the reward", self._harness.reward, outcome, self._harness.limits.tool_seconds)

    async def _foreign(
        self, what: str, work: Callable[[Argument], Awaitable[Result]], argument: Argument, seconds: float
    ) -> Result | None:
        """What somebody else's program gives, or None if the session is stopped before that.

        Its failure is a :class:`ToolError`. Of what it raises only the type is told: the words may hold a key.
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
        except Exception as error:  # noqa: BLE001  # whatever it is, it is not the rollout's fault
            places = "".join(traceback.format_tb(error.__traceback__))
            _log.warning("%s failed in rollout %s with %s:\n%s", what, self._id, type(error).__name__, places)
            raise ToolError(f"{what} failed ({type(error).__name__})") from None
        finally:
            task.cancel()
            stopped.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    def _record(self, ending: Ending, reward: float | None) -> Record:
        context = self._context
        if context is None:  # not even the prompt could be rendered, and a record holds at least a token
            context = Context(self._harness.chat, self._harness.chat.open_turn(), "")
        try:
            return context.record(self._meta(ending, reward))
        except RecordError as error:  # a mistake of ours; the run goes on without what cannot be trained on
            _log.exception("rollout %s cannot be recorded", self._id)
            empty = Context(self._harness.chat, self._harness.chat.open_turn(), "")
            self._turns.clear()
            return empty.record(self._meta(Ending("failed", "error", str(error)), None))

    def _meta(self, ending: Ending, reward: float | None) -> Meta:
        extra: dict[str, Any] = {
            "stop": ending.stop,
            "question": self._question.digest,
            "seed": self._seed,
            "calls": self._calls,
            "call_errors": self._call_errors,
            "turns": [turn.to_json() for turn in self._turns],
        }
        if ending.error is not None:
            extra["error"] = ending.error
        versions = [version for turn in self._turns for version, _ in turn.generation.weights]
        return Meta(
            id=self._id,
            harness=self._harness.name,
            group=self._question.id,
            reward=reward,
            status=ending.status,
            weight_version=versions[-1] if versions else None,
            extra=extra,
        )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def session_seed(run_seed: int, id: str) -> int:
    """A seed for each session of a run, independent of the order in which they run."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{id}".encode(), digest_size=4).digest()) >> 1


def turn_seed(seed: int, turn: int) -> int:
    """A seed for each turn of a session. Engines take 31 bits."""
    return session_seed(seed, str(turn))
