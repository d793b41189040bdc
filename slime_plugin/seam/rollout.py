"""The rollout side: a sample of slime's becomes a rollout of the bridge, and its record rides on the sample.

One rollout is one sample, whatever its number of contexts; it becomes rows only when a batch is converted. So slime
counts rollouts where it counts samples.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from slime_plugin.bridge.engine.sglang import SglangEngine
from slime_plugin.bridge.harness import Running, Surroundings
from slime_plugin.bridge.messages import Question
from slime_plugin.bridge.session import session_seed
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.methods.credit import LEFT_OUT
from slime_plugin.record import Record
from slime_plugin.seam.args import cell_of
from slime_plugin.tap.run import open_surroundings

RECORD = "memorywalker_record"
"""Key of the record in a sample's metadata."""
NUMBER = "sample"
"""Key of the sample's number in a record's meta data."""
DISCARDED = "discarded"
"""Key of how many tokens were sampled in attempts that were aborted before this one, in a record's meta data."""
WATCH = 0.5
"""Seconds between two looks at whether slime wants its rollouts to end."""


class Sample(Protocol):
    """What is used of slime's sample."""

    index: int | None
    group_index: int | None
    prompt: Any
    label: Any
    tokens: list[int]
    response: str
    response_length: int
    loss_mask: list[int] | None
    rollout_log_probs: list[float] | None
    reward: Any
    remove_sample: bool
    weight_versions: list[str]
    status: Any
    metadata: dict[str, Any]


class Sessions:
    """The harness of a cell and the ways to its engine, opened once per process and event loop."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._opened: tuple[Surroundings, Mapping[bool, SglangEngine]] | None = None
        self._live: set[Running] = set()
        self._watch: asyncio.Task[None] | None = None

    async def generate(self, sample: Sample, evaluation: bool) -> Sample:
        """The sample, with a rollout in it. One that slime aborted before begins anew, and what it had is counted."""
        harness, engines = await self._open()
        question = question_of(sample)
        before = sample.metadata.get(RECORD)
        discarded = before.meta.extra.get(DISCARDED, 0) + int(before.generated.sum()) if before is not None else 0
        id = str(sample.metadata.get("rollout_name") or f"{question.id}-{sample.index}")
        seed = session_seed(harness.limits.seed, f"evaluation {id}" if evaluation else id)
        session = harness.begin(engines[evaluation], question, id, seed)
        self._live.add(session)
        try:
            record = await session.run()
        finally:
            self._live.discard(session)
        put_record(sample, numbered(record, sample, discarded))
        sample.response = harness.chat.text(sample.tokens[len(sample.tokens) - sample.response_length :])
        if sample.reward is None:
            sample.reward = reward_of(sample)  # slime's statistics want a number, whatever became of the rollout
        return sample

    async def close(self) -> None:
        """Let go of connections and servers. A process that ends does so anyway."""
        _OPEN.pop(asyncio.get_running_loop(), None)
        if self._watch is not None:
            self._watch.cancel()
        await self._stack.aclose()

    async def _open(self) -> tuple[Surroundings, Mapping[bool, SglangEngine]]:
        async with self._opening:
            if self._opened is None:
                cell = cell_of(self._args)
                url = f"http://{self._args.sglang_router_ip}:{self._args.sglang_router_port}"
                harness = await self._stack.enter_async_context(open_surroundings(cell))
                evaluation = cell.rollout.model_copy(
                    update={key: getattr(cell.evaluation, key) for key in ("temperature", "top_p", "top_k")}
                )
                engines = {
                    evaluating: await self._stack.enter_async_context(
                        SglangEngine(url, cell.engine, sampling, harness.chat.stop_ids)
                    )
                    for evaluating, sampling in ((False, cell.rollout), (True, evaluation))
                }
                self._opened = harness, engines
                self._watch = asyncio.create_task(self._end_when_slime_does())
            return self._opened

    async def _end_when_slime_does(self) -> None:
        """slime aborts what its engines are sampling and waits for its rollouts. One that is busy with a tool would not
        notice, and go on for as many turns as it likes."""
        while True:
            await asyncio.sleep(WATCH)
            if aborted_by_slime(self._args):
                for session in self._live:
                    session.stop()


def aborted_by_slime(args: Namespace) -> bool:
    """Whether slime, if that is what runs here, has enough rollouts."""
    module = sys.modules.get("slime.rollout.sglang_rollout")
    return False if module is None else bool(module.GenerateState(args).aborted)


_OPEN: dict[asyncio.AbstractEventLoop, Sessions] = {}


def sessions_of(args: Namespace) -> Sessions:
    """Those of the running event loop: connections belong to the loop that opened them."""
    loop = asyncio.get_running_loop()
    if loop not in _OPEN:
        _OPEN[loop] = Sessions(args)
    return _OPEN[loop]


def rollout_output(groups: list[list[Sample]]) -> Any:
    """Groups as slime's rollout functions give them, with metrics that others may add to."""
    module = sys.modules.get("slime.rollout.base_types")
    return groups if module is None else module.RolloutFnTrainOutput(samples=groups, metrics={})


def question_of(sample: Sample) -> Question:
    """The question of a data set's line: its text is the prompt, its answers the label."""
    if not isinstance(sample.prompt, str):
        raise MemoryWalkerError(
            f"sample {sample.index}: its prompt is a {type(sample.prompt).__name__}, not a text; the harness renders "
            "the chat itself, so leave slime's --apply-chat-template out"
        )
    answers = [sample.label] if isinstance(sample.label, str) else sample.label
    if not isinstance(answers, list | tuple) or not answers:
        raise MemoryWalkerError(
            f"sample {sample.index}: its label is {sample.label!r:.40}, not a list of answers; name their key with "
            "slime's --label-key"
        )
    question = Question("", sample.prompt, tuple(map(str, answers)))
    group = question.digest if sample.group_index is None else sample.group_index  # evaluations have none
    return replace(question, id=str(sample.metadata.get("id", group)))


def put_record(sample: Sample, record: Record) -> None:
    """Fill a sample from its record: the record itself, and for slime's own statistics its last context."""
    view = record.view_positions(-1)
    sampled = record.generated[view]
    first = int(np.argmax(sampled)) if sampled.any() else len(view)
    sample.metadata = {**sample.metadata, RECORD: record}
    sample.tokens = record.tokens[view].tolist()
    sample.response_length = len(view) - first
    sample.loss_mask = sampled[first:].astype(int).tolist()
    sample.rollout_log_probs = np.nan_to_num(record.logprobs[view][first:]).tolist()
    sample.reward = record.meta.reward
    sample.status = sample.Status(record.meta.status)  # type: ignore[attr-defined]  # an enumeration inside the class
    if record.meta.weight_version is not None:
        sample.weight_versions = [str(record.meta.weight_version)]


def numbered(record: Record, sample: Sample, discarded: int = 0) -> Record:
    """The record with the number of its sample, by which a batch can be put in order again."""
    extra = {**record.meta.extra, NUMBER: sample.index, **({DISCARDED: discarded} if discarded else {})}
    return replace(record, meta=replace(record.meta, extra=extra))


def record_of(sample: Sample) -> Record:
    record = sample.metadata.get(RECORD)
    if not isinstance(record, Record):
        raise MemoryWalkerError(
            f"sample {sample.index}: it has no record; set --custom-generate-function-path to "
            "slime_plugin.hooks.rollout.generate"
        )
    return record


def reward_of(sample: Sample) -> float:
    """What the harness judged. A rollout that ended without a judgement is left out when its batch is converted; slime
    wants a number all the same."""
    record = record_of(sample)
    if record.meta.reward is None and record.meta.status not in LEFT_OUT:
        raise MemoryWalkerError(f"{record.label}: status {record.meta.status} but no reward")
    return float(record.meta.reward or 0.0)
