"""What the tap adds to a request on a real engine: asked through the tap, and asked directly, in turns.

    python -m benchmarks.tap_engine [--steps 30] [--json FILE]

Two conversations of about 30,000 tokens grow side by side on one SGLang server, by a passage of 100 tokens and 8
sampled ones a step. One is a client of the tap, in OpenAI's wire_format; the other sends its token ids straight to the
engine. Both are timed from the first byte of the request to the last of the answer; who goes first alternates.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from benchmarks.tap import CONTEXT, VOCABULARY, Library, percentiles, row, train_tokenizer
from examples import make_model
from slime_plugin.config.rollout import EngineSettings, Rollout
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.engine.sglang_client import SglangEngine
from slime_plugin.rollout.messages import Message
from slime_plugin.rollout.server import Flags, Server
from slime_plugin.tap.limits import ServerSettings
from slime_plugin.tap.server import TapServer
from slime_plugin.tap.tap import Tap

NEW, SAMPLED = 100, 8
"""Tokens of a step."""
WARM = 5
"""Steps that are not counted."""


def serve(pipe: Connection, folder: Path, engine: str) -> None:
    """In a process of its own, until the pipe says something."""
    asyncio.run(_serve(pipe, folder, engine))


async def _serve(pipe: Connection, folder: Path, url: str) -> None:
    chat, limits = ChatML.load(folder), Rollout(turns=10**6, context_tokens=10**6)
    tap = Tap(chat, limits, folder / "logs", model="policy")
    async with (
        SglangEngine(url, EngineSettings(), limits, chat.stop_ids) as engine,
        TapServer(tap, ServerSettings()) as server,
    ):
        _, token = tap.open("measured", engine, seed=7)
        pipe.send((server.port, token))
        await asyncio.to_thread(pipe.recv)
        assert not tap.sessions[0].contexts.unmatched_replies()


@contextmanager
def tap_of(folder: Path, engine: str) -> Iterator[tuple[int, str]]:
    """Its port, and a token."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, folder, engine))
    process.start()
    try:
        yield ours.recv()
        ours.send(None)
        process.join()
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


class Wire:
    """A server, and how long each request to it took. Each has a connection of its own: the engine closes idle ones."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.seconds: list[float] = []

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        data = orjson.dumps(body)
        begun = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("POST", path, data, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        raw = response.read()
        self.seconds.append(time.perf_counter() - begun)
        connection.close()
        assert response.status == 200, raw
        return orjson.loads(raw)


class Direct:
    """Token ids, straight to the engine."""

    def __init__(self, wire: Wire, chat: ChatML, library: Library) -> None:
        self.wire, self._chat, self._library = wire, chat, library
        self._ids = chat.render(Message("user", library.passage(CONTEXT)))

    def step(self) -> None:
        body = {
            "input_ids": [*self._ids, *self._chat.open_turn()],
            "sampling_params": {"max_new_tokens": SAMPLED, "temperature": 1.0},
            "return_logprob": True,
        }
        answer = self.wire.post("/generate", body)
        sampled = [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]]
        self._ids += [*self._chat.open_turn(), *sampled, *self._chat.close_turn(sampled)]
        self._ids += self._chat.render(Message("user", self._library.passage(NEW)))


class Tapped:
    """A client of the tap."""

    def __init__(self, wire: Wire, token: str, library: Library) -> None:
        self.wire, self._token, self._library = wire, token, library
        self._messages = [{"role": "user", "content": library.passage(CONTEXT)}]
        self.tokens: list[int] = []
        """Of the prompts."""

    def step(self) -> None:
        body = {"model": "policy", "messages": self._messages, "max_tokens": SAMPLED}
        answer = self.wire.post("/v1/chat/completions", body, authorization=f"Bearer {self._token}")
        self.tokens.append(answer["usage"]["prompt_tokens"])
        said = answer["choices"][0]["message"]["content"]
        self._messages += [{"role": "assistant", "content": said}]
        self._messages += [{"role": "user", "content": self._library.passage(NEW)}]


def measure(folder: Path, server: Server, steps: int) -> dict[str, Any]:
    chat, library = ChatML.load(folder), Library(folder)
    port = urlsplit(server.url).port
    assert port is not None
    with tap_of(folder, server.url) as (tap_port, token):
        direct, tapped = Direct(Wire(port), chat, library), Tapped(Wire(tap_port), token, library)
        for step in range(WARM + steps):
            for one in (direct, tapped)[:: 1 if step % 2 else -1]:
                one.step()
    through, straight = tapped.wire.seconds[WARM:], direct.wire.seconds[WARM:]
    added = [one - other for one, other in zip(through, straight, strict=True)]
    told = {"through": percentiles(through), "direct": percentiles(straight), "added": percentiles(added)}
    sizes = f"{tapped.tokens[WARM]:,} to {tapped.tokens[-1]:,} tokens"
    print(f"\n{steps} requests each at {sizes}; ms   median      p90      p99")
    for what, key in (("through the tap", "through"), ("straight to the engine", "direct"), ("difference", "added")):
        print(row(what, told[key]))
    medians = (statistics.median(through) - statistics.median(straight)) * 1e3
    print(f"  difference of the medians: {medians:.2f} ms")
    return {**told, "difference_of_medians": medians, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(folder)
        make_model.CONFIG |= {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "max_position_embeddings": 131072}
        make_model.main(folder)
        with Server(Flags(folder, "cpu", max_total_tokens=131072)) as server:
            told = measure(folder, server, options.steps)
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
