"""Configurations, and arguments that slime accepts, that would train something other than intended.

A configuration is checked before a run or a job starts. slime's arguments are checked on the driver before anything is
started, and again where the hooks are, for a job that was started without our driver. Each refusal says why, and which
key or flag to change. It needs neither torch nor slime.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import NO_MODEL, NO_QUESTIONS, Cell
from slime_plugin.config.rollout import Rollout
from slime_plugin.errors import ConfigError, refuse
from slime_plugin.methods import method_of
from slime_plugin.slime.args import cell_of
from slime_plugin.slime.hook_names import ROLLOUT_HOOKS, TRAINING_HOOKS

REQUIRED_HOOKS = {
    "custom-generate-function-path": "slime would sample single answers, without harness and record",
    "custom-reward-post-process-path": "slime's own treats all prompts as one group as soon as rollouts are split",
    "custom-convert-samples-to-train-data-path": "slime's own trains the last context alone",
    "custom-megatron-init-path": "the training hooks would not know the configuration",
    "custom-model-provider-path": "the stock model does not support trees",
    "rollout-data-postprocess-path": "slime would fail on the data that the plugin adds",
    "custom-megatron-before-train-step-hook-path": "SDCC's teacher would never run",
    "custom-loss-function-path": "the loss would be another one",
}
"""The hooks without which training goes wrong. The others only reward and report, and may be the user's own."""
FORBIDDEN_FLAGS: dict[str, tuple[str, Any, str]] = {
    "calculate-per-token-loss": ("calculate_per_token_loss", False, "loss weights count rollouts, not tokens"),
    "recompute-loss-function": (
        "recompute_loss_function",
        False,
        "the loss would be computed twice, and the sums of SDCC's guard rails counted twice",
    ),
    "normalize-advantages": ("normalize_advantages", False, "advantages are normalised per group, once"),
    "kl-coef": ("kl_coef", 0, "the KL is part of the loss (objective.kl), not of the reward"),
    "custom-advantage-function-path": ("custom_advantage_function_path", None, "advantages come from the plugin"),
    "disable-compute-advantages-and-returns": ("compute_advantages_and_returns", True, "the loss needs them"),
    "use-opd": ("use_opd", False, "it would change the advantages"),
    "use-tis": ("use_tis", False, "the plugin's loss has no such correction"),
    "use-opsm": ("use_opsm", False, "the plugin's loss has no such mask"),
    "use-unbiased-kl": ("use_unbiased_kl", False, "the plugin's loss has the plain low-variance estimate"),
    "eps-clip-c": ("eps_clip_c", None, "the plugin's loss clips on two sides only"),
    "custom-pg-loss-reducer-function-path": (
        "custom_pg_loss_reducer_function_path",
        None,
        "the plugin's loss forms its means itself",
    ),
    "enable-mtp-training": (
        "enable_mtp_training",
        False,
        "it shifts labels along the row, which is not a path of a tree",
    ),
    "mtp-num-layers": ("mtp_num_layers", None, "they predict along the row, which is not a path of a tree"),
    "attention-dropout": ("attention_dropout", 0, "log-probabilities would not be those of the rollout"),
    "hidden-dropout": ("hidden_dropout", 0, "log-probabilities would not be those of the rollout"),
    "num-experts": ("num_experts", None, "dense models are supported"),
    "multi-latent-attention": ("multi_latent_attention", False, "tree attention does not support it"),
    "spec": ("spec", None, "the plugin provides the layers"),
    "use-routing-replay": ("use_routing_replay", False, "dense models are supported"),
    "rollout-top-p": ("rollout_top_p", 1.0, "tokens would come from a part of the distribution"),
    "rollout-top-k": ("rollout_top_k", -1, "tokens would come from a part of the distribution"),
    "rollout-temperature": ("rollout_temperature", 1.0, "the trainer computes the distribution at 1"),
    "group-rm": ("group_rm", False, "the harness judges every rollout by itself"),
    "reward-key": ("reward_key", None, "the reward is a number"),
    "apply-chat-template": ("apply_chat_template", False, "the harness renders the chat itself"),
    "multimodal-keys": ("multimodal_keys", None, "the plugin uses this field for its values per token"),
    "allgather-cp": ("allgather_cp", False, "the plugin reads slime's other layout of context parallelism"),
    "log-passrate": ("log_passrate", False, "slime counts rows there where it means rollouts"),
    "overlap-moe-expert-parallel-comm": (
        "overlap_moe_expert_parallel_comm",
        False,
        "slime then builds a schedule from the stock model and leaves the parents out",
    ),
}
"""By flag: attribute, the only value allowed, and why."""


def check_training(cell: Cell) -> None:
    """Raise :class:`ConfigError` with a line for each reason why a cell cannot be trained; it may still be sampled."""
    refuse(training_problems(cell))


def training_problems(cell: Cell) -> Iterator[str]:
    """Yield problems, each with its key, both numbers and the remedy."""
    yield from _missing(cell)
    architecture = None
    if cell.model is not None and cell.model.is_dir():
        try:
            architecture = Architecture.read(cell.model)
        except ConfigError as error:
            yield f"model: {error}"
    yield from settings_problems(cell, architecture)


def settings_problems(cell: Cell, architecture: Architecture | None) -> Iterator[str]:
    """Yield the problems that do not depend on the machine."""
    yield from _uneven_steps(cell)
    try:
        method = method_of(cell.method)
    except ConfigError as error:  # of the user's own
        yield from str(error).splitlines()
    else:
        yield from method.problems(None if architecture is None else architecture.vocabulary)
    yield from _off_policy(cell.rollout)
    if architecture is not None:
        try:
            architecture.check_split(cell.trainer.parallel)
        except ConfigError as error:
            yield f"trainer: {error}"


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the divisors next to a number that is none.

    >>> nearest_divisors(64, 7), nearest_divisors(6, 9)
    ([4, 8], [6])
    """
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below, above = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
    return [*below[-1:], *above[:1]]


def _missing(cell: Cell) -> Iterator[str]:
    if cell.model is None:
        yield NO_MODEL
    elif not cell.model.is_dir():
        yield f"model: there is no folder {cell.model}; paths count from the folder that the command is run in"
    if cell.rollout.questions is None:
        yield NO_QUESTIONS
    elif not cell.rollout.questions.is_file():
        yield f"rollout.questions: there is no file {cell.rollout.questions}"


def _uneven_steps(cell: Cell) -> Iterator[str]:
    prompts, samples, steps = cell.trainer.prompts, cell.rollout.samples, cell.trainer.steps
    rollouts = prompts * samples
    if rollouts % steps:
        valid = " or ".join(map(str, nearest_divisors(rollouts, steps)))
        yield (
            f"trainer.steps: {rollouts} rollouts (trainer.prompts {prompts} x rollout.samples {samples}) cannot be "
            f"divided evenly into {steps} steps; use {valid}"
        )
    if samples == 1:
        yield "rollout.samples: 1 rollout per question is its own baseline, so all advantages are 0; use at least 2"


def _off_policy(rollout: Rollout) -> Iterator[str]:
    """Require that tokens are drawn from the distribution that the trainer computes."""
    if rollout.temperature != 1:
        yield (
            f"rollout.temperature: {rollout.temperature:g}: the engine samples from, and logs, the distribution at "
            "that temperature, and the trainer computes the one at 1, so every ratio would be off; use temperature 1"
        )
    for key, value, right in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, None)):
        if value != right:
            yield (
                f"rollout.{key}: {value}: tokens come from a part of the distribution while log-probabilities are "
                f"those of all of it, so that training is off-policy; use {key} {'null' if right is None else right}"
            )


def flag_problem(name: str, values: Sequence[str]) -> str | None:
    """Return why a flag is refused, before slime has parsed it; None if it is not."""
    flag = name.removeprefix("--")
    if flag not in FORBIDDEN_FLAGS:
        return None
    _, right, why = FORBIDDEN_FLAGS[flag]
    if values and isinstance(right, float | int) and not isinstance(right, bool):
        with contextlib.suppress(ValueError):
            if float(values[0]) == right:
                return None
    return f"{name}: it cannot be used here: {why}; leave it out"


def check_args(args: Namespace) -> None:
    """Raise :class:`ConfigError` with a line for each reason why the job cannot start."""
    refuse(args_problems(args))


def args_problems(args: Namespace) -> Iterator[str]:
    """Yield the problems of the arguments as slime has parsed them."""
    cell = cell_of(args)
    yield from _hooks(args)
    for flag, (name, right, why) in FORBIDDEN_FLAGS.items():
        value = getattr(args, name, right)
        if value != right and not (right is None and not value):
            yield f"--{flag}: {name} is {value!r:.40} and must be {right!r}: {why}"
    if getattr(args, "advantage_estimator", "grpo") != "grpo":
        yield f"--advantage-estimator: {args.advantage_estimator} would change the advantages; use grpo"
    yield from _vocabulary(args)
    yield from _replicas(args)
    yield from _interleaving(args)
    yield from lost_on_resume(cell)
    yield from _differences_from_cell(args, cell)


def lost_on_resume(cell: Cell) -> Iterator[str]:
    """Yield a problem for state that neither slime nor the plugin keeps when a job is resumed."""
    settings = method_of(cell.method).distillation
    if settings is not None and settings.ema is not None:
        yield (
            f"method.ema: {settings.ema:g}: slime's checkpoints do not hold the moving average, so that a "
            "resumed job would start a new one; leave it out to take the teacher from the current weights"
        )


def _hooks(args: Namespace) -> Iterator[str]:
    paths = {**ROLLOUT_HOOKS, **TRAINING_HOOKS}
    for flag, why in REQUIRED_HOOKS.items():
        value = getattr(args, flag.replace("-", "_"), None)
        if value != paths[flag]:
            yield f"--{flag}: is {value or 'not set'}, so {why}; set it to {paths[flag]}"
    if getattr(args, "loss_type", None) != "custom_loss":
        yield f"--loss-type: is {getattr(args, 'loss_type', None)}, so slime's own loss would be used; set custom_loss"


def _vocabulary(args: Namespace) -> Iterator[str]:
    padded, tokens = getattr(args, "padded_vocab_size", None), getattr(args, "vocab_size", None)
    if padded and tokens and padded != tokens:
        yield (
            f"--make-vocab-size-divisible-by: the head would have {padded} columns for {tokens} tokens, and slime's "
            "log-probabilities give the others a share; set it to 1, and a tensor parallelism that divides the tokens"
        )


def _replicas(args: Namespace) -> Iterator[str]:
    rollouts, replicas = getattr(args, "global_batch_size", None), getattr(args, "data_parallel_size", None)
    if rollouts and replicas and rollouts % replicas:
        yield (
            f"--global-batch-size: {rollouts} rollouts per step cannot be divided evenly among {replicas} replicas; "
            "change the steps, the prompts or the number of GPUs"
        )


def _interleaving(args: Namespace) -> Iterator[str]:
    virtual = getattr(args, "virtual_pipeline_model_parallel_size", None)
    if virtual and virtual > 1 and args.pipeline_model_parallel_size == 2:
        yield (
            "--num-virtual-stages-per-pipeline-rank: with 2 stages Megatron mixes up the lengths of what is sent "
            "forward and backward; use 3 stages or more, or none that are virtual"
        )


def _differences_from_cell(args: Namespace, cell: Cell) -> Iterator[str]:
    """Check settings that the plugin reads from the cell and slime from its flags: they have to be equal."""
    trainer, objective = cell.trainer, cell.objective
    wanted: dict[str, Any] = {
        "rollout_batch_size": trainer.prompts,
        "n_samples_per_prompt": cell.rollout.samples,
        "num_steps_per_rollout": trainer.steps,
        "tensor_model_parallel_size": trainer.tp,
        "pipeline_model_parallel_size": trainer.pp,
        "context_parallel_size": trainer.cp,
        "sequence_parallel": trainer.sp,
        "eps_clip": objective.clip_low,
        "eps_clip_high": objective.clip_high,
        "entropy_coef": objective.entropy,
        "use_kl_loss": objective.kl > 0,
        "kl_loss_coef": objective.kl,
    }
    for name, value in wanted.items():
        given = getattr(args, name, value)
        if given != value:
            flag = name.replace("_", "-")
            yield f"--{flag}: is {given}, and the cell says {value}; generate the flags with memorywalker slime-args"
    rollouts = getattr(args, "num_rollout", trainer.iterations)
    if rollouts not in (0, trainer.iterations):
        yield (
            f"--num-rollout: is {rollouts}, and the cell says trainer.iterations {trainer.iterations}, by which SDCC "
            "ramps up; generate the flags with memorywalker slime-args"
        )
