"""How slime calls the plugin and what the plugin needs of Megatron, and a check that the installed versions comply.

Read from slime's commit 624b824 and from Megatron-LM's 1dcf0da with the patches that slime applies to it. In slime's
order, with what each call is given (its own names)::

    driver      parse_args: every key of --custom-config-path is set on the arguments, unchecked
    rollout     rollout function: groups of samples from the data source, n_samples_per_prompt each
                  generate      once per sample, all at once; evaluation= is given because we have it
                  reward        if the sample has none and was not aborted
                rollout log     samples of all groups in one list; true would skip slime's own logging
                convert         the same list; replaces reward post-processing too
                split           by rollout id into steps, then micro-batches, then replicas; only a fixed set of the
                                other keys is kept
    training    init            once, behind Megatron's groups and before the model
                model provider  once per virtual stage
                per rollout:    log-probabilities of the reference, then of the policy, over all micro-batches;
                                advantages; postprocess (all stages); slime's own statistics of every list that is left
                per step:       gradients to zero; before-train-step; micro-batches through all stages, each with a
                                loss on the last; update

Another version of slime or Megatron could call the hooks with other arguments or at other times. So a job checks the
source of the installed packages before it starts, without importing them, in a fraction of a second.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SLIME_COMMIT = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
MEGATRON_COMMIT = "1dcf0dafa884ad52ffb243625717a3471643e087"


@dataclass(frozen=True, slots=True)
class CallSite:
    """A function is called with these arguments somewhere in a file."""

    file: str
    callee: str
    arguments: str

    def problem(self, tree: ast.Module) -> str | None:
        found = [_arguments(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is(node, self.callee)]
        if self.arguments in found:
            return None
        instead = f"calls it with ({found[0]})" if found else "does not call it"
        return f"{self.file}: {self.callee} should be called with ({self.arguments}), and this version {instead}"


@dataclass(frozen=True, slots=True)
class Takes:
    """A function or method has at least these parameters."""

    file: str
    function: str
    parameters: tuple[str, ...]

    def problem(self, tree: ast.Module) -> str | None:
        node = _function(tree, self.function.split("."))
        if node is None:
            return f"{self.file}: there is no {self.function} in this version"
        have = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        missing = [name for name in self.parameters if name not in have]
        if not missing:
            return None
        return f"{self.file}: {self.function} should take {', '.join(missing)}, and takes ({', '.join(have)})"


@dataclass(frozen=True, slots=True)
class ContainsStrings:
    """A file contains these strings: keys that are kept, attributes that are read."""

    file: str
    texts: tuple[str, ...]
    what: str

    def problem(self, tree: ast.Module) -> str | None:
        have = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        missing = [text for text in self.texts if text not in have]
        return f"{self.file}: {self.what} should include {', '.join(missing)}" if missing else None


Fact = CallSite | Takes | ContainsStrings

SLIME: tuple[Fact, ...] = (
    CallSite(
        "rollout/sglang_rollout.py",
        "custom_generate_func",
        "args, sample, sampling_params, evaluation=evaluation",
    ),
    CallSite("rollout/rm_hub/__init__.py", "rm_function", "args, sample, **kwargs"),
    CallSite("ray/rollout.py", "custom_reward_post_process_func", "self.args, samples"),
    CallSite("ray/rollout.py", "custom_convert_samples_to_train_data_func", "self.args, samples"),
    CallSite(
        "observability/rollout_metrics.py",
        "custom_log_func",
        "rollout_id, args, samples, rollout_extra_metrics, rollout_time",
    ),
    CallSite("rollout/base_types.py", "fn", "*args, **kwargs, evaluation=evaluation"),
    CallSite(
        "ray/rollout.py",
        "call_rollout_fn",
        "self.generate_rollout, self.args, rollout_id, self.data_source, evaluation=False",
    ),
    ContainsStrings(
        "ray/rollout.py",
        (
            *("tokens", "multimodal_train_inputs", "response_lengths", "rewards", "truncated", "loss_masks"),
            *("sample_indices", "rollout_ids", "rollout_mask_sums", "rollout_log_probs", "prompt", "raw_reward"),
        ),
        "what is kept of a sample",
    ),
    Takes("utils/dp_schedule.py", "build_dp_schedule", ("global_batch_size", "rollout_indices")),
    CallSite("backends/megatron_utils/initialize.py", "custom_init", "args"),
    CallSite(
        "backends/megatron_utils/model_provider.py",
        "custom_model_provider",
        "pre_process=pre_process, post_process=post_process, vp_stage=vp_stage",
    ),
    CallSite("backends/megatron_utils/actor.py", "rollout_data_postprocess", "self.args, rollout_id, rollout_data"),
    CallSite(
        "backends/megatron_utils/model.py",
        "custom_before_train_step_hook",
        "args, rollout_id, step_id, model, optimizer, opt_param_scheduler",
    ),
    CallSite("backends/megatron_utils/loss.py", "func", "args, batch, logits, sum_of_sample_mean"),
    ContainsStrings(
        "backends/megatron_utils/model.py",
        (
            *("multimodal_train_inputs", "total_lengths", "response_lengths", "loss_masks", "log_probs"),
            *("ref_log_probs", "advantages", "rollout_log_probs", "rollout_mask_sums"),
        ),
        "what a loss is given",
    ),
    ContainsStrings(
        "backends/megatron_utils/data.py",
        ("unconcat_tokens", "packed_seq_params", "multimodal_train_inputs", "thd"),
        "what a micro-batch has",
    ),
    Takes("backends/megatron_utils/cp_utils.py", "slice_with_cp", ("tokens", "pad_value")),
)
"""Paths count from the package slime."""

MEGATRON: tuple[Fact, ...] = (
    Takes("models/gpt/gpt_model.py", "GPTModel._postprocess", ("hidden_states", "packed_seq_params")),
    Takes("models/gpt/gpt_model.py", "GPTModel.__init__", ("transformer_layer_spec", "vp_stage", "pg_collection")),
    Takes("models/gpt/gpt_layer_specs.py", "get_gpt_layer_with_transformer_engine_spec", ("qk_layernorm",)),
    Takes(
        "pipeline_parallel/schedules.py",
        "forward_backward_pipelining_without_interleaving",
        ("forward_only", "p2p_communicator", "pg_collection"),
    ),
    Takes(
        "process_groups_config.py",
        "ProcessGroupCollection.use_mpu_process_groups",
        ("required_pgs",),
    ),
    Takes(
        "tensor_parallel/mappings.py", "gather_from_sequence_parallel_region", ("tensor_parallel_output_grad", "group")
    ),
    Takes("transformer/transformer_block.py", "get_num_layers_to_build", ("vp_stage", "pp_rank")),
)
"""Paths count from the package megatron.core."""


def contract_problems(slime: Path | None = None, megatron: Path | None = None) -> Iterator[str]:
    """Yield what does not hold for the packages in these folders, by default the installed ones."""
    for name, commit, folder, facts in (
        ("slime", SLIME_COMMIT, slime or _package("slime"), SLIME),
        ("megatron.core", MEGATRON_COMMIT, megatron or _package("megatron.core"), MEGATRON),
    ):
        if folder is None:
            yield f"{name}: not installed; docker/slime.Dockerfile has all that a job needs"
            continue
        found = list(_broken(folder, facts))
        for problem in found:
            yield f"{name}/{problem}"
        if found:
            yield f"{name}: this plugin is built for commit {commit[:7]}; install that one, or a plugin for yours"


def _broken(folder: Path, facts: tuple[Fact, ...]) -> Iterator[str]:
    trees: dict[str, ast.Module | None] = {}
    for fact in facts:
        if fact.file not in trees:
            try:
                trees[fact.file] = ast.parse((folder / fact.file).read_text(encoding="utf-8"))
            except (OSError, SyntaxError):
                trees[fact.file] = None
        tree = trees[fact.file]
        problem = f"{fact.file}: not there, or not readable" if tree is None else fact.problem(tree)
        if problem is not None:
            yield problem


def _package(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent package is not installed
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _is(node: ast.Call, callee: str) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    return name == callee


def _arguments(node: ast.Call) -> str:
    """The arguments as written, on one line."""
    return ", ".join(
        [
            *(ast.unparse(argument) for argument in node.args),
            *(f"{k.arg}={ast.unparse(k.value)}" if k.arg else f"**{ast.unparse(k.value)}" for k in node.keywords),
        ]
    )


def _function(node: ast.AST, path: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and len(path) > 1 and child.name == path[0]:
            return _function(child, path[1:])
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and path == [child.name]:
            return child
    return None
