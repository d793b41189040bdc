"""What one update costs under each method: the path that trains, on a random model and rollouts of four shapes.

    python -m benchmarks.cost [--scale 0.15] [--repeat 11] [--quick] [--json FILE]

Prints a table per shape, the targets with what was measured, and what a plain chain costs beside stock Megatron.

An update runs from the record to the gradients through slime's hooks: layout, conversion, packing, SDCC's teacher,
forward, loss, backward; log-probability passes and the optimizer are left out. Methods take turns within each
repetition, only CPU time of this process counts, and every ratio is the median over repetitions of the ratio to the
baseline *of the same repetition*, because machines are noisy. Three baselines:

H_comp     one pass over the last view: naive_compressed itself
chain      one pass over a plain chain of as many tokens as the prefix tree has, as many of them trained
logittree  a chain per branch; for the append-only shape, a chain per turn

FLOPs are those of the model, whatever a kernel recomputes. With P parameters in the linear layers, a the width of all
query heads together, h the hidden size and V the vocabulary, a forward pass has

    2 P per token + 4 a layers per query-key pair + 2 h V per token

and the backward pass twice as many; the teacher has no backward pass, and a row of the head per diverging leaf.

Lengths at scale 1 are those of real rollouts. The model is a tenth of Qwen3-4B in width, so the default scale makes
contexts shorter too: attention has then about the share in the FLOPs that it has in Qwen3-4B at full length.

Peak memory is how far the resident set of a fresh process, which already holds the model and room for its gradients,
grows during one update.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import slime_plugin.train  # noqa: F401  # before Megatron: it silences what that says about missing GPU libraries

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.shapes import SHAPES, shaped_record
from slime_plugin.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.config.objective import Objective
from slime_plugin.config.parallel import Parallelism
from slime_plugin.config.trainer import Trainer
from slime_plugin.hooks import train as hooks
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.local.passes import Passes
from slime_plugin.local.timing import device_name, plain_chains, ratios, time_in_turns
from slime_plugin.methods import Layout, Row, lay_out, method_of
from slime_plugin.methods.row import chain_row
from slime_plugin.planner.phases import forward_flops
from slime_plugin.record import Record
from slime_plugin.slime.args import args_of
from slime_plugin.slime.batch import Batch, LaidOut
from slime_plugin.slime.packed_model import PackedTreeModel
from slime_plugin.slime.training import open_training
from slime_plugin.train.layers import RMSNorm
from slime_plugin.train.pipeline import run_schedule, wrap_for_training
from slime_plugin.train.process_groups import start_groups
from slime_plugin.train.transformer_config import transformer_config
from slime_plugin.train.tree_model import build_model
from slime_plugin.train.tree_plan import plan_tree
from slime_plugin.train.vocabulary import Shard, token_statistics
from slime_plugin.tree import Trajectory, count
from slime_plugin.tree.places import places_of

MODEL = Architecture(
    vocabulary=8_192,
    hidden=256,
    layers=4,
    heads=4,
    groups=2,
    head_size=64,
    feed_forward=768,
    norm_epsilon=1e-6,
    rotary_base=1e6,
    max_positions=32_768,
    tied=True,
)
OBJECTIVE = Objective(kl=0.0)
NOISE = 1.05
"""How far two measurements of the same computation may be apart."""

H_COMP, CHAIN, PER_BRANCH, TRIE, SDCC = "naive_compressed", "chain of N_trie", "logittree", "mask4d trie", "sdcc"


@dataclass(frozen=True, slots=True)
class Arrange:
    """How a rollout becomes training input: by a method, or by another layout that is trained as by that method."""

    method: MethodSettings
    other: Callable[[Trajectory], Layout] | None = None

    def __call__(self, trajectory: Trajectory) -> Layout:
        return lay_out(trajectory, self.method) if self.other is None else self.other(trajectory)


def chain_of_trie(trajectory: Trajectory) -> Layout:
    """As many tokens as the prefix tree has, as a chain."""
    return plain_chains(lay_out(trajectory, Mask4d()))


def split_per_turn(trajectory: Trajectory) -> Layout:
    """One training sample per turn: all that came before it, and only its own sampled tokens trained.

    This is what pipelines do that treat every call of the model as a sample. Without edits logittree is a single chain,
    so for the append-only shape this stands in its place.
    """
    record = trajectory.record
    edges = np.flatnonzero(np.diff(record.generated.astype(np.int8), prepend=0, append=0))  # each turn's begin and end
    rows = []
    for begin, end in edges.reshape(-1, 2).tolist():
        tape = np.arange(end, dtype=np.int32)
        rows.append(chain_row(record, tape, tape >= begin))
    return Layout("logittree", tuple(rows))


def contenders(shape: str) -> dict[str, Arrange]:
    """What is measured for a shape."""
    return {
        H_COMP: Arrange(NaiveCompressed()),
        "naive_full": Arrange(NaiveFull()),
        PER_BRANCH: Arrange(LogitTree(), split_per_turn if shape == "append-only" else None),
        "mask4d replicated": Arrange(Mask4d(packing="replicated")),
        TRIE: Arrange(Mask4d()),
        SDCC: Arrange(Sdcc(warmup=0)),
        CHAIN: Arrange(LogitTree(), chain_of_trie),
    }


def flops(layout: Layout, model: Architecture = MODEL) -> float:
    """Of one update; the formula is at the top of this file."""
    trained = sum(_forward_flops(row, len(row), model) for row in layout.rows)
    teacher = sum(_forward_flops(teacher.row, len(teacher.student), model) for teacher in layout.teachers)
    return 3 * trained + teacher


def _forward_flops(row: Row, head_rows: int, model: Architecture) -> float:
    pairs = int(row.position.sum(dtype=np.int64)) + len(row)  # a token sees its ancestors and itself
    return forward_flops(model, len(row), pairs, head_rows)


@dataclass(frozen=True, slots=True)
class Engine:
    """A model with gradient buffers, in a world of one process."""

    models: list[Any]
    groups: ProcessGroupCollection

    def zero(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()


def start_world() -> ProcessGroupCollection:
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing from torch's list of exports
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return start_groups(Parallelism())


def make_engine(
    groups: ProcessGroupCollection, build: Callable[[TransformerConfig, ProcessGroupCollection], torch.nn.Module]
) -> Engine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about what is not installed
        config = transformer_config(MODEL, Parallelism())
        model = build(config, groups)
        randomise(model)
        return Engine(wrap_for_training(config, [model], groups), groups)


def tree_model(config: TransformerConfig, groups: ProcessGroupCollection) -> torch.nn.Module:
    return build_model(config, groups, MODEL, kind=PackedTreeModel)


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:  # of a norm
            parameter.fill_(1.0)


def update(engine: Engine, record: Record, arrange: Arrange) -> None:
    """From a record to gradients; every row is a micro-batch of its own."""
    trajectory = Trajectory.of(record)
    rollout = LaidOut(0, record, trajectory, arrange(trajectory), places_of(trajectory), advantage=1.0)
    cell = Cell(
        model=model_folder(), method=arrange.method, objective=OBJECTIVE, trainer=Trainer(iterations=1, steps=1)
    )
    args = args_of(cell)
    training = open_training(args, engine.groups, engine.models[0].config)
    batch = Batch(method_of(arrange.method), (rollout,))
    (data,) = split_batch(batch.train_data(), replicas=1, steps=1, batch_tokens=1)
    data["advantages"] = [torch.ones(len(logged)) for logged in data["rollout_log_probs"]]
    hooks.rollout_data_postprocess(args, 0, data)
    hooks.before_train_step(args, 0, 0, engine.models, None, None)
    Passes(args, training, engine.models).update(data, 0)


@functools.cache
def model_folder() -> Path:
    """A folder with the model's configuration, which is all that is read of it."""
    folder = Path(tempfile.mkdtemp(prefix="memorywalker-cost-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = {
        "model_type": "qwen3",
        "vocab_size": MODEL.vocabulary,
        "hidden_size": MODEL.hidden,
        "num_hidden_layers": MODEL.layers,
        "num_attention_heads": MODEL.heads,
        "num_key_value_heads": MODEL.groups,
        "head_dim": MODEL.head_size,
        "intermediate_size": MODEL.feed_forward,
        "rms_norm_eps": MODEL.norm_epsilon,
        "rope_theta": MODEL.rotary_base,
        "max_position_embeddings": MODEL.max_positions,
        "tie_word_embeddings": MODEL.tied,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def plan_only(record: Record, arrange: Arrange) -> None:
    """What an update does before it computes anything."""
    for row in arrange(Trajectory.of(record)).rows:
        plan_tree(row.parent)


def peak_growth(shape: str, scale: float, name: str) -> int:
    """Bytes. For a fresh process: it never has more resident before than it has at the peak of the update."""
    engine = make_engine(start_world(), tree_model)
    record = shaped_record(shape, scale=scale, vocabulary=MODEL.vocabulary)
    update(engine, shaped_record(shape, scale=0.01, vocabulary=MODEL.vocabulary), Arrange(NaiveCompressed()))
    engine.zero()
    before = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    update(engine, record, contenders(shape)[name])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


@dataclass(frozen=True, slots=True)
class Cost:
    """One method on one rollout."""

    tokens: int
    teacher_tokens: int
    flops: float
    seconds: list[float]
    """CPU time of an update, per repetition."""
    peak: int
    """Bytes."""

    def over(self, baseline: Cost) -> list[float]:
        """Per repetition."""
        return ratios(self.seconds, baseline.seconds)


@dataclass(frozen=True, slots=True)
class ShapeCosts:
    """All methods on one rollout."""

    shape: str
    description: str
    costs: dict[str, Cost]
    planning: float
    """CPU seconds to build and plan the prefix tree."""


def in_turns(
    actions: Mapping[str, Callable[[], object]], repeat: int, what: str, prepare: Callable[[], None]
) -> dict[str, list[float]]:
    """CPU seconds of each action, per repetition."""

    def report(repetition: int, name: str, seconds: float) -> None:
        progress(f"{what}, repetition {repetition + 1} of {repeat}: {name} {seconds:.2f} s")

    return time_in_turns(actions, repeat, prepare=lambda name: prepare(), clock=time.process_time, on_timed=report)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure_shape(engine: Engine, shape: str, scale: float, repeat: int, pool: ProcessPoolExecutor) -> ShapeCosts:
    record = shaped_record(shape, scale=scale, vocabulary=MODEL.vocabulary)
    trajectory = Trajectory.of(record)
    arranged = contenders(shape)
    peaks = {name: pool.submit(peak_growth, shape, scale, name) for name in arranged}
    for name, peak in peaks.items():
        progress(f"{shape}, peak memory: {name} {peak.result() / 1e6:.0f} MB")
    actions = {name: functools.partial(update, engine, record, arrange) for name, arrange in arranged.items()}
    actions[H_COMP]()  # the first update of a size finds neither memory nor caches warm
    seconds = in_turns(actions, repeat, shape, engine.zero)
    costs = {}
    for name, arrange in arranged.items():
        layout = arrange(trajectory)
        costs[name] = Cost(layout.tokens, layout.teacher_tokens, flops(layout), seconds[name], peaks[name].result())
    planned = time_in_turns({TRIE: lambda: plan_only(record, arranged[TRIE])}, 20, clock=time.process_time)
    planning = statistics.median(planned[TRIE])
    n = count(trajectory)
    description = f"K={n.K}, L={n.L:,}, C={n.C:,}, N_trie={n.trie_tokens:,}, R={n.R:,}, D={n.D:,}"
    return ShapeCosts(shape, description, costs, planning)


class TorchAttention(MegatronModule):  # type: ignore[misc]  # megatron-core is not typed
    """Core attention that knows plain causal sequences only, on the kernel that tree attention uses on CPUs."""

    def __init__(self, config: TransformerConfig, **stock: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[n, 1, heads * d] from query [n, 1, heads, d], key and value [n, 1, groups, d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [1, heads, n, d]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def stock_model(
    config: TransformerConfig, groups: ProcessGroupCollection, core_attention: type | None = None
) -> torch.nn.Module:
    """Megatron's own GPT with its own attention, or with another in that place. Norms are ours: its own need CUDA."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = attention.q_layernorm = attention.k_layernorm = RMSNorm
    if core_attention is not None:
        attention.core_attention = ModuleSpec(module=core_attention)
    model: torch.nn.Module = GPTModel(
        config,
        transformer_layer_spec=TransformerBlockSubmodules([spec] * MODEL.layers, layer_norm=RMSNorm),
        vocab_size=MODEL.vocabulary,
        max_sequence_length=MODEL.max_positions,
        share_embeddings_and_output_weights=MODEL.tied,
        position_embedding_type="rope",
        rotary_base=MODEL.rotary_base,
        pg_collection=groups,
    )
    return model


def mean_loss(logits: Tensor, targets: Tensor, groups: ProcessGroupCollection) -> Tensor:
    logprobs, _ = token_statistics(logits, targets, Shard.of(MODEL.vocabulary, logits.shape[1], groups.tp))
    return -logprobs.mean()


def run_chain(engine: Engine, tokens: np.ndarray) -> float:
    """Forward and backward of a plain chain as a tree without forks, every token trained; the loss."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)

    def finish(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = mean_loss(logits[0, :-1], ids[0, 1:], engine.groups)
        return loss, torch.ones((), dtype=torch.int), loss.detach()

    def forward_step(_: Iterator[None], model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return model(input_ids=ids, packed_seq_params=packed), finish

    (loss,) = run_schedule(engine.models, [None], forward_step, engine.groups, forward_only=False)
    return float(loss)


def run_stock_chain(engine: Engine, tokens: np.ndarray) -> float:
    """The same through a stock model, on the same schedule."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)[None, None]

    def finish(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = mean_loss(logits[0, :-1], ids[0, 1:], engine.groups)
        return loss, torch.ones((), dtype=torch.int), loss.detach()

    def forward_step(_: Iterator[None], model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return model(input_ids=ids, position_ids=None, attention_mask=hidden), finish

    (loss,) = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([None]),
        model=engine.models,
        num_microbatches=1,
        seq_length=len(tokens),
        micro_batch_size=1,
        forward_only=False,
        p2p_communicator=P2PCommunicator(engine.groups.pp, engine.models[0].config),
        pg_collection=engine.groups,
    )
    return float(loss)


TREE_MODEL, STOCK, STOCK_KERNEL = "tree model", "stock Megatron", "stock Megatron with torch's flash attention"


def measure_stock(engine: Engine, scale: float, repeat: int) -> dict[str, list[float]]:
    """CPU seconds of the append-only rollout as one chain, through our model and through stock ones."""
    tokens = shaped_record("append-only", scale=scale, vocabulary=MODEL.vocabulary).tokens
    stock = make_engine(engine.groups, stock_model)
    with_kernel = make_engine(engine.groups, functools.partial(stock_model, core_attention=TorchAttention))
    actions = {
        TREE_MODEL: functools.partial(run_chain, engine, tokens),
        STOCK: functools.partial(run_stock_chain, stock, tokens),
        STOCK_KERNEL: functools.partial(run_stock_chain, with_kernel, tokens),
    }

    def prepare() -> None:
        for each in (engine, stock, with_kernel):
            each.zero()

    prepare()
    losses = [action() for action in actions.values()]  # the same weights, so the same loss
    assert np.ptp(losses) < 1e-4, losses
    return in_turns(actions, repeat, f"a chain of {len(tokens):,} tokens", prepare)


@dataclass(frozen=True, slots=True)
class Target:
    """A number that was asked for, and what it was in each repetition; the median counts."""

    what: str
    shape: str
    measured: list[float]
    limit: float
    at_least: bool = False
    percent: bool = False

    @property
    def passed(self) -> bool:
        """False also for what is not a number."""
        median = statistics.median(self.measured)
        return median >= self.limit if self.at_least else median <= self.limit

    def row(self) -> str:
        number = "{:.2%}" if self.percent else "{:.3f}"
        median, low, high, limit = (
            number.format(x)
            for x in (statistics.median(self.measured), min(self.measured), max(self.measured), self.limit)
        )
        sign, verdict = ">=" if self.at_least else "<=", "pass" if self.passed else "**FAIL**"
        return f"| {self.what} | {self.shape} | {median} | {low} to {high} | {sign} {limit} | {verdict} |"


def targets(measured: Sequence[ShapeCosts], stock: dict[str, list[float]]) -> Iterator[Target]:
    for m in measured:
        yield Target("trie / chain of N_trie tokens", m.shape, m.costs[TRIE].over(m.costs[CHAIN]), 1.15)
    for m in measured:
        if m.shape in ("append-only", "offload"):
            yield Target("trie / H_comp", m.shape, m.costs[TRIE].over(m.costs[H_COMP]), 1.10)
    for m in measured:
        taken, bound = m.costs[TRIE].over(m.costs[PER_BRANCH]), m.costs[TRIE].flops / m.costs[PER_BRANCH].flops
        faster, saved = [bound / x for x in taken], [(1 - x) / (1 - bound) for x in taken]
        yield Target("speed-up over logittree / possible", m.shape, faster, 0.9, at_least=True, percent=True)
        yield Target("time saved over logittree / possible", m.shape, saved, 0.9, at_least=True, percent=True)
    for m in measured:
        if m.shape in ("append-only", "offload"):
            limit = NOISE if m.shape == "append-only" else 1.5
            yield Target("SDCC / H_comp", m.shape, m.costs[SDCC].over(m.costs[H_COMP]), limit)
    for m in measured:
        share = [m.planning / seconds for seconds in m.costs[TRIE].seconds]
        yield Target("building and planning the trie / its update", m.shape, share, 0.01, percent=True)
    for name in (STOCK, STOCK_KERNEL):
        yield Target(f"plain chain / {name}", "append-only", ratios(stock[TREE_MODEL], stock[name]), NOISE)


EXPLANATION = """\
Measured is the median over repetitions, then the range. Possible is what the ratio of model FLOPs allows. A speed-up is
a quotient of times, so its share is strict where much can be saved; time saved is a difference, so its share is strict
where little can, and where little can it is mostly noise."""


def print_shape(m: ShapeCosts) -> None:
    print(f"\n### {m.shape}: {m.description}\n")
    print("| method | tokens | no gradient | GFLOP | CPU s | GFLOP/s | / H_comp | / chain | / logittree | peak MB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, cost in m.costs.items():
        bases = (m.costs[base] for base in (H_COMP, CHAIN, PER_BRANCH))
        times = " | ".join(f"{statistics.median(cost.over(base)):.2f}" for base in bases)
        seconds = statistics.median(cost.seconds)
        label = "logittree: split per turn" if (m.shape, name) == ("append-only", PER_BRANCH) else name
        work = f"{cost.tokens:,} | {cost.teacher_tokens:,} | {cost.flops / 1e9:,.0f}"
        speed = f"{seconds:.2f} | {cost.flops / 1e9 / seconds:.0f}"
        print(f"| {label} | {work} | {speed} | {times} | {cost.peak / 1e6:,.0f} |", flush=True)


def print_targets(measured: Sequence[ShapeCosts], stock: dict[str, list[float]]) -> None:
    print("\n### Targets\n\n| what | shape | measured | range | target | |\n|---|---|---|---|---|---|")
    for target in targets(measured, stock):
        print(target.row())
    print(f"\n{EXPLANATION}\n{noise(measured)}")


def noise(measured: Sequence[ShapeCosts]) -> str:
    (plain,) = (m.costs for m in measured if m.shape == "append-only")
    same = [statistics.median(cost.over(plain[H_COMP])) for name, cost in plain.items() if name != PER_BRANCH]
    return (
        f"Noise: without edits {len(same)} contenders compute the same row; their ratios to H_comp are "
        f"{min(same):.2f} to {max(same):.2f}."
    )


def machine() -> str:
    versions = f"torch {torch.__version__}, megatron-core {version('megatron-core')}"
    return f"{device_name()}, {os.cpu_count()} cores (one used), {versions}, float32"


def write_json(path: Path, measured: Sequence[ShapeCosts], stock: dict[str, list[float]], settings: Any) -> None:
    content = {
        "machine": machine(),
        **settings,
        "model": asdict(MODEL),
        "shapes": [asdict(m) for m in measured],
        "stock": stock,
        "targets": [asdict(target) | {"passed": target.passed} for target in targets(measured, stock)],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.15, help="factor on all lengths (default: 0.15)")
    parser.add_argument("--repeat", type=int, default=11, help="repetitions (default: 11)")
    parser.add_argument("--quick", action="store_true", help="a smoke test: scale 0.02, one repetition, no meaning")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    options = parser.parse_args()
    if options.quick:
        options.scale, options.repeat = 0.02, 1
    return options


def main() -> None:
    options = parse_options()
    engine = make_engine(start_world(), tree_model)
    print(machine())
    print(f"scale {options.scale:g}, {options.repeat} repetitions, {MODEL}")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["benchmarks.shapes", "slime_plugin.slime.training"])
    measured = []
    with ProcessPoolExecutor(2, processes, max_tasks_per_child=1) as pool:
        for shape in SHAPES:
            measured.append(measure_shape(engine, shape, options.scale, options.repeat, pool))
            print_shape(measured[-1])
    stock = measure_stock(engine, options.scale, options.repeat)
    print_targets(measured, stock)
    if options.json is not None:
        write_json(options.json, measured, stock, {"scale": options.scale, "repeat": options.repeat})


if __name__ == "__main__":
    main()
