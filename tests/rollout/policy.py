"""A policy that follows a script, and writes down every context at the moment it samples."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from examples.small_world.tokenizer import build
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.reward import ExactMatch
from slime_plugin.config.rollout import Rollout
from slime_plugin.record import Record
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.editors import Editor, editor_factory
from slime_plugin.rollout.engine.engine import Finish, Generation, Request
from slime_plugin.rollout.environment import EditorEnvironment
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.reward import build_reward
from slime_plugin.rollout.tools.tool import Parameter, Schema
from slime_plugin.rollout.turn_loop import EditorRollout

END = "<|im_end|>"
QUESTION = Question("q1", "What is it?", ("blue",))
ANSWER = "<answer>blue</answer>"
CHAT = ChatML(build())


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def encode(text: str) -> tuple[int, ...]:
    """Ids of what a policy says, control tokens included."""
    return tuple(build().encode(text, add_special_tokens=False).ids)


def decode(ids: Iterable[int]) -> str:
    return str(build().decode(list(ids), skip_special_tokens=False))


@dataclass
class Scripted:
    """Says the next line of its script, or what a function of the prompt's text gives."""

    script: list[str] | Callable[[str], str]
    seen: list[tuple[list[int], Generation]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> Generation:
        await asyncio.sleep(0)
        self.requests.append(request)
        said = self.script.pop(0) if isinstance(self.script, list) else self.script(decode(request.prompt))
        tokens = encode(said + END)
        finish: Finish = "stop"
        if len(tokens) > request.max_tokens:
            tokens, finish = tokens[: request.max_tokens], "length"
        # Any number will do, if each token has its own.
        logprobs = tuple(-(zlib.crc32(repr((len(self.seen), i)).encode()) % 1000) / 500 for i in range(len(tokens)))
        generation = Generation(tokens, logprobs, finish, (("7", len(tokens)),))
        self.seen.append((list(request.prompt), generation))
        return generation


class Lookup:
    """A tool that knows some things by heart."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self.known = known
        self.schema = Schema("search", "Look something up.", {"query": Parameter("string")})

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        await asyncio.sleep(0)
        return self.known.get(arguments["query"], f"nothing about {arguments['query']}")


def begin(
    engine: Any,
    harness: Mapping[str, Any] | Callable[[], Editor[Any]],
    tools: Iterable[Any] = (),
    question: Question = QUESTION,
    **limits: Any,
) -> EditorRollout:
    """A rollout of a scripted policy with the small world's tokenizer."""
    if callable(harness):
        name, editor = "test", harness
    else:
        cell = parse_config({"harness": harness}, Cell, "test")
        name, editor = cell.harness.type, editor_factory(cell.harness)
    settings = parse_config({"system": "append", "describe_tools": False, **limits}, Rollout, "test")
    offered = {tool.schema.name: tool for tool in [Lookup({}), *tools]}
    shared = EditorEnvironment(name, editor, offered, CHAT, build_reward(ExactMatch()), settings)
    return EditorRollout(shared, engine, question, "q1-0", seed=3)


def check_conditioning(record: Record, engine: Scripted) -> None:
    """Every sampled token stands in the record once, behind exactly what the policy saw when it sampled it."""
    expected = [
        ([*prompt, *generation.tokens[:i]], token, logprob)
        for prompt, generation in engine.seen
        for i, (token, logprob) in enumerate(zip(generation.tokens, generation.logprobs, strict=True))
    ]
    tokens = record.tokens.tolist()
    contexts = [[p for start, stop in view for p in range(start, stop)] for view in record.views]
    found = []
    for position in range(len(record)):
        if record.generated[position]:
            context = next(context for context in contexts if position in context)
            before = context[: context.index(position)]
            found.append(([tokens[p] for p in before], tokens[position], float(record.logprobs[position])))
    assert [(before, token) for before, token, _ in found] == [(before, token) for before, token, _ in expected]
    for (_, _, logged), (_, _, logprob) in zip(found, expected, strict=True):
        assert abs(logged - logprob) < 1e-6


def rolled_out(engine: Scripted, harness: Any, tools: Iterable[Any] = (), **limits: Any) -> Record:
    """The record of a whole rollout, checked."""
    record = asyncio.run(begin(engine, harness, tools, **limits).run())
    check_conditioning(record, engine)
    return record
