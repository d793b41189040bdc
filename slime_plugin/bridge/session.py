"""One rollout: the policy thinks, calls tools and answers, while an editor rewrites its context.

A session always ends in a record. Whatever goes wrong on the way is a status and a reason in it, and every token that
was sampled until then is in it, once:

* ``completed``: the policy called no tool, so it is done (``answer``, or ``no answer`` if it gave none);
* ``truncated``: a limit ended it (``turns``, ``turn tokens``, ``sampled tokens``, ``context``, ``time``);
* ``aborted``: it was stopped from outside (``stopped``), or the engine dropped it (``engine``);
* ``failed``: the engine, the editor or the reward gave up, and ``error`` says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from slime_plugin.bridge.calls import BadCall, Call, parse_calls, unknown_tool, wrong_arguments
from slime_plugin.bridge.context import Context, Segment
from slime_plugin.bridge.engine.base import Engine, EngineError, Generation, Request
from slime_plugin.bridge.harness import Harness
from slime_plugin.bridge.messages import Message, Question
from slime_plugin.bridge.reward import Outcome, extract_answer
from slime_plugin.bridge.tools.base import Schema, Tool, ToolError
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.record import Meta, Record

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a rollout is over."""

    status: str
    stop: str
    error: str | None = None


class Session:
    """One rollout of one question."""

    def __init__(self, harness: Harness, engine: Engine, question: Question, id: str, seed: int | None = None) -> None:
        self._harness = harness
        self._engine = engine
        self._question = question
        self._id = id
        self._seed = seed
        self._editor = harness.editor()
        self._actions = {action.schema.name: action for action in self._editor.actions()}
        schemas = [tool.schema for tool in harness.tools.values()] + [a.schema for a in self._actions.values()]
        self._schemas: dict[str, Schema] = {schema.name: schema for schema in schemas}
        limits = harness.limits
        prompt = harness.chat.prompt(limits.system, question.text, schemas if limits.describe_tools else ())
        self.context = Context(harness.chat, prompt, question.text)
        self._stopped = asyncio.Event()
        self._deadline = float("inf")
        self._ending: Ending | None = None
        self._generations: list[tuple[Segment, Generation]] = []
        self._calls = self._call_errors = 0
        self.sampled_tokens = 0

    @property
    def turns(self) -> int:
        """How often the policy was asked, summaries included."""
        return len(self._generations)

    def stop(self) -> None:
        """End soon, as aborted, with what there is. May be called at any time, any number of times."""
        self._stopped.set()

    async def run(self) -> Record:
        """The record of the rollout. Raises nothing but cancellation."""
        if self._harness.limits.seconds is not None:
            self._deadline = asyncio.get_running_loop().time() + self._harness.limits.seconds
        reward = None
        try:
            ending = await self._turns()
            if ending.status in ("completed", "truncated"):
                reward = await self._reward(ending)
        except MemoryWalkerError as error:
            ending = Ending("failed", "engine" if isinstance(error, EngineError) else "error", str(error))
        except Exception as error:  # noqa: BLE001  # a bad rollout is data: the record says why, and the run goes on
            _log.exception("rollout %s failed", self._id)
            ending = Ending("failed", "error", f"{type(error).__name__}: {error}")
        return self.context.record(self._meta(ending, reward))

    async def _turns(self) -> Ending:
        limits, context, editor = self._harness.limits, self.context, self._editor
        for left in reversed(range(limits.turns)):
            if left == 0:
                editor.before_answer(context, None)
            await editor.before_turn(context, self._ask)
            turn = await self._sample(limits.turn_tokens) if self._ending is None else None
            if turn is None or self._ending is not None:
                break
            calls = parse_calls(turn.text)
            if not calls:
                if self._generations[-1][1].finish == "length" and extract_answer(turn.text) is None:
                    return Ending("truncated", "turn tokens")
                if left and editor.before_answer(context, turn):
                    continue
                return Ending("completed", "no answer" if extract_answer(turn.text) is None else "answer")
            for call in calls:
                await self._carry_out(call)
        return self._ending or Ending("truncated", "turns")

    async def _ask(self, message: Message, max_tokens: int) -> Segment | None:
        asked = self.context.append(message)
        answer = await self._sample(max_tokens)
        if answer is None:
            self.context.take_back(asked)
        return answer if self._ending is None else None

    async def _sample(self, max_tokens: int) -> Segment | None:
        """What the policy says next. Sets the ending if it may say no more."""
        limits = self._harness.limits
        prompt = self.context.prompt()
        rooms = {"context": limits.context_tokens - len(prompt), "turn tokens": max_tokens}
        if limits.sampled_tokens is not None:
            rooms["sampled tokens"] = limits.sampled_tokens - self.sampled_tokens
        tightest = min(rooms, key=lambda name: rooms[name])
        time_left = self._deadline - asyncio.get_running_loop().time()
        if rooms[tightest] < 1 or time_left <= 0:
            self._ending = Ending("truncated", tightest if rooms[tightest] < 1 else "time")
            return None
        if self._stopped.is_set():
            self._ending = Ending("aborted", "stopped")
            return None
        timeout = None if time_left == float("inf") else time_left
        seed = None if self._seed is None else turn_seed(self._seed, self.turns)
        request = Request(prompt, rooms[tightest], self._id, seed, timeout, self._stopped)
        generation = await self._engine.generate(request)
        segment = None
        if generation.tokens:
            segment = self.context.append_turn(generation)
            self._generations.append((segment, generation))
            self.sampled_tokens += len(generation.tokens)
        if generation.finish == "abort":
            late = asyncio.get_running_loop().time() >= self._deadline
            aborted = Ending("aborted", "stopped" if self._stopped.is_set() else "engine")
            self._ending = Ending("truncated", "time") if late else aborted
        elif generation.finish == "length" and tightest != "turn tokens":
            self._ending = Ending("truncated", tightest)
        return segment

    async def _carry_out(self, call: Call | BadCall) -> None:
        """Answer a call. A call that cannot be carried out is answered too."""
        self._calls += 1
        try:
            text = await self._answer(call)
        except ToolError as error:
            self._call_errors += 1
            text = f"Error: {error}"
        if text is not None:
            name = call.name if isinstance(call, Call) else None
            longest = self._harness.limits.result_tokens
            if len(text.encode()) >= longest:  # a token is at least a byte, so that most results need no counting
                text = self._harness.chat.cut(text, longest)
            self.context.append(Message("tool", text, name))

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
            return self._actions[call.name].run(self.context, call.arguments) or None
        return await self._call_tool(self._harness.tools[call.name], call)

    async def _call_tool(self, tool: Tool, call: Call) -> str | None:
        seconds = min(self._harness.limits.tool_seconds, max(0.0, self._deadline - asyncio.get_running_loop().time()))
        try:
            async with asyncio.timeout(seconds):
                return await self._unless_stopped(tool(call.arguments))
        except TimeoutError:
            raise ToolError(f"{call.name} gave no answer within {seconds:.3g} seconds") from None
        except ToolError:
            raise
        except Exception as error:  # a tool is somebody's program; its failure is the policy's to handle
            _log.warning("tool %s failed in rollout %s", call.name, self._id, exc_info=True)
            raise ToolError(f"{call.name} failed ({type(error).__name__})") from error

    async def _unless_stopped(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """What the work gives, or None if the session is stopped before that."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stopped.cancel()

    async def _reward(self, ending: Ending) -> float:
        reply = self._generations[-1][0].text if self._generations else ""
        return await self._harness.reward(Outcome(self._question, reply, extract_answer(reply), ending.status))

    def _meta(self, ending: Ending, reward: float | None) -> Meta:
        turns: list[dict[str, Any]] = []
        for segment, generation in self._generations:
            turn: dict[str, Any] = {"span": list(segment.sampled or ()), "finish": generation.finish}
            if generation.straddles:
                turn["straddles"] = [list(part) for part in generation.weights]
            turns.append(turn)
        calls = {"calls": self._calls, "call_errors": self._call_errors}
        extra: dict[str, Any] = {"stop": ending.stop, "seed": self._seed, **calls, "turns": turns}
        if ending.error is not None:
            extra["error"] = ending.error
        versions = [version for _, generation in self._generations for version, _ in generation.weights]
        return Meta(
            id=self._id,
            harness=self._harness.name,
            group=self._question.id,
            reward=reward,
            status=ending.status,
            weight_version=versions[-1] if versions else None,
            extra=extra,
        )


def session_seed(run_seed: int, id: str) -> int:
    """A seed for each session of a run, independent of the order in which they run."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{id}".encode(), digest_size=4).digest()) >> 1


def turn_seed(seed: int, turn: int) -> int:
    """A seed for each turn of a session. Engines take 31 bits."""
    return session_seed(seed, str(turn))
