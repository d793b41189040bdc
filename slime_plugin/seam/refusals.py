"""Arguments that slime accepts and that would train something else than what was asked for.

Checked on the driver before anything is started, and once more where the hooks are, for a job that was started without
our driver. Each refusal says why, and which flag to change. It needs neither torch nor slime.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Sdcc
from slime_plugin.errors import ConfigError
from slime_plugin.seam.args import cell_of
from slime_plugin.seam.names import ROLLOUT_HOOKS, TRAINING_HOOKS

WHY_A_HOOK = {
    "custom-generate-function-path": "slime would sample single answers, without harness and record",
    "custom-reward-post-process-path": "slime's own puts all prompts into one group as soon as rollouts are split",
    "custom-convert-samples-to-train-data-path": "slime's own trains the last context alone",
    "custom-megatron-init-path": "the training hooks would not know the configuration",
    "custom-model-provider-path": "the stock model knows no trees",
    "rollout-data-postprocess-path": "slime would stumble over what the plugin sends along",
    "custom-megatron-before-train-step-hook-path": "SDCC's teacher would never run",
    "custom-loss-function-path": "the loss would be another one",
}
"""The hooks without which training goes wrong. The others only judge and tell, and may be anybody's."""
ABSENT: dict[str, tuple[str, Any, str]] = {
    "calculate-per-token-loss": ("calculate_per_token_loss", False, "loss weights count rollouts, not tokens"),
    "recompute-loss-function": (
        "recompute_loss_function",
        False,
        "the loss would be computed twice, and what SDCC's guard rails see counted twice",
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
    "enable-mtp-training": ("enable_mtp_training", False, "it shifts labels along the row, which is no path of a tree"),
    "mtp-num-layers": ("mtp_num_layers", None, "they predict along the row, which is no path of a tree"),
    "attention-dropout": ("attention_dropout", 0, "log-probabilities would not be those of the rollout"),
    "hidden-dropout": ("hidden_dropout", 0, "log-probabilities would not be those of the rollout"),
    "num-experts": ("num_experts", None, "dense models are supported"),
    "multi-latent-attention": ("multi_latent_attention", False, "tree attention does not know it"),
    "spec": ("spec", None, "the plugin provides the layers"),
    "use-routing-replay": ("use_routing_replay", False, "dense models are supported"),
    "rollout-top-p": ("rollout_top_p", 1.0, "tokens would come from a part of the distribution"),
    "rollout-top-k": ("rollout_top_k", -1, "tokens would come from a part of the distribution"),
    "rollout-temperature": ("rollout_temperature", 1.0, "the trainer computes the distribution at 1"),
    "group-rm": ("group_rm", False, "the harness judges every rollout by itself"),
    "reward-key": ("reward_key", None, "the reward is a number"),
    "apply-chat-template": ("apply_chat_template", False, "the harness renders the chat itself"),
    "multimodal-keys": ("multimodal_keys", None, "their place is taken by what a tree needs per token"),
    "allgather-cp": ("allgather_cp", False, "the plugin reads slime's other layout of context parallelism"),
    "log-passrate": ("log_passrate", False, "slime counts rows there where it means rollouts"),
    "overlap-moe-expert-parallel-comm": (
        "overlap_moe_expert_parallel_comm",
        False,
        "slime then builds a schedule from the stock model and leaves the parents out",
    ),
}
"""Flag, attribute, the value that is right, and why another one is not."""


def flag_problem(name: str, values: Sequence[str]) -> str | None:
    """Why a flag is refused, before slime has parsed it; None if it is not."""
    flag = name.removeprefix("--")
    if flag not in ABSENT:
        return None
    _, right, why = ABSENT[flag]
    if values and isinstance(right, float | int) and not isinstance(right, bool):
        with contextlib.suppress(ValueError):
            if float(values[0]) == right:
                return None
    return f"{name}: it cannot be used here: {why}; leave it out"


def check_args(args: Namespace) -> None:
    """Raises :class:`ConfigError` with a line for each reason not to begin."""
    problems = list(args_problems(args))
    if problems:
        raise ConfigError("\n".join(problems))


def args_problems(args: Namespace) -> Iterator[str]:
    """From the arguments as slime has parsed them."""
    cell = cell_of(args)
    yield from _hooks(args)
    for flag, (name, right, why) in ABSENT.items():
        value = getattr(args, name, right)
        if value != right and not (right is None and not value):
            yield f"--{flag}: {name} is {value!r:.40} where only {right!r} will do: {why}"
    if getattr(args, "advantage_estimator", "grpo") != "grpo":
        yield f"--advantage-estimator: {args.advantage_estimator} would change the advantages; use grpo"
    if getattr(args, "apply_rope_fusion", False):
        yield "--no-rope-fusion: missing: the fused kernel counts positions along the row, and a tree has depths"
    yield from _vocabulary(args)
    yield from _replicas(args)
    yield from _interleaving(args)
    yield from lost_on_resume(cell)
    yield from _other_than_the_cell(args, cell)


def lost_on_resume(cell: Cell) -> Iterator[str]:
    """What neither slime nor the plugin keeps from one job to the next."""
    if isinstance(cell.method, Sdcc) and cell.method.ema is not None:
        yield (
            f"method.ema: {cell.method.ema:g}: slime's checkpoints do not hold the moving average, so that a job that "
            "goes on would begin a new one; leave it out to take the teacher from the current weights"
        )


def _hooks(args: Namespace) -> Iterator[str]:
    paths = {**ROLLOUT_HOOKS, **TRAINING_HOOKS}
    for flag, why in WHY_A_HOOK.items():
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
            f"--global-batch-size: {rollouts} rollouts per step cannot be dealt out evenly to {replicas} replicas; "
            "change the steps, the prompts or the number of GPUs"
        )


def _interleaving(args: Namespace) -> Iterator[str]:
    virtual = getattr(args, "virtual_pipeline_model_parallel_size", None)
    if virtual and virtual > 1 and args.pipeline_model_parallel_size == 2:
        yield (
            "--num-virtual-stages-per-pipeline-rank: with 2 stages Megatron mixes up the lengths of what goes forward "
            "and what goes back; use 3 stages or more, or none that are virtual"
        )


def _other_than_the_cell(args: Namespace, cell: Cell) -> Iterator[str]:
    """The plugin reads these from the cell and slime from its flags, so they have to be the same."""
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
            yield f"--{flag}: is {given}, and the cell says {value}; have memorywalker slime-args write the flags"
    rollouts = getattr(args, "num_rollout", trainer.iterations)
    if rollouts not in (0, trainer.iterations):
        yield (
            f"--num-rollout: is {rollouts}, and the cell says trainer.iterations {trainer.iterations}, by which SDCC "
            "ramps up; have memorywalker slime-args write the flags"
        )
