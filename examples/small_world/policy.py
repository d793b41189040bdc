"""The checkpoint as an engine in this process, for measuring without a server.

Turns that are asked for at the same time are decoded together. Each has its own random numbers, so that what is sampled
does not depend on its company, up to rounding.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.small_world.model import Cache, Weights, forward, logits_of
from slime_plugin.rollout.engine.engine import Generation, Request

PAUSE = 0.01
"""Seconds in which requests gather."""


@dataclass
class Waiting:
    request: Request
    answer: asyncio.Future[Generation]


class Policy:
    """Samples at a temperature; at 0 it takes the most likely token."""

    def __init__(self, weights: Weights, stop: int, temperature: float = 1.0, largest: int = 64) -> None:
        self._weights = weights
        self._stop = stop
        self._temperature = temperature
        self._largest = largest
        self._waiting: list[Waiting] = []

    async def generate(self, request: Request) -> Generation:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(PAUSE, self._decode_all)
        self._waiting.append(Waiting(request, loop.create_future()))
        return await self._waiting[-1].answer

    def _decode_all(self) -> None:
        waiting, self._waiting = sorted(self._waiting, key=lambda w: len(w.request.prompt)), []
        for start in range(0, len(waiting), self._largest):
            batch = waiting[start : start + self._largest]
            for one, generation in zip(batch, self.decode([w.request for w in batch]), strict=True):
                if not one.answer.done():  # cancelled
                    one.answer.set_result(generation)

    @torch.no_grad()
    def decode(self, requests: list[Request]) -> list[Generation]:
        """Rows are aligned at their ends, so that all grow by one token at a time."""
        lengths = torch.tensor([len(request.prompt) for request in requests])
        longest, most = int(lengths.max()), max(request.max_tokens for request in requests)
        tokens = torch.tensor([[0] * (longest - len(r.prompt)) + list(r.prompt) for r in requests])  # [B, T]
        draws = [torch.Generator().manual_seed(r.seed or 0) for r in requests]
        room = torch.tensor([request.max_tokens for request in requests])
        padding = longest - lengths  # [B]
        columns = torch.arange(longest + most)
        seen = columns[None, :] >= padding[:, None]  # [B, S]
        causal = columns[:longest, None] >= columns[None, :longest]
        mask = (seen[:, None, :longest] & causal) | torch.eye(longest, dtype=torch.bool)  # a row of padding sees itself
        positions = (columns[None, :longest] - padding[:, None]).clamp(min=0)
        hidden, cache = forward(self._weights, tokens, positions, mask[:, None])
        said: list[tuple[Tensor, Tensor]] = []
        done = torch.zeros(len(requests), dtype=torch.bool)
        for step in range(most):
            token, logprob = self._choose(hidden[:, -1], draws)
            said.append((token, logprob))
            done |= (token == self._stop) | (step + 1 >= room)
            if done.all():
                break
            hidden, cache = self._grow(token, lengths + step, seen[:, : longest + step + 1], cache)
        return [self._cut(request, row, said) for row, request in enumerate(requests)]

    def _grow(self, token: Tensor, position: Tensor, seen: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        return forward(self._weights, token[:, None], position[:, None], seen[:, None, None], cache)

    def _choose(self, hidden: Tensor, draws: list[torch.Generator]) -> tuple[Tensor, Tensor]:
        logits = logits_of(self._weights, hidden)  # [B, V]
        if self._temperature == 0:
            logprobs = torch.log_softmax(logits, dim=-1)
            token = logprobs.argmax(dim=-1)
        else:
            logprobs = torch.log_softmax(logits / self._temperature, dim=-1)
            waits = torch.stack([torch.empty(logits.shape[-1]).exponential_(generator=draw) for draw in draws])
            token = (logprobs - waits.log()).argmax(dim=-1)  # the first of exponential clocks to ring
        return token, logprobs.gather(-1, token[:, None])[:, 0]

    def _cut(self, request: Request, row: int, said: list[tuple[Tensor, Tensor]]) -> Generation:
        tokens = [int(token[row]) for token, _ in said][: request.max_tokens]
        finished = self._stop in tokens
        if finished:
            tokens = tokens[: tokens.index(self._stop) + 1]
        logprobs = tuple(float(logprob[row]) for _, logprob in said[: len(tokens)])
        return Generation(tuple(tokens), logprobs, "stop" if finished else "length")
