"""A cell as slime's command line, and as the YAML file that slime hands to the plugin.

Harness and method concern only the plugin and are in the YAML file. What slime itself has to know (model sizes,
batches, ranks, engines, checkpoints) is on the command line, and follows from the cell alone: a flag that the cell sets
cannot be set in ``cluster.flags`` as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_plugin.architecture import Architecture
from slime_plugin.cluster.flags import check_flag
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import ABSOLUTE, to_yaml
from slime_plugin.errors import ConfigError
from slime_plugin.slime.args import KEY
from slime_plugin.slime.hook_names import ROLLOUT_HOOKS, TRAINING_HOOKS
from slime_plugin.slime.refusals import flag_problem

Mode = Literal["train", "evaluate"]
PLUGIN_FILE = "plugin.yaml"
"""Name of the plugin's YAML file in the folder of a run."""
SECRET_SUFFIXES = ("wandb-key", "api-key")
LOG_PROBS_CHUNK = 4096
"""Tokens. With 98,304 tokens on 4 ranks the copy would take 15 GB."""
_MAY_BE_OTHER = ("--log-probs-chunk-size",)
"""Flags with a default here, which ``cluster.flags`` may change: no setting of the cell depends on them."""
SPARE_TOKENS = 8
"""Tokens that an engine may hold beyond the longest context, so that its own limit is never reached."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of the command line, and the key or reason that it comes from."""

    name: str
    values: tuple[str, ...]
    why: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, *self.values)


FlagRow = tuple[str, Any, str]
"""Name, value and origin of a flag. True: a flag without a value; False and None: no flag; a list: several values."""


def slime_flags(cell: Cell, run: Path, mode: Mode = "train") -> list[Flag]:
    """The command line of a job whose folder is ``run``."""
    rows = _rows(cell, run.resolve(), mode)
    flags = [_flag(*row) for row in rows if row[1] is not None and row[1] is not False]
    flags = [flag for flag in flags if flag.name not in _MAY_BE_OTHER or flag.name[2:] not in cell.cluster.flags]
    taken = {flag.name: flag.why for flag in flags}
    for key, value in cell.cluster.flags.items():
        where = f"cluster.flags.{key}"
        flag = _flag(key.removeprefix("--"), value, where)
        problem = flag_problem(flag.name, flag.values)
        if problem is not None and value is not False:
            raise ConfigError(f"{where}: {problem}")
        if flag.name.endswith(SECRET_SUFFIXES):
            raise ConfigError(
                f"{where}: every user of the machine can read a key on a command line; give it by an environment "
                "variable, such as WANDB_API_KEY"
            )
        if flag.name in taken:
            raise ConfigError(f"{where}: {flag.name} is set by the cell ({taken[flag.name]}); leave it out here")
        if value is not False:
            flags.append(flag)
    for flag in flags:
        check_flag(flag.name, flag.values, flag.why)
    return flags


def plugin_yaml(cell: Cell) -> str:
    """The file for ``--custom-config-path``. Its paths are absolute: it is read in other folders and on other nodes."""
    return to_yaml({KEY: cell.model_dump(mode="json", context=ABSOLUTE)})


def _rows(cell: Cell, run: Path, mode: Mode) -> Iterator[FlagRow]:
    model = cell.require_model()
    architecture = Architecture.of(model)
    yield from _model(architecture)
    yield from _checkpoints(cell, model, run)
    yield from _rollouts(cell, mode)
    for name, path in {**ROLLOUT_HOOKS, **TRAINING_HOOKS}.items():
        yield name, path, "the plugin"
    yield "loss-type", "custom_loss", "the plugin"
    yield "custom-config-path", run / PLUGIN_FILE, "harness, method and all that only the plugin reads"
    yield from _updates(cell)
    yield from _parallelism(cell, architecture)
    yield from _evaluation(cell, mode)
    if cell.cluster.replay is None:
        yield from _engines(cell, architecture)
    else:
        yield "debug-train-only", True, "cluster.replay: no engine is started"
        yield "rollout-function-path", "slime_plugin.hooks.rollout.replay", "cluster.replay"
    yield from _tracking(cell, run)


def _model(architecture: Architecture) -> Iterator[FlagRow]:
    for name, value in {
        "num-layers": architecture.layers,
        "hidden-size": architecture.hidden,
        "ffn-hidden-size": architecture.feed_forward,
        "num-attention-heads": architecture.heads,
        "num-query-groups": architecture.groups,
        "kv-channels": architecture.head_size,
        "norm-epsilon": architecture.norm_epsilon,
        "rotary-base": int(architecture.rotary_base),
        "vocab-size": architecture.vocabulary,
        "max-position-embeddings": architecture.max_positions,
        "seq-length": architecture.max_positions,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "swiglu": True,
        "group-query-attention": True,
        "qk-layernorm": True,
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": not architecture.tied,
    }.items():
        yield name, value, "the model's config.json"
    yield "make-vocab-size-divisible-by", 1, "padded columns of the head would get a share of the probability"


def _checkpoints(cell: Cell, model: Path, run: Path) -> list[FlagRow]:
    megatron = cell.cluster.megatron or model.with_name(f"{model.name}_torch_dist")
    resumed = "the run's folder; a job that is submitted again resumes from there"
    return [
        ("hf-checkpoint", model.resolve(), "model"),
        ("ref-load", megatron.resolve(), "cluster.megatron"),
        ("load", run / "checkpoints", resumed),
        ("save", run / "checkpoints", resumed),
        ("save-interval", cell.trainer.save_every, "trainer.save_every"),
    ]


def _rollouts(cell: Cell, mode: Mode) -> list[FlagRow]:
    trainer, rollout = cell.trainer, cell.rollout
    iterations = (0, "evaluation only") if mode == "evaluate" else (trainer.iterations, "trainer.iterations")
    return [
        ("prompt-data", cell.require_questions().resolve(), "rollout.questions"),
        ("input-key", "question", "the format of questions"),
        ("label-key", "answers", "the format of questions"),
        ("rollout-shuffle", True, "reshuffled every epoch"),
        ("rollout-seed", trainer.seed, "trainer.seed"),
        ("num-rollout", *iterations),
        ("rollout-batch-size", trainer.prompts, "trainer.prompts"),
        ("n-samples-per-prompt", rollout.samples, "rollout.samples"),
        ("num-steps-per-rollout", trainer.steps, "trainer.steps"),
        ("global-batch-size", trainer.prompts * rollout.samples // trainer.steps, "rollouts per step"),
        ("rollout-temperature", rollout.temperature, "rollout.temperature"),
        ("rollout-max-response-len", rollout.turn_tokens, "rollout.turn_tokens"),
    ]


def _updates(cell: Cell) -> list[FlagRow]:
    trainer, objective = cell.trainer, cell.objective
    return [
        ("advantage-estimator", "grpo", "the plugin"),
        ("eps-clip", objective.clip_low, "objective.clip_low"),
        ("eps-clip-high", objective.clip_high, "objective.clip_high"),
        ("entropy-coef", objective.entropy, "objective.entropy"),
        ("use-kl-loss", objective.kl > 0, "objective.kl"),
        ("kl-loss-coef", objective.kl or None, "objective.kl"),
        ("kl-loss-type", "low_var_kl" if objective.kl else None, "the plugin's estimator"),
        ("disable-grpo-std-normalization", not cell.std, "std"),
        ("optimizer", "adam", "the paper"),
        ("lr", trainer.lr, "trainer.lr"),
        ("lr-decay-style", "constant", "the paper"),
        ("lr-warmup-iters", trainer.lr_warmup, "trainer.lr_warmup"),
        ("override-opt-param-scheduler", True, "a resumed job may have more iterations than it started with"),
        ("adam-beta1", trainer.betas[0], "trainer.betas"),
        ("adam-beta2", trainer.betas[1], "trainer.betas"),
        ("weight-decay", trainer.weight_decay, "trainer.weight_decay"),
        ("clip-grad", trainer.clip_grad, "trainer.clip_grad"),
        ("attention-dropout", 0.0, "log-probabilities have to be those of the rollout"),
        ("hidden-dropout", 0.0, "log-probabilities have to be those of the rollout"),
        ("accumulate-allreduce-grads-in-fp32", True, "precision"),
        ("attention-softmax-in-fp32", True, "precision"),
        ("attention-backend", "flash", "tree attention calls flash-attn"),
        (
            "log-probs-chunk-size",
            LOG_PROBS_CHUNK,
            "slime's log-probability passes would copy the logits of a whole row",
        ),
    ]


def _parallelism(cell: Cell, architecture: Architecture) -> list[FlagRow]:
    trainer, cluster = cell.trainer, cell.cluster
    last_layers = architecture.last_stage(trainer.pp)
    return [
        ("tensor-model-parallel-size", trainer.tp, "trainer.tp"),
        ("pipeline-model-parallel-size", trainer.pp, "trainer.pp"),
        ("context-parallel-size", trainer.cp, "trainer.cp"),
        ("cp-comm-type", "all_gather" if trainer.cp > 1 else None, "tree attention gathers keys and values"),
        ("sequence-parallel", trainer.sp, "trainer.sp"),
        (
            "decoder-last-pipeline-num-layers",
            last_layers,
            f"{architecture.layers} layers on trainer.pp stages",
        ),
        ("num-virtual-stages-per-pipeline-rank", trainer.vpp if trainer.vpp > 1 else None, "trainer.vpp"),
        ("recompute-granularity", "full" if trainer.recompute else None, "trainer.recompute"),
        ("recompute-method", "uniform" if trainer.recompute else None, "trainer.recompute"),
        ("recompute-num-layers", 1 if trainer.recompute else None, "trainer.recompute"),
        ("use-dynamic-batch-size", True, "row lengths vary widely"),
        ("max-tokens-per-gpu", trainer.batch_tokens, "trainer.batch_tokens"),
        ("balance-data", True, "replicas get even shares"),
        ("actor-num-nodes", cluster.trainer_nodes, "cluster.nodes, cluster.rollout_nodes"),
        ("actor-num-gpus-per-node", cluster.gpus, "cluster.gpus"),
        ("num-gpus-per-node", cluster.gpus, "cluster.gpus"),
    ]


def _evaluation(cell: Cell, mode: Mode) -> list[FlagRow]:
    evaluation = cell.evaluation
    if evaluation.questions is None and mode == "evaluate":
        raise ConfigError("evaluation.questions: missing; name a file of JSON lines with question and answers")
    if evaluation.questions is None or cell.cluster.replay is not None:
        return []
    few = "" if evaluation.limit is None or mode == "evaluate" else f"@[0:{evaluation.limit}]"
    return [
        ("eval-interval", evaluation.every, "evaluation.every"),
        ("skip-eval-before-train", mode == "train" and not evaluation.at_start, "evaluation.at_start"),
        (
            "eval-prompt-data",
            [evaluation.name, f"{evaluation.questions.resolve()}{few}"],
            "evaluation.questions, evaluation.limit",
        ),
        ("n-samples-per-eval-prompt", evaluation.samples, "evaluation.samples"),
        ("eval-temperature", evaluation.temperature, "evaluation.temperature"),
        ("eval-top-p", evaluation.top_p, "evaluation.top_p"),
        ("eval-top-k", evaluation.top_k or -1, "evaluation.top_k"),
        ("eval-max-response-len", cell.rollout.turn_tokens, "rollout.turn_tokens"),
    ]


def _engines(cell: Cell, architecture: Architecture) -> list[FlagRow]:
    cluster, rollout = cell.cluster, cell.rollout
    longest = min(rollout.context_tokens + SPARE_TOKENS, architecture.max_positions)
    return [
        ("colocate", cluster.shared, "cluster.rollout_nodes 0"),
        ("rollout-num-gpus", None if cluster.shared else cluster.rollout_gpus, "cluster.rollout_nodes"),
        ("rollout-num-gpus-per-engine", cluster.engine_gpus, "cluster.engine_gpus"),
        ("sglang-mem-fraction-static", cluster.engine_memory, "cluster.engine_memory"),
        ("sglang-context-length", longest, "rollout.context_tokens"),
        ("sglang-server-concurrency", -(-rollout.concurrency // cluster.engines), "rollout.concurrency"),
        ("router-policy", _routing(), "turns of a rollout go to the engine that has its prefix cached"),
        ("use-fault-tolerance", True, "an engine that dies is restarted"),
    ]


def _routing() -> str:
    """By the rollout's own header where the installed router can do that. ``cache_aware`` compares prompts instead, and
    sends the first turns of all rollouts to one engine, because they begin with the same system message."""
    router = importlib.util.find_spec("sglang_router")
    if router is None or router.origin is None:
        return "cache_aware"
    arguments = Path(router.origin).with_name("router_args.py")
    offered = arguments.is_file() and "consistent_hashing" in arguments.read_text(encoding="utf-8")
    return "consistent_hashing" if offered else "cache_aware"


def _tracking(cell: Cell, run: Path) -> list[FlagRow]:
    folder, rows = "the run's folder", list[FlagRow]()
    if cell.tracking.tensorboard:
        rows += [
            ("use-tensorboard", True, "tracking.tensorboard"),
            ("tb-project-name", "memorywalker", f"{folder}, which TENSORBOARD_DIR names"),
            ("tb-experiment-name", run.name, folder),
        ]
    if (wandb := cell.tracking.wandb) is not None:
        rows += [
            ("use-wandb", True, "tracking.wandb; its key comes from WANDB_API_KEY"),
            ("wandb-mode", wandb.mode, "tracking.wandb.mode"),
            ("wandb-project", wandb.project, "tracking.wandb.project"),
            ("wandb-group", wandb.name or run.name, "tracking.wandb.name"),
            ("wandb-dir", run, folder),
            ("wandb-team", wandb.entity, "tracking.wandb.entity"),
        ]
    return rows


def _flag(name: str, value: Any, why: str) -> Flag:
    """``values`` of true are none."""
    values = [] if isinstance(value, bool) else value if isinstance(value, list) else [value]
    return Flag(f"--{name}", tuple(f"{v:.12g}" if isinstance(v, float) else str(v) for v in values), why)
