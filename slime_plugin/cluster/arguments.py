"""A cell as slime's command line, and as the one YAML that slime hands to the plugin.

Harness and method are the plugin's business and travel in the YAML, under one key. What slime itself has to know (sizes
of the model, batches, ranks, engines, checkpoints) is on the command line, and the cell is the only place where it is
written down: a flag that the cell decides about cannot be given beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_plugin.cluster.flags import check_flag
from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.cluster import Setting
from slime_plugin.config.frozen import to_yaml
from slime_plugin.errors import ConfigError
from slime_plugin.seam.args import KEY, carry
from slime_plugin.seam.names import ROLLOUT_HOOKS, TRAINING_HOOKS
from slime_plugin.seam.refusals import flag_problem

Mode = Literal["train", "evaluate"]
PLUGIN_FILE = "plugin.yaml"
"""Name of the plugin's YAML in the folder of a run."""
SECRETS = ("wandb-key", "api-key")
"""How flags end that take one."""
SPARE = 8
"""Tokens that an engine may hold beyond the longest context, so that its own limit is never the one that is met."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of the command line, and where it comes from."""

    name: str
    values: tuple[str, ...]
    why: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, *self.values)


def slime_flags(cell: Cell, run: Path, mode: Mode = "train") -> list[Flag]:
    """The command line of a job whose folder is ``run``."""
    flags = list(_of_the_cell(cell, run.resolve(), mode))
    taken = {flag.name: flag.why for flag in flags}
    for key, value in cell.cluster.flags.items():
        flag = _given(key, value)
        problem = flag_problem(flag.name, flag.values)
        if problem is not None and value is not False:
            raise ConfigError(f"cluster.flags.{key}: {problem}")
        if flag.name.endswith(SECRETS):
            raise ConfigError(
                f"cluster.flags.{key}: a key on a command line is for everyone on the machine to see; give it by an "
                "environment variable, such as WANDB_API_KEY"
            )
        if flag.name in taken:
            raise ConfigError(f"cluster.flags.{key}: the cell decides about {flag.name} ({taken[flag.name]})")
        if value is not False:
            flags.append(flag)
    for flag in flags:
        check_flag(flag.name, flag.values, f"cluster.flags.{flag.name[2:]}" if flag.name not in taken else flag.why)
    return flags


def plugin_yaml(cell: Cell) -> str:
    """The file for ``--custom-config-path``. Its paths are absolute: it is read in other folders and on other nodes."""
    return to_yaml({KEY: _absolute(cell.model_dump(mode="python"), carry(cell))})


def _of_the_cell(cell: Cell, run: Path, mode: Mode) -> Iterator[Flag]:
    model = cell.model
    if model is None:
        raise ConfigError("model: missing; name the folder of a Hugging Face checkpoint")
    yield from _model(Architecture.of(model))
    yield from _checkpoints(cell, model, run)
    yield from _rollouts(cell, mode)
    yield from _hooks(run)
    yield from _updates(cell)
    yield from _split(cell, Architecture.of(model))
    yield from _evaluation(cell, mode)
    yield from _engines(cell, Architecture.of(model)) if cell.cluster.replay is None else _replay()
    yield from _tracking(cell, run)


def _model(architecture: Architecture) -> Iterator[Flag]:
    why = "the model's config.json"
    for name, value in (
        ("num-layers", architecture.layers),
        ("hidden-size", architecture.hidden),
        ("ffn-hidden-size", architecture.feed_forward),
        ("num-attention-heads", architecture.heads),
        ("num-query-groups", architecture.groups),
        ("kv-channels", architecture.head_size),
        ("norm-epsilon", architecture.norm_epsilon),
        ("rotary-base", int(architecture.rotary_base)),
        ("vocab-size", architecture.vocabulary),
        ("max-position-embeddings", architecture.max_positions),
        ("seq-length", architecture.max_positions),
        ("normalization", "RMSNorm"),
        ("position-embedding-type", "rope"),
    ):
        yield _flag(name, value, why)
    for name in ("swiglu", "group-query-attention", "qk-layernorm", "disable-bias-linear"):
        yield _flag(name, True, why)
    if not architecture.tied:
        yield _flag("untie-embeddings-and-output-weights", True, why)
    yield _flag("make-vocab-size-divisible-by", 1, "no columns in the head that are no tokens: they would have a share")


def _checkpoints(cell: Cell, model: Path, run: Path) -> Iterator[Flag]:
    yield _flag("hf-checkpoint", model.resolve(), "model")
    megatron = cell.cluster.megatron or model.with_name(f"{model.name}_torch_dist")
    yield _flag("ref-load", megatron.resolve(), "cluster.megatron")
    for name in ("load", "save"):
        yield _flag(name, run / "checkpoints", "the run's folder; a job that is submitted again goes on from there")
    yield _flag("save-interval", cell.trainer.save_every, "trainer.save_every")


def _rollouts(cell: Cell, mode: Mode) -> Iterator[Flag]:
    trainer, rollout = cell.trainer, cell.rollout
    if rollout.questions is None:
        raise ConfigError("rollout.questions: missing; name a file of JSON lines with question and answers")
    yield _flag("prompt-data", rollout.questions.resolve(), "rollout.questions")
    yield _flag("input-key", "question", "the format of questions")
    yield _flag("label-key", "answers", "the format of questions")
    yield _flag("rollout-shuffle", True, "every epoch in an order of its own")
    yield _flag("rollout-seed", trainer.seed, "trainer.seed")
    evaluating = mode == "evaluate"
    yield _flag(
        "num-rollout",
        0 if evaluating else trainer.iterations,
        "evaluation only" if evaluating else "trainer.iterations",
    )
    yield _flag("rollout-batch-size", trainer.prompts, "trainer.prompts")
    yield _flag("n-samples-per-prompt", rollout.samples, "rollout.samples")
    yield _flag("num-steps-per-rollout", trainer.steps, "trainer.steps")
    yield _flag("global-batch-size", trainer.prompts * rollout.samples // trainer.steps, "rollouts per step")
    yield _flag("rollout-temperature", rollout.temperature, "rollout.temperature")
    yield _flag("rollout-max-response-len", rollout.turn_tokens, "rollout.turn_tokens")


def _hooks(run: Path) -> Iterator[Flag]:
    for name, path in {**ROLLOUT_HOOKS, **TRAINING_HOOKS}.items():
        yield _flag(name, path, "the plugin")
    yield _flag("loss-type", "custom_loss", "the plugin")
    yield _flag("custom-config-path", run / PLUGIN_FILE, "harness, method and all that only the plugin reads")


def _updates(cell: Cell) -> Iterator[Flag]:
    trainer, objective = cell.trainer, cell.objective
    yield _flag("advantage-estimator", "grpo", "the plugin")
    yield _flag("eps-clip", objective.clip_low, "objective.clip_low")
    yield _flag("eps-clip-high", objective.clip_high, "objective.clip_high")
    yield _flag("entropy-coef", objective.entropy, "objective.entropy")
    if objective.kl:
        yield _flag("use-kl-loss", True, "objective.kl")
        yield _flag("kl-loss-coef", objective.kl, "objective.kl")
        yield _flag("kl-loss-type", "low_var_kl", "the plugin's estimator")
    if not cell.std:
        yield _flag("disable-grpo-std-normalization", True, "std")
    yield _flag("optimizer", "adam", "the paper")
    yield _flag("lr", trainer.lr, "trainer.lr")
    yield _flag("lr-decay-style", "constant", "the paper")
    yield _flag("lr-warmup-iters", trainer.lr_warmup, "trainer.lr_warmup")
    yield _flag("override-opt-param-scheduler", True, "a job may go on with more iterations than it was begun with")
    yield _flag("adam-beta1", trainer.betas[0], "trainer.betas")
    yield _flag("adam-beta2", trainer.betas[1], "trainer.betas")
    yield _flag("weight-decay", trainer.weight_decay, "trainer.weight_decay")
    yield _flag("clip-grad", trainer.clip_grad, "trainer.clip_grad")
    for name in ("attention-dropout", "hidden-dropout"):
        yield _flag(name, 0.0, "log-probabilities have to be those of the rollout")
    for name in ("accumulate-allreduce-grads-in-fp32", "attention-softmax-in-fp32"):
        yield _flag(name, True, "precision")
    yield _flag("attention-backend", "flash", "tree attention calls flash-attn")
    yield _flag("no-rope-fusion", True, "positions are depths in a tree, which the fused kernel does not know")


def _split(cell: Cell, architecture: Architecture) -> Iterator[Flag]:
    trainer, cluster = cell.trainer, cell.cluster
    for name, key in (
        ("tensor-model-parallel-size", "tp"),
        ("pipeline-model-parallel-size", "pp"),
        ("context-parallel-size", "cp"),
    ):
        yield _flag(name, getattr(trainer, key), f"trainer.{key}")
    if trainer.cp > 1:
        yield _flag("cp-comm-type", "all_gather", "tree attention gathers keys and values")
    if trainer.sp:
        yield _flag("sequence-parallel", True, "trainer.sp")
    last = architecture.last_stage(trainer.pp)
    if last is not None:
        yield _flag("decoder-last-pipeline-num-layers", last, f"{architecture.layers} layers on trainer.pp stages")
    if trainer.vpp > 1:
        yield _flag("num-virtual-stages-per-pipeline-rank", trainer.vpp, "trainer.vpp")
    if trainer.recompute:
        yield _flag("recompute-granularity", "full", "trainer.recompute")
        yield _flag("recompute-method", "uniform", "trainer.recompute")
        yield _flag("recompute-num-layers", 1, "trainer.recompute")
    yield _flag("use-dynamic-batch-size", True, "rows differ in length by far")
    yield _flag("max-tokens-per-gpu", trainer.batch_tokens, "trainer.batch_tokens")
    yield _flag("balance-data", True, "replicas get even shares")
    yield _flag("actor-num-nodes", cluster.trainer_nodes, "cluster.nodes, cluster.rollout_nodes")
    yield _flag("actor-num-gpus-per-node", cluster.gpus, "cluster.gpus")
    yield _flag("num-gpus-per-node", cluster.gpus, "cluster.gpus")


def _evaluation(cell: Cell, mode: Mode) -> Iterator[Flag]:
    evaluation = cell.evaluation
    if evaluation.questions is None:
        if mode == "evaluate":
            raise ConfigError("evaluation.questions: missing; name a file of JSON lines with question and answers")
        return
    if cell.cluster.replay is not None:
        return
    yield _flag("eval-interval", evaluation.every, "evaluation.every")
    path = str(evaluation.questions.resolve())
    yield Flag("--eval-prompt-data", (evaluation.name, path), "evaluation.questions")
    yield _flag("n-samples-per-eval-prompt", evaluation.samples, "evaluation.samples")
    yield _flag("eval-temperature", evaluation.temperature, "evaluation.temperature")
    yield _flag("eval-top-p", evaluation.top_p, "evaluation.top_p")
    yield _flag("eval-top-k", evaluation.top_k or -1, "evaluation.top_k")
    yield _flag("eval-max-response-len", cell.rollout.turn_tokens, "rollout.turn_tokens")


def _engines(cell: Cell, architecture: Architecture) -> Iterator[Flag]:
    cluster, rollout = cell.cluster, cell.rollout
    if cluster.shared:
        yield _flag("colocate", True, "cluster.rollout_nodes 0")
    else:
        yield _flag("rollout-num-gpus", cluster.rollout_gpus, "cluster.rollout_nodes")
    yield _flag("rollout-num-gpus-per-engine", cluster.engine_gpus, "cluster.engine_gpus")
    yield _flag("sglang-mem-fraction-static", cluster.engine_memory, "cluster.engine_memory")
    longest = min(rollout.context_tokens + SPARE, architecture.max_positions)
    yield _flag("sglang-context-length", longest, "rollout.context_tokens")
    yield _flag("sglang-server-concurrency", -(-rollout.concurrency // cluster.engines), "rollout.concurrency")
    yield _flag("router-policy", "cache_aware", "a turn goes to the engine that has its prefix cached")
    yield _flag("use-fault-tolerance", True, "an engine that dies is started again")


def _tracking(cell: Cell, run: Path) -> Iterator[Flag]:
    tracking = cell.tracking
    if tracking.tensorboard:
        yield _flag("use-tensorboard", True, "tracking.tensorboard")
        yield _flag("tb-project-name", run / "tensorboard", "the run's folder")
        yield _flag("tb-experiment-name", run.name, "the run's folder")
    if tracking.wandb is not None:
        yield _flag("use-wandb", True, "tracking.wandb; its key comes from WANDB_API_KEY")
        yield _flag("wandb-mode", tracking.wandb.mode, "tracking.wandb.mode")
        yield _flag("wandb-project", tracking.wandb.project, "tracking.wandb.project")
        yield _flag("wandb-group", tracking.wandb.name or run.name, "tracking.wandb.name")
        yield _flag("wandb-dir", run, "the run's folder")
        if tracking.wandb.entity is not None:
            yield _flag("wandb-team", tracking.wandb.entity, "tracking.wandb.entity")


def _replay() -> Iterator[Flag]:
    yield _flag("debug-train-only", True, "cluster.replay: no engine is started")
    yield _flag("rollout-function-path", "slime_plugin.hooks.rollout.replay", "cluster.replay")


def _given(key: str, value: Setting | list[Setting]) -> Flag:
    return _flag(key.removeprefix("--"), value, f"cluster.flags.{key}")


def _flag(name: str, value: Any, why: str) -> Flag:
    if isinstance(value, bool):
        return Flag(f"--{name}", (), why)
    values = value if isinstance(value, list) else [value]
    return Flag(f"--{name}", tuple(map(_word, values)), why)


def _word(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _absolute(value: Any, plain: Any) -> Any:
    """The plain value of a configuration, with every path in it made absolute."""
    if isinstance(value, Path):
        return str(value.resolve())
    if isinstance(value, Mapping):
        return {key: _absolute(value[key], plain[key]) for key in plain}
    if isinstance(value, list | tuple):
        return [_absolute(item, other) for item, other in zip(value, plain, strict=True)]
    return plain
