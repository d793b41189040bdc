"""Run rollouts of slime's samples in the environment of the cell. A sample carries the record of its rollout.

A rollout is one sample, whatever its number of contexts, and becomes rows only when a batch is converted. So slime
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

from slime_plugin.environments import open_environment
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.record import Record, RolloutReport
from slime_plugin.rollout.engine.sglang_client import SglangEngine
from slime_plugin.rollout.environment import RolloutEnvironment, RolloutHandle
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.turn_loop import rollout_seed
from slime_plugin.slime.args import cell_of

RECORD = "memorywalker_record"
"""Key of the record in a sample's metadata."""
ABORT_POLL_S = 0.5
"""Between two checks whether slime has aborted its rollouts."""


class Sample(Protocol):
    """The fields of slime's sample that are used here."""

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


class RolloutService:
    """The environment of a cell and the clients of its engine, opened once per process and event loop."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._opened: tuple[RolloutEnvironment, Mapping[bool, SglangEngine]] | None = None
        self._live: set[RolloutHandle] = set()
        self._watch: asyncio.Task[None] | None = None

    async def generate(self, sample: Sample, evaluation: bool) -> Sample:
        """Run the rollout of a sample. One that slime aborted before starts again; its sampled tokens are counted."""
        environment, engines = await self._open()
        question = question_of(sample)
        before = sample.metadata.get(RECORD)
        discarded = 0 if before is None else (before.meta.report.discarded or 0) + int(before.generated.sum())
        id = str(sample.metadata.get("rollout_name") or f"{question.id}-{sample.index}")
        seed = rollout_seed(environment.limits.seed, f"evaluation {id}" if evaluation else id)
        rollout = environment.begin(engines[evaluation], question, id, seed)
        self._live.add(rollout)
        try:
            record = await rollout.run()
        finally:
            self._live.discard(rollout)
        put_record(sample, numbered(record, sample, discarded))
        sample.response = environment.chat.text(sample.tokens[len(sample.tokens) - sample.response_length :])
        if sample.reward is None:
            sample.reward = reward_of(sample)  # slime's statistics need a number for every status
        return sample

    async def close(self) -> None:
        """Close connections and servers."""
        _OPEN.pop(asyncio.get_running_loop(), None)
        if self._watch is not None:
            self._watch.cancel()
        await self._stack.aclose()

    async def _open(self) -> tuple[RolloutEnvironment, Mapping[bool, SglangEngine]]:
        async with self._opening:
            if self._opened is None:
                cell = cell_of(self._args)
                url = f"http://{self._args.sglang_router_ip}:{self._args.sglang_router_port}"
                environment = await self._stack.enter_async_context(open_environment(cell))
                evaluation = cell.rollout.model_copy(
                    update={key: getattr(cell.evaluation, key) for key in ("temperature", "top_p", "top_k")}
                )
                engines = {
                    evaluating: await self._stack.enter_async_context(
                        SglangEngine(url, cell.engine, sampling, environment.chat.stop_ids)
                    )
                    for evaluating, sampling in ((False, cell.rollout), (True, evaluation))
                }
                self._opened = environment, engines
                self._watch = asyncio.create_task(self._stop_with_slime())
            return self._opened

    async def _stop_with_slime(self) -> None:
        """Stop all live rollouts once slime aborts: one that waits for a tool does not see engine requests aborted."""
        while True:
            await asyncio.sleep(ABORT_POLL_S)
            if aborted_by_slime(self._args):
                for rollout in self._live:
                    rollout.stop()


def aborted_by_slime(args: Namespace) -> bool:
    """Whether slime runs here and has aborted its rollouts."""
    module = sys.modules.get("slime.rollout.sglang_rollout")
    return False if module is None else bool(module.GenerateState(args).aborted)


_OPEN: dict[asyncio.AbstractEventLoop, RolloutService] = {}


def rollout_service(args: Namespace) -> RolloutService:
    """Return the service of the running event loop: connections belong to the loop that opened them."""
    loop = asyncio.get_running_loop()
    if loop not in _OPEN:
        _OPEN[loop] = RolloutService(args)
    return _OPEN[loop]


def rollout_output(groups: list[list[Sample]]) -> Any:
    """Return groups as slime's rollout functions do."""
    module = sys.modules.get("slime.rollout.base_types")
    return groups if module is None else module.RolloutFnTrainOutput(samples=groups, metrics={})


def question_of(sample: Sample) -> Question:
    """Return the question of a sample: its prompt is the text, its label the answers."""
    if not isinstance(sample.prompt, str):
        raise MemoryWalkerError(
            f"sample {sample.index}: its prompt is a {type(sample.prompt).__name__}, not a string; the harness "
            "renders the chat itself, so leave slime's --apply-chat-template out"
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
    """Return the record with the number of its sample, which restores the order of a batch."""
    report = RolloutReport(sample=sample.index, discarded=discarded or None)
    return record.with_meta(record.meta.with_report(report))


def record_of(sample: Sample) -> Record:
    record = sample.metadata.get(RECORD)
    if not isinstance(record, Record):
        raise MemoryWalkerError(
            f"sample {sample.index}: it has no record; set --custom-generate-function-path to "
            "slime_plugin.hooks.rollout.generate"
        )
    return record


def reward_of(sample: Sample) -> float:
    """Return the reward of the record; 0 for an excluded rollout, because slime needs a number."""
    record = record_of(sample)
    if record.meta.reward is None and not record.meta.excluded:
        raise MemoryWalkerError(f"{record.label}: status {record.meta.status} but no reward")
    return float(record.meta.reward or 0.0)
