"""slime's own training actor on the ranks of a test world: its batches, passes, advantages, statistics and losses.

What is slime's or Megatron's is imported from their sources and runs as it is. A few things have no CPU version, and
are stood in for: the accelerator (slime has a register for those), CUDA's streams and random states, the pinned memory
that a reference model is kept in, and the distributed optimizer, in whose place gradients are looked at.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from slime_plugin.architecture import Architecture
from slime_plugin.cluster.arguments import plugin_yaml, slime_flags
from slime_plugin.config.cell import Cell
from slime_plugin.record import Record
from slime_plugin.slime.samples import put_record
from slime_plugin.train.ranks import OnProgress
from tests.slime.sources import slime_imports

ON_A_CPU = (
    *("--transformer-impl", "local", "--use-cpu-initialization", "--no-gradient-accumulation-fusion"),
    *("--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion"),
    *("--no-bias-dropout-fusion", "--no-rope-fusion"),
    *("--data-pad-size-multiplier", "4", "--distributed-backend", "gloo"),
)


@dataclass(frozen=True)
class SlimeJob:
    """One iteration of one step."""

    cell: Cell
    folder: Path
    """Of the run."""
    records: Sequence[Record]
    reference: Path
    """The weights of the reference model."""
    further: tuple[str, ...] = ()
    """Flags."""
    sleeps: bool = False
    """The step is repeated after the trainer has given its memory and its process groups away, and got them back."""


@dataclass(frozen=True)
class Outcome:
    """Of one rank."""

    gradients: dict[str, torch.Tensor]
    """Of its own stage."""
    metrics: dict[str, float]
    """What slime logs of the step, on the rank that logs."""
    calls: list[str]
    """The hooks in the order in which slime called them."""
    repeated: dict[str, torch.Tensor] | None = None
    """The gradients after waking up."""


def parsed_args(job: SlimeJob) -> Namespace:
    """What slime's parser makes of the command line of the cell, in float32: slime takes no other logits."""
    slime_imports()
    from slime_plugin.cluster.driver import parsed

    words = [word for flag in slime_flags(job.cell, job.folder) for word in flag.words]
    args = parsed([*words, *ON_A_CPU, *job.further])
    args.bf16, args.params_dtype = False, torch.float32
    args.accumulate_allreduce_grads_in_fp32 = False
    args.use_distributed_optimizer = False
    args.save_interval = None
    return args


def prepare(job: SlimeJob) -> None:
    """What a launch script writes before slime is started."""
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "plugin.yaml").write_text(plugin_yaml(job.cell))
    (job.folder / "questions.jsonl").write_text('{"question": "Who?", "answers": ["Ada"]}\n')


def train_data(job: SlimeJob) -> list[dict[str, Any]]:
    """From samples to what each replica gets, by slime's rollout manager, through Ray's object store."""
    args = parsed_args(job)
    import ray
    from slime.ray.rollout import RolloutManager
    from slime.utils.misc import load_function
    from slime.utils.types import Sample

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        manager = object.__new__(RolloutManager.__ray_metadata__.modified_class)
        manager.args = args
        manager.custom_reward_post_process_func = load_function(args.custom_reward_post_process_path)
        manager.custom_convert_samples_to_train_data_func = load_function(
            args.custom_convert_samples_to_train_data_path
        )
        replicas = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
        replicas //= args.context_parallel_size
        virtual = args.virtual_pipeline_model_parallel_size or 1
        manager.train_parallel_config = {
            "dp_size": replicas,
            "cp_size": args.context_parallel_size,
            "vpp_size": virtual,
            "microbatch_group_size_per_vp_stage": args.pipeline_model_parallel_size if virtual > 1 else 1,
        }
        samples = []
        for i, record in enumerate(job.records):
            sample = Sample(index=i, group_index=int(record.meta.group or 0))
            put_record(sample, record)
            samples.append(sample)
        boxes = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))
        return [ray.get(box.inner) for box in boxes]
    finally:
        ray.shutdown()


def train(on_progress: OnProgress, job: SlimeJob, parts: list[dict[str, Any]]) -> Outcome:
    """One rollout's worth of training, by slime's actor."""
    args = parsed_args(job)
    _on_a_cpu()
    from megatron.core import mpu
    from megatron.core.enums import ModelType
    from megatron.training.training import get_model
    from slime.backends.megatron_utils import actor as actors
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils import model as models
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
    from slime.observability import logging_utils
    from slime.observability.profile_utils import TrainProfiler
    from slime.observability.timer import Timer
    from slime.utils.distributed_utils import init_gloo_group
    from slime.utils.misc import load_function
    from slime.utils.reloadable_process_group import (
        ReloadableProcessGroup,
        destroy_process_groups,
        monkey_patch_torch_dist,
        register_default_process_group,
        reload_process_groups,
    )

    from slime_plugin.slime.training import current
    from slime_plugin.train.hf_weights import gather_tensors, load_weights
    from slime_plugin.train.process_groups import is_last_stage
    from slime_plugin.verify.sleep import sleep, wake

    args.rank, args.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if job.sleeps:
        for name in ("all_gather_single", "reduce_scatter_single"):  # of a newer torch than slime's
            setattr(ReloadableProcessGroup, name, lambda group, *given, name=name: getattr(group.group, name)(*given))
        monkey_patch_torch_dist()
        register_default_process_group(timedelta(minutes=args.distributed_timeout_minutes))
    init_gloo_group()
    calls: list[str] = []
    _note_calls(calls)
    initialize.init(args)
    model = get_model(get_model_provider_func(args), ModelType.encoder_or_decoder)
    groups, architecture = current().groups, Architecture.read(Path(args.hf_checkpoint))
    actor = object.__new__(actors.MegatronTrainRayActor)
    actor.args, actor.role, actor.model = args, "actor", model
    optimizer = _Gradients(
        lambda: gather_tensors(model, architecture, groups, lambda p: p.main_grad.clone())  # type: ignore[attr-defined]  # Megatron's
    )
    actor.optimizer = actor.opt_param_scheduler = optimizer
    actor.weights_backuper = _unpinned(lambda: named_params_and_buffers(args, model, convert_to_global_name=True))
    actor._active_model_tag = "actor"
    load_weights(model, architecture, job.reference, groups)
    actor.weights_backuper.backup("ref")
    load_weights(model, architecture, Path(args.hf_checkpoint), groups)
    actor.weights_backuper.backup("actor")
    actor.rollout_data_postprocess = load_function(args.rollout_data_postprocess_path)
    actor.prof = TrainProfiler(args)
    actor.weight_updater = Namespace(pop_metrics=dict)
    logged: dict[str, float] = {}
    logging_utils.log = lambda args, metrics, step_key: logged.update(metrics)
    actors.ray.get = lambda part: part  # the parts came here by another way than Ray's
    again = copy.deepcopy(parts)
    data = actor._get_rollout_data([Namespace(inner=part) for part in parts])
    Timer().start("train_wait")
    actor.train_actor(0, data)
    gradients, repeated = optimizer.found, None
    if job.sleeps:
        optimizer.found = {}
        asleep = sleep()
        destroy_process_groups()
        wake(asleep)
        reload_process_groups()
        actor._switch_model("actor")
        actor.train_actor(0, actor._get_rollout_data([Namespace(inner=part) for part in again]))
        repeated = optimizer.found
    assert mpu.is_pipeline_last_stage(ignore_virtual=True) == is_last_stage(groups)
    assert models.get_args() is args
    return Outcome(gradients, {key: float(value) for key, value in logged.items()}, calls, repeated)


class _Gradients:
    """Stands where slime has its optimizer and its scheduler, and looks instead of updating."""

    def __init__(self, look: Any) -> None:
        self._look = look
        self.found: dict[str, torch.Tensor] = {}
        self.param_groups: list[dict[str, float]] = []

    def zero_grad(self) -> None:
        pass

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def prepare_grads(self) -> bool:
        return False

    def get_grad_norm(self) -> float:
        return 1.0

    def step(self, increment: int = 1) -> tuple[bool, float, int]:
        if not self.found:
            self.found = self._look()
        return True, 1.0, 0

    def get_lr(self, *_: Any) -> float:
        return 0.0


def _unpinned(source: Any) -> Any:
    """slime's keeper of weights, in memory that is not pinned."""
    from slime.utils.tensor_backper import TensorBackuper

    keeper = TensorBackuper.create(source_getter=source, single_tag=None)
    empty = torch.empty_like
    torch.empty_like = lambda tensor, **settings: empty(tensor, **{**settings, "pin_memory": False})
    return keeper


def _on_a_cpu() -> None:
    from slime.utils import accelerator
    from slime.utils.accelerator.torch_accelerator import TorchAccelerator

    from slime_plugin.train.megatron_on_cpu import patch_for_cpu

    class Cpu(TorchAccelerator):  # type: ignore[misc]  # slime has no types
        name = device_type = "cpu"
        communication_backend_name = "gloo"

        def _module(self) -> Any:
            return torch.cpu

        def is_available(self) -> bool:
            return True

        def device(self, index: Any = None) -> torch.device:
            return torch.device("cpu")

        def current_device(self) -> Any:
            return torch.device("cpu")

        def synchronize(self, device: Any = None) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def mem_get_info(self, device: Any = None) -> tuple[int, int]:
            return 64 << 30, 64 << 30  # plenty, or slime would collect garbage before every exchange

        def memory_allocated(self, device: Any = None) -> int:
            return 0

        memory_reserved = memory_allocated

    os.environ["SLIME_ACCELERATOR"] = "cpu"
    accelerator.register_accelerator("cpu", Cpu, lambda: True, priority=1000, communication_backends=("gloo",))
    patch_for_cpu()
    for name in ("Stream", "stream", "current_stream"):
        setattr(torch.cuda, name, getattr(_Streams, name))
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)


class _Streams:
    """On a CPU everything is in one."""

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    @staticmethod
    def stream(stream: Any) -> Any:
        return contextlib.nullcontext()

    @staticmethod
    def current_stream() -> Any:
        return _Streams.Stream()


def _note_calls(calls: list[str]) -> None:
    """Every hook writes its name down before it runs."""
    from slime_plugin.hooks import train as hooks

    def noting(name: str, hook: Any) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return hook(*given, **named)

        called.__signature__ = inspect.signature(hook)  # type: ignore[attr-defined]  # slime looks
        return called

    for name in ("init", "model_provider", "rollout_data_postprocess", "before_train_step", "loss"):
        setattr(hooks, name, noting(name, getattr(hooks, name)))


if __name__ == "__main__":
    sys.exit("this module is started by tests/slime/test_update.py")
