"""The client of the engine against servers on loopback that answer as SGLang does, well and badly, and against SGLang.

What SGLang answers was read from its source and tried: an abort is a 200 with what was sampled and ``finish_reason``
``abort``; what it refuses is a 400 with ``{"error": {"message": ...}}``; NaN is ``null``; its router knows no aborts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from slime_plugin.config import rollout as config
from slime_plugin.rollout import retry
from slime_plugin.rollout.engine import sglang_client
from slime_plugin.rollout.engine.engine import EngineError, Finish, Generation, RefusedError, Request
from slime_plugin.rollout.engine.sglang_client import SglangEngine
from slime_plugin.rollout.retry import MAX_BACKOFF_S, backoff_s
from slime_plugin.rollout.server import Server
from slime_plugin.rollout.server.ports import free_port
from tests.rollout.router import Router
from tests.rollout.services import Reply, breaks_off, hangs, resets, says

STOP = {"type": "stop", "matched": 9}
LENGTH = {"type": "length", "length": 3}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ASK = Request(prompt=[1, 2, 3], max_tokens=4, rollout="q1-0", seed=5)
LONG = 120.0
"""Seconds that no test waits for."""


def answer(tokens: Sequence[int] = (7, 8, 9), finish: Any = STOP, **meta: Any) -> dict[str, Any]:
    """Of SGLang, for a turn. Each token has a log-probability of its own."""
    pairs = [[-token / 8, token, None] for token in tokens]
    spans = [{"version": "3", "start": 0, "end": len(tokens)}]
    told = {"finish_reason": finish, "weight_version": "3", "weight_versions": spans, "output_token_logprobs": pairs}
    return {"text": "", "output_ids": list(tokens), "meta_info": {"id": "x", **told, **meta}}


GOOD = Generation((7, 8, 9), (-7 / 8, -1.0, -9 / 8), "stop", (("3", 3),))


@dataclass
class Fake:
    """Gives its replies to ``/generate`` in turn, the last one for ever."""

    replies: Sequence[Reply]
    misses: int = 0
    """Aborts that come before the request they are for: SGLang answers them, and does nothing."""
    deaf: bool = False
    """Aborts are not even answered."""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    aborted: dict[str, asyncio.Event] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    """Turns whose client hung up."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.aborted[body["rid"]] = asyncio.Event()
        try:
            return await self.replies[min(len(self.bodies), len(self.replies)) - 1](request)
        except asyncio.CancelledError:
            self.gone.append(body["rid"])
            raise

    async def abort(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json())["rid"]
        self.aborts.append(name)
        if self.deaf:
            await hangs(request)
        if len(self.aborts) > self.misses and name in self.aborted:
            self.aborted[name].set()
        return web.Response()


FAKE = web.AppKey("fake", Fake)


def until_aborted(*tokens: int) -> Reply:
    """Samples until it is aborted, and then says what there is."""

    async def reply(request: web.Request) -> web.StreamResponse:
        await request.app[FAKE].aborted[(await request.json())["rid"]].wait()
        return web.json_response(answer(tokens, ABORT))

    return reply


@asynccontextmanager
async def running(fake: Fake, port: int = 0) -> AsyncIterator[Fake]:
    app = web.Application()
    app[FAKE] = fake
    app.router.add_post("/generate", fake.generate)
    app.router.add_post("/abort_request", fake.abort)
    for path in ("/health", "/server_info", "/model_info"):
        app.router.add_get(path, says({"model_path": "m", "served_model_name": "m", "is_generation": True}))
    runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)  # to aiohttp 0 is for ever
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


def client(
    url: str, retries: int = 3, timeout: float = LONG, stop_ids: Sequence[int] = (9, 2), **sampling: Any
) -> SglangEngine:
    settings = config.EngineSettings(url=url, retries=retries, timeout=timeout, backoff=0.001)
    return SglangEngine(url, settings, config.Rollout(**sampling), frozenset(stop_ids))


async def ask(fake: Fake, request: Request = ASK, **settings: Any) -> Generation:
    async with running(fake), client(fake.url, **settings) as engine:
        return await engine.generate(request)


def refusal(fake: Fake, request: Request = ASK, **settings: Any) -> str:
    with pytest.raises(EngineError) as caught:
        asyncio.run(ask(fake, request, **settings))
    return str(caught.value)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_client, "ABORT_TIMEOUT_S", 0.2)


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger=sglang_client.__name__):
        yield caplog


# What is asked


def test_the_body_is_exactly_what_the_turn_needs() -> None:
    fake = Fake([says(answer())])
    assert asyncio.run(ask(fake, temperature=0.7, top_p=0.9, top_k=20)) == GOOD
    (body,) = fake.bodies
    assert len(body.pop("rid")) == 32
    sampling = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "stop_token_ids": [2, 9],
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "max_new_tokens": 4,
        "sampling_seed": 5,
    }
    assert body == {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True, "stream": False}


def test_without_a_seed_and_without_top_k() -> None:
    fake = Fake([says(answer())])
    asyncio.run(ask(fake, replace(ASK, seed=None, prompt=range(3))))
    assert fake.bodies[0]["input_ids"] == [0, 1, 2]
    assert fake.bodies[0]["sampling_params"]["sampling_seed"] is None
    assert fake.bodies[0]["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(("rollout", "header"), [("q7-3~1", "q7-3~1"), ("why?\r\né", "why%3F%0D%0A%C3%A9")])
def test_a_rollout_says_who_it_is(rollout: str, header: str) -> None:
    fake = Fake([says(answer())])
    asyncio.run(ask(fake, replace(ASK, rollout=rollout)))
    assert fake.headers[0]["X-SMG-Routing-Key"] == header


def test_a_request_names_its_rollout_by_the_old_name_too() -> None:
    with pytest.warns(FutureWarning, match=r"Request\.session is now Request\.rollout"):
        assert ASK.session == "q1-0"


# What is made of answers


@pytest.mark.parametrize(("reason", "finish"), [(STOP, "stop"), (LENGTH, "length"), (ABORT, "abort")])
def test_why_a_turn_ended(reason: Any, finish: Finish) -> None:
    """An abort that nobody here asked for too: a trainer pauses the engine like that."""
    fake = Fake([says(answer(finish=reason))])
    assert asyncio.run(ask(fake)) == Generation(GOOD.tokens, GOOD.logprobs, finish, GOOD.weights)
    assert len(fake.bodies) == 1
    assert fake.aborts == []


def test_an_abort_in_the_waiting_queue_has_no_tokens() -> None:
    queued = answer((), {"type": "abort", "message": "Abort in waiting queue"})
    generation = asyncio.run(ask(Fake([says(queued)])))
    assert (generation.tokens, generation.logprobs, generation.finish) == ((), (), "abort")


def test_weights_that_changed_in_the_middle() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    generation = asyncio.run(ask(Fake([says(answer(weight_versions=spans, weight_version="4"))])))
    assert generation.weights == (("3", 2), ("4", 1))
    assert generation.straddles
    assert not GOOD.straddles


def test_an_engine_that_tells_less_of_its_weights() -> None:
    one = asyncio.run(ask(Fake([says(answer(weight_versions=None))])))
    none = asyncio.run(ask(Fake([says(answer(weight_versions=None, weight_version=None))])))
    assert (one.weights, none.weights) == ((("3", 3),), ())


def test_a_log_probability_above_0_by_a_rounding_error_is_kept_as_it_is() -> None:
    rounded = answer((7,), output_token_logprobs=[[1.2e-7, 7, None]])
    assert asyncio.run(ask(Fake([says(rounded)]))).logprobs == (1.2e-7,)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (answer((1, 2, 3, 4, 5)), "5 tokens where at most 4 were requested"),
        (answer() | {"output_ids": [7, 8]}, "2 tokens and log-probabilities of 3 others"),
        (answer() | {"output_ids": [7, 8, 8]}, "3 tokens and log-probabilities of 3 others"),
        (answer() | {"output_ids": None}, "no ids and log-probabilities"),
        (answer(output_token_logprobs=None), "3 tokens and log-probabilities of 0 others"),
        (answer(output_token_logprobs=[]), "3 tokens and log-probabilities of 0 others"),
        (answer(output_token_logprobs=[[None, 7, None], [-1.0, 8, None], [-1.0, 9, None]]), "NoneType"),
        (
            answer(output_token_logprobs=[["nan", 7], [-1.0, 8], [-1.0, 9]]),
            "one (nan is not a log-probability; 1 of 3",
        ),
        (
            answer(output_token_logprobs=[[-1, 7], ["-inf", 8], [-1, 9]]),
            "one (-inf is not a log-probability; 1 of 3",
        ),
        (
            answer(output_token_logprobs=[[-1, 7], [-1, 8], [0.25, 9]]),
            "one (0.25 is not a log-probability; 1 of 3",
        ),
        (answer(output_token_logprobs=[7, 8, 9]), "no ids and log-probabilities"),
        (answer(output_token_logprobs={"7": -1.0}), "no ids and log-probabilities"),
        (answer(weight_versions=[{"version": "3", "start": 0, "end": 2}]), "3 tokens and the weight versions"),
        (answer(weight_versions=[{"version": "3"}]), "no ids and log-probabilities ('end')"),
        (answer(weight_versions=7), "no ids and log-probabilities"),
    ],
)
def test_an_answer_that_does_not_fit_together_is_not_recorded(bad: Any, words: str) -> None:
    """And not asked for again: it would be no better, and a turn that was sampled is not thrown away in silence."""
    fake = Fake([says(bad), says(answer())])
    error = refusal(fake)
    assert words in error
    assert "q1-0" in error
    assert fake.url in error
    assert len(fake.bodies) == 1


# What goes wrong and passes


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (says("Internal Server Error", 500), "500 Internal Server Error"),
        (says({"detail": "Request waiting timeout reached."}, 503), '503 {"detail": "Request waiting timeout'),
        (says("slow down", 429), "429 slow down"),
        (says("gateway", 502), "502 gateway"),
        (resets, "Server disconnected"),
        (breaks_off, "Response payload is not completed"),
        (says("<html>a proxy's page"), "the answer is not JSON: <html>a proxy's page"),
        (says(json.dumps(answer())[:-1]), "the answer is not JSON"),
        (says('{"meta_info": {"output_token_logprobs": [[NaN, 7, null]]}}'), "the answer is not JSON"),
        (says({"output_ids": [7]}), "the answer has no meta_info"),
        (says([answer()]), "the answer has no meta_info"),
        (says(answer((), STOP)), "0 tokens, though the turn finished with stop"),
        (says(answer((), LENGTH)), "0 tokens, though the turn finished with length"),
        (says(answer(finish=None)), "the turn finished with None"),
        (says(answer(finish={"type": "tired"})), "the turn finished with {'type': 'tired'}"),
        (says(answer(finish=ABORT | {"message": "Out of memory", "status_code": 500})), "500 Out of memory"),
    ],
)
def test_a_turn_without_an_answer_is_asked_for_again(bad: Reply, words: str, info: pytest.LogCaptureFixture) -> None:
    """Under another name, for the first may still be running; and its tokens come back once."""
    fake = Fake([bad, bad, says(answer())])
    assert asyncio.run(ask(fake)) == GOOD
    assert len({body.pop("rid") for body in fake.bodies}) == 3
    assert fake.bodies[0] == fake.bodies[1] == fake.bodies[2]
    assert f"turn of q1-0, attempt 2: {words}" in info.text


def test_an_engine_that_fails_for_ever() -> None:
    fake = Fake([says("first", 500), says("scheduler\n  died", 500)])
    error = refusal(fake, retries=2)
    assert f"the engine at {fake.url} did not answer a turn of q1-0 in 3 attempts; the last one: 500 sched" in error
    assert "500 scheduler died. See its log; engine.retries and engine.timeout" in error
    assert len(fake.bodies) == 3


def test_without_retries_it_is_asked_once() -> None:
    fake = Fake([says("no", 500)])
    assert "in 1 attempts" in refusal(fake, retries=0)
    assert len(fake.bodies) == 1


def test_nobody_is_there() -> None:
    async def run() -> None:
        url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        async with client(url) as engine:
            with pytest.raises(EngineError, match=f"{url} did not answer a turn of q1-0 in 4 attempts.*Cannot connect"):
                await engine.generate(ASK)
            with pytest.raises(EngineError, match=f"{url} does not answer.*memorywalker engine"):
                await engine.check()

    asyncio.run(run())


def test_an_engine_that_comes_back(info: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies in the middle of a turn, nobody listens for a while, and then another one does."""
    monkeypatch.setattr(retry, "MAX_BACKOFF_S", 0.01)

    async def run() -> None:
        before, after = Fake([hangs]), Fake([says(answer())])
        async with AsyncExitStack() as first:
            await first.enter_async_context(running(before))
            async with client(before.url, retries=100_000) as engine:
                turn = asyncio.create_task(engine.generate(ASK))
                await eventually(lambda: before.bodies)
                await first.aclose()
                await eventually(lambda: "Cannot connect" in info.text)
                async with running(after, int(before.url.rpartition(":")[2])):
                    assert await turn == GOOD
                    await engine.check()
        assert len(before.bodies) == len(after.bodies) == 1
        assert before.bodies[0]["rid"] != after.bodies[0]["rid"]

    asyncio.run(run())


def test_pauses_double_up_to_a_bound_and_are_jittered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [backoff_s(failures, 0.5, jitter=0.5) for failures in (1, 2, 3, 7, 5000)] == [0.5, 1.0, 2.0, 30.0, 30.0]
    assert (backoff_s(9, 0.5, jitter=0.0), backoff_s(9, 0.5, jitter=1.0)) == (MAX_BACKOFF_S / 2, MAX_BACKOFF_S * 1.5)
    jitters: list[float] = []

    def noted(failures: int, first: float, jitter: float) -> float:
        jitters.append(jitter)
        return 0.0

    monkeypatch.setattr(sglang_client, "backoff_s", noted)
    random.seed(1)
    state = random.getstate()
    refusal(Fake([says("no", 500)]), retries=20)
    assert len(jitters) == len(set(jitters)) == 20  # none after the last attempt
    assert random.getstate() == state


# What is refused


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (400, "The input (19999 tokens) is longer than the model's context length (4096 tokens).", RefusedError),
        (422, "input_ids", RefusedError),
        (404, "Not Found", EngineError),  # whatever it is, it is no engine
        (401, "Unauthorized", EngineError),
    ],
)
def test_a_refusal_is_final(status: int, words: str, kind: type[EngineError]) -> None:
    fake = Fake([says({"error": {"message": words}}, status), says(answer())])
    with pytest.raises(EngineError) as caught:
        asyncio.run(ask(fake, replace(ASK, prompt=[1] * 19999)))
    error = str(caught.value)
    assert type(caught.value) is kind
    assert f"refuses a turn of q1-0 of 19999 tokens and up to 4 more: {status}" in error
    assert words in error
    assert "lower rollout.context_tokens" in error
    assert len(fake.bodies) == 1


def test_a_refusal_inside_an_abort_is_final_too() -> None:
    """As SGLang says it when it streams."""
    reason = ABORT | {"message": "too long", "status_code": 400, "err_type": "BadRequestError"}
    assert "400 too long" in refusal(Fake([says(answer((7,), reason)), says(answer())]))


# Turns that are cut off


def test_out_of_time_the_turn_is_aborted_and_what_was_sampled_is_kept() -> None:
    fake = Fake([until_aborted(7, 8)])
    generation = asyncio.run(ask(fake, replace(ASK, timeout=0.05)))
    assert generation == Generation((7, 8), (-7 / 8, -1.0), "abort", (("3", 2),))
    assert set(fake.aborts) == {fake.bodies[0]["rid"]}
    assert len(fake.bodies) == 1


def test_a_turn_that_ends_while_it_is_being_aborted_is_whole() -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        await request.app[FAKE].aborted[(await request.json())["rid"]].wait()
        return web.json_response(answer())

    assert asyncio.run(ask(Fake([reply]), replace(ASK, timeout=0.05))) == GOOD


def test_the_engines_own_limit_keeps_what_was_sampled_too() -> None:
    for request in (ASK, replace(ASK, timeout=LONG)):
        assert asyncio.run(ask(Fake([until_aborted(7)]), request, timeout=0.05)).tokens == (7,)


def test_an_abort_that_overtakes_its_request_is_sent_again() -> None:
    fake = Fake([until_aborted(7)], misses=1)
    assert asyncio.run(ask(fake, replace(ASK, timeout=0.05))).tokens == (7,)
    assert len(fake.aborts) > 1
    assert set(fake.aborts) == {fake.bodies[0]["rid"]}


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("deaf", [False, True])
def test_out_of_time_with_an_engine_that_does_not_come_back(deaf: bool) -> None:
    """Of a rollout whose time is over, nothing more was sampled. The connection is closed: SGLang notices."""
    fake = Fake([hangs], deaf=deaf)

    async def run() -> None:
        async with running(fake), client(fake.url) as engine:
            assert await engine.generate(replace(ASK, timeout=0.3)) == Generation((), (), "abort")
            assert len(fake.bodies) == 1
            await eventually(lambda: fake.gone == [fake.bodies[0]["rid"]])

    asyncio.run(run())


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("timeout", [None, LONG])
def test_an_engine_that_is_silent_for_its_whole_time_has_failed(timeout: float | None) -> None:
    fake = Fake([hangs], deaf=True)
    error = refusal(fake, replace(ASK, timeout=timeout), timeout=0.3)
    assert "in 1 attempts; the last one: no answer within 0.3 seconds, nor to the abort" in error
    assert set(fake.aborts) == {fake.bodies[0]["rid"]}


def test_an_engine_that_was_down_when_the_time_was_over_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than the policy having been slow: the engine never answered."""
    monkeypatch.setattr(sglang_client, "backoff_s", lambda *_: LONG)
    error = refusal(Fake([says("starting", 503)]), replace(ASK, timeout=0.1))
    assert "in 1 attempts; the last one: 503 starting" in error


def test_stopped_while_it_samples() -> None:
    async def run() -> None:
        stop, fake = asyncio.Event(), Fake([until_aborted(7, 8)])
        async with running(fake), client(fake.url) as engine:
            turn = asyncio.create_task(engine.generate(replace(ASK, stop=stop)))
            await eventually(lambda: fake.bodies)
            assert not turn.done()
            stop.set()
            assert await turn == Generation((7, 8), (-7 / 8, -1.0), "abort", (("3", 2),))
        assert set(fake.aborts) == {fake.bodies[0]["rid"]}

    asyncio.run(run())


@pytest.mark.usefixtures("short_grace")
def test_stopped_with_an_engine_that_does_not_come_back() -> None:
    async def run() -> None:
        stop, fake = asyncio.Event(), Fake([hangs], deaf=True)
        stop.set()
        assert await ask(fake, replace(ASK, stop=stop), timeout=LONG) == Generation((), (), "abort")

    asyncio.run(run())


@pytest.mark.parametrize("retries", [0, 3])
def test_stopped_with_an_engine_that_dies_of_it(retries: int) -> None:
    async def run() -> None:
        async def reply(request: web.Request) -> web.StreamResponse:
            stop.set()
            await request.app[FAKE].aborted[(await request.json())["rid"]].wait()
            return await resets(request)

        stop = asyncio.Event()
        fake = Fake([reply])
        assert await ask(fake, replace(ASK, stop=stop), retries=retries) == Generation((), (), "abort")
        assert len(fake.bodies) == 1

    asyncio.run(run())


def test_stopped_between_two_attempts(info: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_client, "backoff_s", lambda *_: LONG)

    async def run() -> None:
        stop, fake = asyncio.Event(), Fake([says("no", 500)])
        async with running(fake), client(fake.url) as engine:
            turn = asyncio.create_task(engine.generate(replace(ASK, stop=stop)))
            await eventually(lambda: "attempt 1" in info.text)
            stop.set()
            assert await turn == Generation((), (), "abort")
        assert len(fake.bodies) == 1
        assert fake.aborts == []

    asyncio.run(run())


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.usefixtures("short_grace")
def test_cancelling_aborts_the_turn(deaf: bool) -> None:
    async def run() -> None:
        fake = Fake([hangs], deaf=deaf)
        async with running(fake), client(fake.url) as engine:
            turn = asyncio.create_task(engine.generate(ASK))
            await eventually(lambda: fake.bodies)
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            assert fake.aborts == [fake.bodies[0]["rid"]]
            await eventually(lambda: fake.gone == fake.aborts)

    asyncio.run(run())


def test_cancelling_while_it_is_being_aborted() -> None:
    async def run() -> None:
        fake = Fake([hangs], deaf=True)
        async with running(fake), client(fake.url) as engine:
            turn = asyncio.create_task(engine.generate(replace(ASK, timeout=0.01)))
            await eventually(lambda: fake.aborts)
            turn.cancel()
            await eventually(lambda: len(fake.aborts) == 2)
            turn.cancel()  # whoever insists does not wait for the engine
            with pytest.raises(asyncio.CancelledError):
                await turn

    asyncio.run(run())


def test_turns_do_not_wait_for_each_other() -> None:
    """More at once than HTTP clients open connections by default."""

    async def run() -> None:
        everybody = asyncio.Event()

        async def reply(request: web.Request) -> web.StreamResponse:
            if len(fake.bodies) == 150:
                everybody.set()
            await everybody.wait()
            first = (await request.json())["input_ids"][0]
            return web.json_response(answer((first,), LENGTH))

        fake = Fake([reply])
        async with running(fake), client(fake.url) as engine:
            turns = (engine.generate(replace(ASK, prompt=[i], rollout=f"q{i}")) for i in range(150))
            assert [turn.tokens for turn in await asyncio.gather(*turns)] == [(i,) for i in range(150)]

    asyncio.run(run())


def test_an_engine_has_to_be_entered() -> None:
    with pytest.raises(RuntimeError, match="async with SglangEngine"):
        asyncio.run(client("http://127.0.0.1:1").generate(ASK))


def test_an_engine_that_is_ill() -> None:
    async def run() -> None:
        app = web.Application()
        app.router.add_get("/health", says("", 503))
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with client(url) as engine:
                with pytest.raises(EngineError, match=f"{url} answers 503; start one with memorywalker engine"):
                    await engine.check()
        finally:
            await runner.cleanup()

    asyncio.run(run())


# With SGLang itself


@asynccontextmanager
async def routed(*urls: str) -> AsyncIterator[str]:
    router = Router(urls)
    await asyncio.to_thread(router.__enter__)
    try:
        yield router.url
    finally:
        await asyncio.to_thread(router.__exit__, None, None, None)


def test_an_abort_reaches_a_server_behind_the_real_router() -> None:
    """Which passes turns on, with all that was asked, but no aborts."""

    async def run() -> None:
        one, other = Fake([until_aborted(7)]), Fake([until_aborted(8)])
        async with running(one), running(other), routed(one.url, other.url) as url, client(url, top_k=20) as engine:
            asked = [replace(ASK, rollout=f"s{i}", timeout=0.2) for i in range(4)]
            turns = await asyncio.gather(*map(engine.generate, asked))
            assert sorted(turn.tokens for turn in turns) == [(7,), (7,), (8,), (8,)]
            assert {turn.finish for turn in turns} == {"abort"}
        sampling = one.bodies[0]["sampling_params"]
        assert (sampling["sampling_seed"], sampling["no_stop_trim"], sampling["top_k"]) == (5, True, 20)
        assert {body["rid"] for body in one.bodies} <= set(one.aborts)

    asyncio.run(run())


def test_a_router_without_servers_cannot_abort_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither can something that is no router at all."""
    monkeypatch.setattr(sglang_client, "ABORT_TIMEOUT_S", 0.2)

    async def run() -> None:
        lists: list[Any] = [{"workers": []}, {}, [], "no JSON"]
        for workers in lists:
            app = web.Application()
            app.router.add_post("/generate", hangs)
            app.router.add_get("/workers", says(workers))
            runner = web.AppRunner(app, shutdown_timeout=0.01)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            try:
                async with client(f"http://127.0.0.1:{runner.addresses[0][1]}") as engine:
                    assert await engine.generate(replace(ASK, timeout=0.01)) == Generation((), (), "abort")
            finally:
                await runner.cleanup()

    asyncio.run(run())


def test_turns_of_the_real_engine(server: Server) -> None:
    async def run() -> None:
        async with client(server.url, retries=0, stop_ids=()) as engine:
            await engine.check()
            seedless = await engine.generate(replace(ASK, seed=None, max_tokens=1))
            assert len(seedless.tokens) == 1
            assert -math.inf < seedless.logprobs[0] <= 0

            stop = asyncio.Event()
            turn = asyncio.create_task(engine.generate(replace(ASK, max_tokens=1000, stop=stop)))
            await asyncio.wait([turn], timeout=0.5)
            stop.set()
            stopped, late = await turn, await engine.generate(replace(ASK, max_tokens=1000, timeout=0.3))
            for cut in (stopped, late):
                assert cut.finish == "abort"
                assert [count for _, count in cut.weights] == [len(cut.tokens)]
                whole = await engine.generate(replace(ASK, max_tokens=len(cut.tokens) or 1))
                assert whole.tokens[: len(cut.tokens)] == cut.tokens
                assert whole.finish == "length"

            with pytest.raises(RefusedError, match=r"of 9000 tokens and up to 4 more: 400 .*longer than the model's"):
                await engine.generate(replace(ASK, prompt=[1] * 9000))

    asyncio.run(run())
