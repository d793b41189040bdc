"""What a server is told beside requests: other weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from slime_plugin.bridge.engine.base import EngineError

TIMEOUT = 1800.0
"""Seconds that loading weights may take."""


async def update_weights(url: str, model: Path, version: str) -> None:
    """From a folder that the server can read; or all servers, if it is a router.

    Turns asked for from now on are sampled with them, and say so; whatever was cached under others is dropped. No turn
    may be under way.
    """
    body = {"model_path": str(model.resolve()), "weight_version": version, "flush_cache": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as http:
        try:
            if await _update(http, url, body) == 404:  # a router, which passes nothing but turns on
                async with http.get(f"{url}/workers") as answer:
                    urls = [str(worker["url"]) for worker in (await answer.json())["workers"]]
                await asyncio.gather(*(_update(http, each, body) for each in urls))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise EngineError(f"the engine at {url} did not take the weights in {model}: {error}") from error


async def _update(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with http.post(f"{url}/update_weights_from_disk", json=body) as response:
        words = await response.text()
    if response.status not in (200, 404):
        raise EngineError(
            f"the engine at {url} refuses the weights in {body['model_path']}: {response.status} {words:.300}"
        )
    return response.status
