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
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_plugin.record import Record, RolloutReport, TurnReport
from slime_plugin.rollout.base_rollout import STOPPED, BaseRollout, Ending
from slime_plugin.rollout.chat.chat import encodable
from slime_plugin.rollout.context import Context, Segment
from slime_plugin.rollout.engine.engine import Engine, EngineError, Generation, Request
from slime_plugin.rollout.messages import Message, Question, split_thought
from slime_plugin.rollout.reward import extract_answer
from slime_plugin.rollout.tool_calls import BadCall, Call, parse_calls, unknown_tool, wrong_arguments
from slime_plugin.rollout.tools.tool import ErrorKind, Schema, ToolError

if TYPE_CHECKING:
    from slime_plugin.rollout.environment import EditorEnvironment  # it imports this module


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A turn, if any token was sampled, and why the rollout is over, if it is."""

    turn: Segment | None
    ending: Ending | None


class EditorRollout(BaseRollout["EditorEnvironment"]):
    """One rollout of one question, with an editor."""

    def __init__(
        self, environment: EditorEnvironment, engine: Engine, question: Question, id: str, seed: int | None = None
    ) -> None:
        super().__init__(environment, question, id, seed)
        self._engine = engine
        self._deadline = math.inf
        self._turns: list[TurnReport] = []
        self._calls = 0
        self._call_errors: Counter[str] = Counter()
        self._context: Context | None = None

    @property
    def turns(self) -> int:
        """Turns sampled so far, summaries included."""
        return len(self._turns)

    async def _run(self) -> Ending:
        environment, limits = self._environment, self._environment.limits
        if limits.seconds is not None:
            self._deadline = self._now() + limits.seconds
        self._editor = environment.editor()
        self._actions = {action.schema.name: action for action in self._editor.actions()}
        schemas = [tool.schema for tool in environment.tools.values()] + [a.schema for a in self._actions.values()]
        self._schemas: dict[str, Schema] = {schema.name: schema for schema in schemas}
        prompt = environment.chat.prompt(limits.system, self._question.text, schemas if limits.describe_tools else ())
        self._context = Context(environment.chat, prompt, self._question.text)
        return await self._loop()

    @property
    def _live(self) -> Context:
        assert self._context is not None  # created by _run
        return self._context

    async def _loop(self) -> Ending:
        limits, context, editor = self._environment.limits, self._live, self._editor
        for turns_left in reversed(range(limits.turns)):
            if turns_left == 0:
                editor.before_answer(context, None)
            ending = await self._before_turn()
            if ending is not None:
                return ending
            sampled = await self._sample(limits.turn_tokens)
            if sampled.turn is not None:
                self._reply = split_thought(sampled.turn.text)[1]
            if sampled.ending is not None:
                return sampled.ending
            calls = parse_calls(self._reply)
            if not calls:
                answered = extract_answer(self._reply) is not None
                if self._turns[-1].finish == "length" and not answered:
                    return Ending("truncated", "turn tokens")
                if turns_left and editor.before_answer(context, sampled.turn):
                    self._reply = ""  # the policy has to answer again
                    continue
                return Ending("completed", "answer" if answered else "no answer")
            for call in calls if turns_left else ():  # the policy would not see results of the last turn's calls
                if not self._stopped.is_set() and self._seconds_left > 0:
                    await self._execute(call)
        return Ending("truncated", "turns")

    async def _before_turn(self) -> Ending | None:
        """Let the editor edit. Return why the rollout is over, if that happened while the editor asked the policy."""
        ending: Ending | None = None

        async def ask(message: Message, max_tokens: int) -> Segment | None:
            nonlocal ending
            if ending is not None:
                return None
            request = self._live.append(message)
            sampled = await self._sample(max_tokens, asked=True)
            ending = sampled.ending
            if sampled.turn is None:
                self._live.take_back(request)
            return sampled.turn if ending is None else None

        await self._editor.before_turn(self._live, ask)
        return ending

    async def _sample(self, max_tokens: int, *, asked: bool = False) -> _Sampled:
        limits = self._environment.limits
        prompt = self._live.prompt()
        budgets = {"context": limits.context_tokens - len(prompt), "turn tokens": max_tokens}
        if limits.sampled_tokens is not None:
            budgets["sampled tokens"] = limits.sampled_tokens - self._sampled_tokens
        limit = min(budgets, key=lambda name: budgets[name])
        time_left = self._seconds_left
        if self._stopped.is_set():
            return _Sampled(None, STOPPED)
        if budgets[limit] < 1 or time_left <= 0:
            return _Sampled(None, Ending("truncated", limit if budgets[limit] < 1 else "time"))
        timeout = None if time_left == math.inf else time_left
        seed = None if self._seed is None else turn_seed(self._seed, self.turns)
        generation = await self._engine.generate(
            Request(prompt, budgets[limit], self._id, seed, timeout, self._stopped)
        )
        if not generation.tokens and generation.finish != "abort":
            raise EngineError(f"0 tokens for a turn of {self._id}, though it finished with {generation.finish}")
        turn = self._append(generation, asked) if generation.tokens else None
        return _Sampled(turn, self._ending_after(generation, limit, budgets[limit]))

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
                return STOPPED
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
            self._call_errors[error.kind] += 1
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
            raise ToolError(call.reason, "malformed")
        if call.name not in self._schemas:
            raise ToolError(unknown_tool(call.name, list(self._schemas)), "unknown tool")
        wrong = wrong_arguments(self._schemas[call.name], call.arguments)
        if wrong:
            raise ToolError(wrong, "arguments")
        if call.name in self._actions:
            return self._actions[call.name].run(self._live, call.arguments) or None
        tool, limit, left = (
            self._environment.tools[call.name],
            self._environment.limits.tool_seconds,
            self._seconds_left,
        )
        late: ErrorKind = "timeout" if limit <= left else "out of time"
        result: object = await self._run_user_code(call.name, tool, call.arguments, min(limit, left), late)
        if not isinstance(result, str) and not self._stopped.is_set():
            raise ToolError(f"{call.name} returned {type(result).__name__}, not a string", "crashed")
        return result if isinstance(result, str) else None

    def _recorded(self, ending: Ending, reward: float | None) -> Record | None:
        if self._context is None:  # the prompt could not be rendered
            return None
        report = RolloutReport(
            calls=self._calls,
            call_errors=self._call_errors.total(),
            error_kinds=self._call_errors,
            turns=tuple(self._turns),
        )
        return self._context.record(self._meta(ending, reward, report))

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - self._now())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def rollout_seed(run_seed: int, id: str) -> int:
    """Return the seed of a rollout, independent of the order in which rollouts run."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{id}".encode(), digest_size=4).digest()) >> 1


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn. Engines take 31 bits."""
    return rollout_seed(seed, str(turn))
