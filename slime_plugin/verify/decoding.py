"""How long a decoding step of a running engine takes, with one short rollout."""

from __future__ import annotations

import statistics
import time

import aiohttp

from slime_plugin.rollout.engine.engine import EngineError

FEW, MANY = 8, 72
"""Sampled tokens of two requests. What else a request takes is the same in both."""
REPEATS = 3
TIMEOUT_S = 600.0


async def decoding_seconds(url: str) -> float:
    """Return the median over repetitions; the first one only warms up."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
        steps = []
        for _ in range(1 + REPEATS):
            few, many = await _seconds(http, url, FEW), await _seconds(http, url, MANY)
            steps.append((many - few) / (MANY - FEW))
    return statistics.median(steps[1:])


async def _seconds(http: aiohttp.ClientSession, url: str, tokens: int) -> float:
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    begin = time.perf_counter()
    body = {"input_ids": [1, 2, 3, 4], "sampling_params": sampling, "stream": False}
    try:
        async with http.post(f"{url}/generate", json=body) as response:
            text = await response.text()
    except (aiohttp.ClientError, OSError) as error:
        raise EngineError(f"the engine at {url} did not answer: {error}") from error
    if response.status != 200:
        raise EngineError(f"the engine at {url} refuses to sample {tokens} tokens: {response.status} {text:.300}")
    return time.perf_counter() - begin
