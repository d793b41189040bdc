"""Why a cell cannot run under slime, found before a job is submitted: each reason with its key and a remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import NO_MODEL, NO_QUESTIONS, Cell
from slime_plugin.errors import ConfigError, refuse
from slime_plugin.needs import rollout_problems
from slime_plugin.slime.refusals import lost_on_resume, nearest_divisors, settings_problems


def check_job(cell: Cell, where: str, missing: Iterable[str] = ()) -> None:
    """Raise :class:`ConfigError` with all problems of a cell, and what is missing; ``where`` names its file."""
    refuse(f"{where}: {problem}" for problem in (*job_problems(cell), *missing))


def job_problems(cell: Cell) -> Iterator[str]:
    """Wrong settings, the same on any machine."""
    if cell.model is None:
        yield NO_MODEL
        return
    try:
        architecture = Architecture.of(cell.model)
    except ConfigError as error:
        yield f"model: {error}"
        return
    yield from settings_problems(cell, architecture)
    yield from _local_only(cell)
    if cell.trainer.lr_warmup >= cell.trainer.total_steps:
        yield (
            f"trainer.lr_warmup: {cell.trainer.lr_warmup} of {cell.trainer.total_steps} update steps; it has to end "
            "before the job does"
        )
    yield from _uneven_replicas(cell)
    if architecture.vocabulary % cell.trainer.tp:
        yield (
            f"trainer.tp: {cell.trainer.tp} ranks do not divide the vocabulary of {architecture.vocabulary}; slime "
            "would count padding columns as tokens; choose a divisor"
        )
    if architecture.groups % cell.cluster.engine_gpus and cell.cluster.engine_gpus % architecture.groups:
        yield (
            f"cluster.engine_gpus: {cell.cluster.engine_gpus} GPUs and {architecture.groups} key-value heads do not "
            "divide; choose a divisor"
        )


def missing_here(cell: Cell) -> Iterator[str]:
    """Files, code, keys and programs that a job needs and this machine does not have. The command line can be made
    without them."""
    if cell.model is not None:
        if not cell.model.is_dir():
            yield f"model: there is no folder {cell.model}; launch/prepare.sh says how to get it"
        megatron = cell.cluster.megatron or cell.model.with_name(f"{cell.model.name}_torch_dist")
        if not megatron.is_dir():
            yield f"cluster.megatron: there is no folder {megatron}; launch/prepare.sh writes it"
    for key, path in (("rollout", cell.rollout.questions), ("evaluation", cell.evaluation.questions)):
        if path is not None and not path.is_file():
            yield f"{key}.questions: there is no file {path}; launch/prepare.sh writes it"
    if cell.cluster.replay is not None and not cell.cluster.replay.is_dir():
        yield f"cluster.replay: there is no folder {cell.cluster.replay}"
    if cell.cluster.replay is None:
        yield from rollout_problems(cell)


def _local_only(cell: Cell) -> Iterator[str]:
    """Settings that only ``memorywalker train`` supports, and questions, which it reports itself."""
    if cell.rollout.questions is None:
        yield NO_QUESTIONS
    if cell.trainer.dtype not in (None, "bfloat16"):
        yield "trainer.dtype: slime trains in bfloat16; leave it out"
    if cell.engine.url is not None:
        yield f"engine.url: slime starts its engines itself, and would not use {cell.engine.url}; leave it out"
    with contextlib.suppress(ConfigError):  # wrong settings of the method are a problem of their own
        yield from lost_on_resume(cell)


def _uneven_replicas(cell: Cell) -> Iterator[str]:
    trainer, cluster = cell.trainer, cell.cluster
    ranks = trainer.parallel.ranks
    if cluster.trainer_gpus % ranks:
        divisors = " or ".join(map(str, nearest_divisors(cluster.trainer_gpus, ranks)))
        yield (
            f"trainer: tp {trainer.tp} x pp {trainer.pp} x cp {trainer.cp} = {ranks} ranks do not divide the "
            f"{cluster.trainer_gpus} GPUs that train; use {divisors}"
        )
        return
    replicas = cluster.trainer_gpus // ranks
    if trainer.dp not in (1, replicas):
        yield (
            f"trainer.dp: {trainer.dp}, but {cluster.trainer_gpus} GPUs of {ranks} ranks each are {replicas} replicas; "
            "leave it out, it follows from the GPUs"
        )
    rollouts = trainer.prompts * cell.rollout.samples // trainer.steps
    least = replicas * (trainer.pp if trainer.vpp > 1 else 1)
    if rollouts < least:
        yield (
            f"trainer.steps: {rollouts} rollouts per step (trainer.prompts {trainer.prompts} x rollout.samples "
            f"{cell.rollout.samples} / trainer.steps {trainer.steps}) for {replicas} replicas that need {least}; "
            "raise trainer.prompts, lower trainer.steps, or split the model over more ranks"
        )
    elif rollouts % replicas:
        yield (
            f"trainer.steps: {rollouts} rollouts per step cannot be divided evenly among {replicas} replicas, which "
            f"Megatron asks for; make them a multiple of {replicas}, or use another number of nodes or ranks"
        )
