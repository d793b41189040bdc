"""An update on the longest row that the cell allows: whether its loss is finite, and what memory it takes.

The row has as many tokens as ``memorywalker plan`` reckons with; on a CPU, where that would take minutes, it is cut.
The optimizer is left out: its memory does not depend on the row. Contexts of the rollout share a prompt and no more,
which makes a tree exactly as long as the tape.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from slime_plugin.methods import Computed, method_of
from slime_plugin.planner.job import GPUS, estimated_workload
from slime_plugin.planner.memory import rank_memory
from slime_plugin.planner.plan import plan_job
from slime_plugin.record import Edit, Meta, Record
from slime_plugin.train.attention.flash import flash_kernel
from slime_plugin.train.pipeline import wrap_for_training
from slime_plugin.verify import world
from slime_plugin.verify.measurement import Measurement
from slime_plugin.verify.model import update
from slime_plugin.verify.settings import Verification

PROMPT = 4
"""A prompt is one part in so many of a context."""
GB = 1e9
_INFINITE = (
    "the weights or a kernel overflow: look whether the head and model checks pass, and train in bfloat16, not float16"
)
_MEMORY = (
    "set method.budget below this row, trainer.recompute=true, or split the model further (trainer.tp); "
    "memorywalker plan shows what takes the memory"
)
_RETRIES = "memory is nearly used up, and every retry stops the GPU: as above, or leave engines less (engine_memory)"


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one rank."""

    loss: float
    peak: int
    """Bytes: allocated on the GPU, or resident on the host."""
    planned: int = 0
    """Bytes that the plan expects to be allocated on a GPU."""
    retries: int = 0
    """Of torch's allocator."""


def check(verification: Verification) -> Iterator[Measurement]:
    tokens = longest_row(verification)
    found = world.run_on_ranks(verification.parallel.ranks, measure, verification)
    finite = all(math.isfinite(usage.loss) for usage in found)
    what = f"loss of a row of {tokens:,} tokens"
    shown = ", ".join(sorted({f"{usage.loss:.3g}" for usage in found}))
    yield Measurement(what, finite, shown, "finite", "" if finite else _INFINITE)
    peak, planned = max(usage.peak for usage in found) / GB, found[0].planned / GB
    if verification.device == "cpu":
        yield Measurement("memory of the fullest rank", True, f"{peak:.3g} GB", value=peak)
        return
    yield Measurement.at_most("memory of the fullest rank", peak, planned, _MEMORY, "GB")
    retries = max(usage.retries for usage in found)
    yield Measurement.at_most("retries of the allocator", retries, 0.0, _RETRIES)


def longest_row(verification: Verification) -> int:
    """Return the tokens of the row."""
    cell = verification.cell
    workload = estimated_workload(cell.harness)
    longest = method_of(cell.method).cost(workload, cell.rollout.context_tokens).longest
    most = verification.size(longest, 8192) if verification.device == "cuda" else verification.size(4096, 512)
    return min(longest, most)


def planned_bytes(verification: Verification, rows: Computed | None = None, rollouts: int = 0) -> int:
    """Return what the plan expects of a rank, without its optimizer and what torch does not allocate: in a step of the
    cell, or with such rows of so many rollouts. Gradients are bfloat16 here and float32 under slime."""
    gpu = replace(GPUS["a100"], flash=flash_kernel().version)  # nothing else of a GPU decides its memory
    job = plan_job(verification.one_replica(), gpu).job
    if rows is not None:
        trainer = job.cell.trainer.model_copy(update={"prompts": 1, "steps": 1})
        limits = job.cell.rollout.model_copy(update={"samples": rollouts * job.replicas})
        job = replace(job, rows=rows, cell=job.cell.model_copy(update={"trainer": trainer, "rollout": limits}))
    rank = rank_memory(job)
    return rank.total - rank.optimizer - rank.reserve - rank.gradients // 2


def measure(verification: Verification) -> Usage:
    rank = world.open_rank(verification)
    rank.models = wrap_for_training(rank.models[0].config, rank.models, rank.groups)
    tokens = longest_row(verification)
    record = branching_record(tokens, min(tokens, verification.positions), verification.architecture.vocabulary)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    loss = update(verification, rank, [record], verification.cell.method)
    if torch.cuda.is_available():
        stats = torch.cuda.memory_stats()
        peak = torch.cuda.max_memory_allocated()
        return Usage(loss, peak, planned_bytes(verification), int(stats["num_alloc_retries"]))
    return Usage(loss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def branching_record(tokens: int, context: int, vocabulary: int) -> Record:
    """A rollout of ``tokens`` tokens in contexts of at most ``context``, each of which keeps the prompt alone."""
    prompt = max(1, context // PROMPT)
    starts = range(prompt, tokens, max(1, context - prompt))
    views = [[(0, prompt), (start, min(tokens, start + context - prompt))] for start in starts]
    views[0] = [(0, views[0][1][1])]
    generated = np.arange(tokens) >= prompt
    return Record(
        tokens=np.random.default_rng(0).integers(0, vocabulary, tokens).tolist(),
        generated=generated,
        logprobs=np.where(generated, -1.0, np.nan),
        views=views,
        edits=[Edit("fold", "policy")] * (len(views) - 1),
        meta=Meta(id="longest", group=0, reward=1.0),
    )
