"""Engines whose words are given: what clients do with an answer depends on what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_plugin.rollout.chat import Chat
from slime_plugin.rollout.engine.engine import EngineError, Generation, Request

Say = Callable[[Request], str | None]


def spell(text: str = "", calls: Sequence[tuple[str, Mapping[str, Any] | str]] = (), thought: str | None = None) -> str:
    """A turn as Qwen writes it."""
    said = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    said += text
    for name, arguments in calls:
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        said += f'\n<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {raw}}}\n</tool_call>'
    return said


def sampled(chat: Chat, text: str) -> tuple[int, ...]:
    """The ids of a turn that says this, its stop token included."""
    whole = chat.reply(text)
    first = len(chat.open_turn())
    stop = next(i for i in range(first, len(whole)) if whole[i] in chat.stop_ids)
    return tuple(whole[first : stop + 1])


class Scripted:
    """Says what it is told to. None is an engine that is gone; ``HANG`` one that is cut off after three tokens."""

    HANG = "hang"

    def __init__(self, chat: Chat, say: Say) -> None:
        self.chat, self.say = chat, say
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self.say(request)
        if text is None:
            raise EngineError("the engine is away")
        if text == self.HANG:
            assert request.stop is not None
            await request.stop.wait()
            return self._generation(sampled(self.chat, "one two three")[:3], "abort")
        tokens = sampled(self.chat, text)
        if len(tokens) > request.max_tokens:
            return self._generation(tokens[: request.max_tokens], "length")
        return self._generation(tokens, "stop")

    def _generation(self, tokens: tuple[int, ...], finish: Any) -> Generation:
        logprobs = tuple(-(token % 97 + 1) / 100 for token in tokens)  # they tell tokens apart
        return Generation(tokens, logprobs, finish, (("7", len(tokens)),))
