"""Update the weights of a running server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from slime_plugin.rollout.engine.engine import EngineError
from slime_plugin.rollout.engine.sglang_client import worker_urls

TIMEOUT_S = 1800.0
"""For loading weights."""


async def update_weights(url: str, model: Path, version: str) -> None:
    """Load weights from a folder that the server can read; on a router, into all of its servers.

    Later turns are sampled with them and report ``version``; the prefix cache is dropped. No request may be running.
    """
    body = {"model_path": str(model.resolve()), "weight_version": version, "flush_cache": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http:
        try:
            if await _update(http, url, body) == 404:  # a router
                urls = await worker_urls(http, url, TIMEOUT_S)
                await asyncio.gather(*(_update(http, each, body) for each in urls))
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"the engine at {url} did not take the weights in {model}: {error}") from error


async def _update(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with http.post(f"{url}/update_weights_from_disk", json=body) as response:
        text = await response.text()
    if response.status not in (200, 404):
        raise EngineError(
            f"the engine at {url} refuses the weights in {body['model_path']}: {response.status} {text:.300}"
        )
    return response.status
