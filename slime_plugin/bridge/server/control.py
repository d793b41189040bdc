"""What a server is told beside requests: other weights."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from slime_plugin.bridge.engine.base import EngineError

TIMEOUT = 1800.0
"""Seconds that loading weights may take."""


async def update_weights(url: str, model: Path, version: str) -> None:
    """From a folder that the server can read. Turns asked for from now on are sampled with them, and say so; whatever
    was cached under others is dropped. None may be under way."""
    body = {"model_path": str(model.resolve()), "weight_version": version, "flush_cache": True}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as http,
            http.post(f"{url}/update_weights_from_disk", json=body) as response,
        ):
            answer = await response.text()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EngineError(f"the engine at {url} did not take the weights in {model}: {error}") from error
    if response.status != 200:
        raise EngineError(f"the engine at {url} refuses the weights in {model}: {response.status} {answer:.300}")
