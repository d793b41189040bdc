"""The arithmetic of ``memorywalker plan``, against numbers worked out by hand for Qwen3-4B."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.black_box.driver import FoldingAgentDriver
from slime_plugin.architecture import PUBLISHED
from slime_plugin.config.custom import NoSettings
from slime_plugin.config.frozen import models_in, tag_of
from slime_plugin.config.harness import BlackBox, Harness
from slime_plugin.config.method import METHODS, LogitTree, Mask4d
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.trainer import Trainer
from slime_plugin.config.workload import Workload
from slime_plugin.methods import lay_out, method_of
from slime_plugin.planner.job import GPUS, MAY_BE_ZERO, counted_workload
from slime_plugin.planner.memory import GB, rank_parameters
from slime_plugin.record import Edit, Meta, Record, Span
from slime_plugin.rollout.editors import Editor
from slime_plugin.tree import Trajectory, branches_of, build_trie
from tests.cli import run
from tests.cluster.tables import CELLS, CONFIGS, NODES, memory_table, method_table, planned, time_table
from tests.conftest import ROOT, example

WORKLOADS = {
    kind: model.workload  # type: ignore[attr-defined]  # of every harness model
    for model in models_in(Harness)
    if (kind := tag_of(model)) is not None  # not of a harness by import path
}
QWEN = PUBLISHED["Qwen3-4B"]


# Memory


def test_the_parameters_are_the_published_ones() -> None:
    assert QWEN.parameters == 4_022_468_096
    assert rank_parameters(QWEN, Trainer()) == 4_022_468_096


def test_a_rank_of_two_and_four_replicas_by_hand() -> None:
    attention = 2560 * 4096 + 2 * 2560 * 1024 + 4096 * 2560  # q, k and v, o
    feed_forward = 3 * 2560 * 9728  # gate, up, down
    norms = 2560 + 2560 + 128 + 128
    half = 36 * ((attention + feed_forward) // 2 + norms) + 151_936 // 2 * 2560 + 2560
    assert half == 2_011_332_096
    rank = planned("tc_rag-logittree", "trainer.tp=2").rank
    assert rank.weights == 2 * half
    assert rank.gradients == 4 * half
    assert rank.optimizer == 3 * half  # 12 bytes on 4 replicas
    tokens = 32_768
    assert rank.logits == tokens * 75_968 * 8  # half the vocabulary; float32 twice
    inputs = 36 * 1280 * 2  # each layer's input, half of it on each rank
    layer = 2 * (4 * 1280 + 3 * 16 * 128 + 3 * 4 * 128 + 3 * 4864)  # 16 query heads, 4 key-value heads, 4864 columns
    assert rank.activations == tokens * (inputs + 2 * layer)
    queries, keys_and_values = 16 * 128, 2 * 4 * 128  # gradients that FlashAttention 3 sums in float32
    assert (rank.keys, rank.teacher) == (tokens * 4 * (queries + keys_and_values), 0)
    assert rank.total == rank.states + rank.activations + rank.logits + rank.keys
    assert round(rank.total / GB, 1) == 53.0
    older = planned("tc_rag-logittree", "trainer.tp=2", gpu="a100").rank
    assert older.keys == tokens * (4 * queries + 2 * 2 * queries)  # version 2 writes those of keys per query head


def test_without_recomputation_every_layer_is_kept() -> None:
    kept = planned("tc_rag-logittree", "trainer.recompute=false")
    layer = 2 * (4 * 640 + 3 * 8 * 128 + 3 * 2 * 128 + 3 * 2432)
    assert kept.rank.activations == 32_768 * 37 * layer
    again = planned("tc_rag-logittree")
    assert again.rank.activations < kept.rank.activations / 5


def test_pipeline_stages_hold_several_micro_batches() -> None:
    one, two = (planned("tc_rag-logittree", f"trainer.pp={pp}", "trainer.tp=1", "trainer.sp=false") for pp in (1, 2))
    assert two.rank.activations == one.rank.activations, "half the layers of two micro-batches"
    assert two.rank.weights < one.rank.weights
    stages = ("tc_rag-logittree", "trainer.tp=2", "trainer.pp=4")
    plain, interleaved = (planned(*stages, f"trainer.vpp={vpp}") for vpp in (1, 3))
    kept = interleaved.rank.activations - plain.rank.activations
    assert kept == 32_768 * 9 * 1280 * 2, "a quarter of 36 layers more"


def test_what_sdcc_adds() -> None:
    sdcc, naive = planned("tc_rag-sdcc").rank, planned("tc_rag-naive_compressed").rank
    assert sdcc.logits - naive.logits == pytest.approx(naive.logits * 2100 / 9400, rel=1e-5)
    assert sdcc.teacher == 4 * 2100 * 2560 * 2  # four rollouts of a step on each replica


def test_an_engine_by_hand() -> None:
    engine = planned("tc_rag-mask4d").engine
    assert engine.kv_token == 147_456 == 36 * 2 * 8 * 128 * 2
    assert engine.weights == 8_044_936_192
    assert engine.kv_tokens == (56_000_000_000 - 8_044_936_192) // 147_456 == 325_216
    assert engine.contexts == pytest.approx(9.925, abs=1e-3)
    assert engine.concurrency == 8
    two = planned("tc_rag-mask4d", "cluster.engine_gpus=2").engine
    assert (two.kv_token, two.weights) == (73_728, 4_022_468_096)
    many = planned("tc_rag-mask4d", "cluster.engine_gpus=16", nodes=2).engine
    assert many.kv_token == 147_456 // 8, "a key-value head is the least that a GPU can hold"


def test_the_host_by_hand() -> None:
    half = 2_011_332_096
    halved = ("tc_rag-logittree", "trainer.tp=2")
    assert planned(*halved).host == 8 * (2 + 2 + 3) * half  # policy, reference, 12 bytes / 4
    assert planned(*halved, "objective.kl=0").host == 8 * (2 + 3) * half
    apart = planned(*halved, "cluster.rollout_nodes=1", nodes=2)
    assert apart.host == 8 * (2 + 2) * half, "a trainer that does not sleep keeps its optimizer"


def test_the_longest_row_is_the_one_that_just_fits() -> None:
    room = planned("tc_rag-mask4d").longest_row
    assert planned("tc_rag-mask4d", f"method.budget={room}").problems == ()
    (problem,) = planned("tc_rag-mask4d", f"method.budget={room + 100}").problems
    assert f"{room:,} fit" in problem
    assert "method.budget" in problem


@given(tp=st.sampled_from([1, 2, 4]), name=st.sampled_from(CELLS), nodes=st.sampled_from(NODES))
def test_a_finer_split_never_takes_more(tp: int, name: str, nodes: int) -> None:
    coarse, fine = (
        planned(name, f"trainer.tp={n}", f"trainer.sp={str(n > 1).lower()}", "trainer.steps=1", nodes=nodes)
        for n in (tp, 2 * tp)
    )
    for part in ("weights", "gradients", "activations", "logits", "keys"):
        assert getattr(fine.rank, part) <= getattr(coarse.rank, part)
    assert fine.rank.total <= coarse.rank.total
    assert fine.longest_row >= coarse.longest_row
    assert fine.flops == coarse.flops


@given(name=st.sampled_from(CELLS), prompts=st.integers(4, 64), gpu=st.sampled_from(sorted(GPUS)))
def test_twice_the_nodes(name: str, prompts: int, gpu: str) -> None:
    settings = (f"trainer.prompts={prompts}", "trainer.steps=1", "cluster.engine_gpus=1")
    once, twice = (planned(name, *settings, f"cluster.nodes={n}", gpu=gpu) for n in (2, 4))
    assert twice.rank.total <= once.rank.total, "the optimizer is dealt out to more"
    assert twice.phases.update == pytest.approx(once.phases.update / 2)
    assert twice.phases.sampling <= once.phases.sampling
    assert twice.phases.sync == once.phases.sync
    assert twice.flops == once.flops


# Tokens


class Typical:
    """A rollout as ``slime_plugin/config/harness.py`` describes it."""

    def __init__(self, prompt: int) -> None:
        self.live: list[Span] = []
        self.generated: list[bool] = []
        self.views: list[tuple[Span, ...]] = []
        self.results: list[Span] = []
        self.prompt = self.add(prompt, sampled=False)

    def add(self, tokens: int, *, sampled: bool) -> Span:
        span = (len(self.generated), len(self.generated) + tokens)
        self.generated += [sampled] * tokens
        self.live.append(span)
        return span

    def turn(self, result: int = 900) -> None:
        self.add(300, sampled=True)
        self.results.append(self.add(result, sampled=False))

    def edit(self, live: Sequence[Span]) -> None:
        self.views.append(tuple(self.live))
        self.live = list(live)

    def record(self) -> Record:
        self.add(300, sampled=True)  # the answer
        size = len(self.generated)
        sampled = np.array(self.generated)
        return Record(
            tokens=np.arange(size),
            generated=sampled,
            logprobs=np.where(sampled, -1.0, np.nan),
            views=[*self.views, tuple(self.live)],
            edits=[Edit("unknown", "policy")] * len(self.views),
            meta=Meta(id="typical", harness="typical", group=0, reward=1.0),
        )


def search_r1(rollout: Typical) -> None:
    for _ in range(9):
        rollout.turn()


def tc_rag(rollout: Typical) -> None:
    for turn in range(1, 10):
        rollout.turn()
        if turn in (3, 5, 8):
            oldest = rollout.results.pop(0)
            rollout.edit([span for span in rollout.live if span != oldest])


def agentfold(rollout: Typical) -> None:
    for _ in range(9):
        rollout.turn()
        if sum(stop - start for start, stop in rollout.live) > 3000:
            rollout.add(60, sampled=False)  # the request
            rollout.edit([rollout.prompt, rollout.add(300, sampled=True)])


def memexrl(rollout: Typical) -> None:
    everything = list(rollout.live)
    for turn in range(1, 10):
        rollout.turn()
        everything += rollout.live[-2:]
        if turn in (4, 7):
            rollout.edit([span for span in rollout.live if span not in rollout.results])
            rollout.add(20, sampled=False)  # the stub
    rollout.edit(everything)


def black_box(rollout: Typical) -> None:
    for turn in range(1, 10):
        rollout.turn(1500)
        if turn == 7:
            rollout.edit([rollout.prompt, rollout.add(600, sampled=True)])


SHAPES: dict[str, tuple[int, Callable[[Typical], None]]] = {
    "search_r1": (1_000, search_r1),
    "tc_rag": (1_000, tc_rag),
    "agentfold": (1_000, agentfold),
    "memexrl": (1_000, memexrl),
    "claude_code": (15_000, black_box),
    "opencode": (15_000, black_box),
}


def typical(harness: str) -> Record:
    prompt, shape = SHAPES[harness]
    rollout = Typical(prompt)
    shape(rollout)
    return rollout.record()


@pytest.mark.parametrize("harness", WORKLOADS)
def test_the_estimates_are_of_the_rollout_that_is_described(harness: str) -> None:
    found, estimate = counted_workload([typical(harness)]), WORKLOADS[harness]
    for key in ("sampled", "tape", "final", "branches", "branch_tokens", "trie_tokens", "teacher_tokens", "leaves"):
        assert getattr(found, key) == getattr(estimate, key), key
    assert estimate.longest_tape > found.longest_tape


class OwnEditor(Editor[NoSettings]):
    """An editor that does not say how large its rollouts are."""


class SizedEditor(Editor[NoSettings]):
    workload = WORKLOADS["memexrl"]


class SizedDriver(FoldingAgentDriver):
    workload = WORKLOADS["opencode"]


@pytest.mark.parametrize(
    ("harness", "workload"),
    [
        (f"{{type: '{__name__}:OwnEditor'}}", WORKLOADS["tc_rag"]),
        (f"{{type: '{__name__}:SizedEditor'}}", WORKLOADS["memexrl"]),
        ("{type: 'examples.black_box.driver:FoldingAgentDriver', corpus: facts.jsonl}", BlackBox.workload),
        (f"{{type: '{__name__}:SizedDriver', corpus: facts.jsonl}}", WORKLOADS["opencode"]),
    ],
)
def test_a_harness_of_ones_own_is_planned_as_what_it_is(harness: str, workload: Workload) -> None:
    plan = planned("tc_rag-mask4d", f"harness={harness}")
    assert plan.job.workload == workload
    agents = "corpus" in harness
    assert plan.job.concurrency == (16 if agents else 64)
    assert any("harness.processes" in note for note in plan.notes) == agents


def test_turns_are_runs_of_sampled_tokens() -> None:
    assert counted_workload([typical("search_r1")]).turns == 10


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.type)
@pytest.mark.parametrize("harness", WORKLOADS)
def test_what_a_method_computes_is_what_it_lays_out(harness: str, method: Any) -> None:
    record = typical(harness)
    layout = lay_out(record, method)
    rows = method_of(method).cost(counted_workload([record]), 32_768)
    assert (rows.tokens, rows.teacher_tokens) == (layout.tokens, layout.teacher_tokens)
    pairs = sum(int(row.position.sum()) + len(row) for row in layout.rows)
    assert rows.pairs == pytest.approx(pairs, rel=0.25), "an estimate from means"


@pytest.mark.parametrize("name", ["running_example", "weather", "offload_and_restore"])
def test_tree_attention_gathers_no_branch_twice(name: str) -> None:
    from slime_plugin.train.tree_plan import plan_tree

    record = example(name)
    branches = branches_of(Trajectory.of(record))
    trie = build_trie(record.tokens, branches)
    gathered = len(plan_tree(trie.parent).key_index)
    rows = method_of(Mask4d()).cost(counted_workload([record]), 32_768)
    assert gathered <= sum(map(len, branches)), "a branch that another one goes on from comes with it"
    assert gathered == sum(map(len, branches)) or name == "offload_and_restore"
    assert rows.gathered * len(trie) == pytest.approx(sum(map(len, branches)))


@given(name=st.sampled_from(CELLS), longest=st.integers(1, 10**6))
def test_a_tree_is_never_more_than_its_branches(name: str, longest: int) -> None:
    methods = planned(name).methods
    assert methods["mask4d"].tokens <= methods["logittree"].tokens
    assert methods["naive_compressed"].tokens <= methods["mask4d"].tokens
    assert methods["sdcc"].tokens == methods["naive_compressed"].tokens
    assert method_of(LogitTree()).cost(WORKLOADS["tc_rag"], longest).longest == longest


# Time


def test_a_decoding_step_by_hand() -> None:
    decode = planned("tc_rag-mask4d").decoding
    assert decode.rollouts == 8  # 64 on 8 engines
    read = 8_044_936_192 + 8 * 6_550 * 147_456  # weights, and 26,200 / 4 tokens of each
    assert decode.step == pytest.approx(0.002 + read / (0.6 * 3.35e12))
    assert decode.tokens_per_second == pytest.approx(64 / decode.step)
    heard = 21_400 - 3_000
    matrices = 4_022_468_096 - 36 * (2 * 2560 + 2 * 128) - 2560
    assert decode.prefill == pytest.approx(2 * matrices * heard / (0.4 * 989e12))
    two = planned("tc_rag-mask4d", "cluster.engine_gpus=2").decoding
    assert two.rollouts == 16
    half = (8_044_936_192 / 2 + 16 * 6_550 * 147_456 / 2) / (0.6 * 3.35e12)
    assert two.step == pytest.approx(0.002 + half + 72 * 15e-6)


def test_the_phases_by_hand() -> None:
    plan = planned("search_r1", "trainer.tp=2", gpu="a100")
    matrices = 4_022_468_096 - 36 * (2 * 2560 + 2 * 128) - 2560
    forward = 2 * matrices * 12_100 + 36 * 4 * 4096 * 12_100**2 / 2
    assert plan.flops == pytest.approx(64 * 6 * forward)  # forward, backward twice, again, old, reference
    phases = plan.phases
    assert phases.update == pytest.approx(plan.flops / (8 * 312e12 * 0.4))
    hidden = 16 * 12_100 * 2560 * 2  # bytes of a replica's 16 rollouts
    assert phases.exchange == pytest.approx(6 * 36 * 4 * hidden / 2 / 300e9)
    longest = (1 + 0.6 * math.sqrt(2 * math.log(8))) / 2  # of 8 rollouts, where a replica has 2
    assert phases.imbalance == pytest.approx((phases.update + phases.exchange) * (longest - 1))
    assert phases.tools == 30
    assert phases.tail == pytest.approx(2 * (phases.sampling + phases.tools)), "30 turns, not 10"
    assert phases.sync == pytest.approx(8.044936192 / 8)
    assert phases.swap == pytest.approx(2_011_332_096 * (2 + 2 + 2 + 2 + 2 * 3) / 25e9)
    assert phases.reduction == pytest.approx(8 * 6 * 2_011_332_096 * 0.75 / 300e9)
    assert phases.total == pytest.approx(phases.rollout + phases.training + phases.sync)
    between = planned("search_r1", "trainer.tp=2", nodes=2).phases
    assert between.reduction == pytest.approx(8 * 2 * 6 * 2_011_332_096 * 7 / 8 / 50e9)


@pytest.mark.parametrize(("replicas", "each"), [(2, 4), (4, 2), (8, 1), (64, 2), (128, 4)])
def test_the_wait_for_the_longest_is_what_dealing_out_gives(replicas: int, each: int) -> None:
    """Longest first, each to the replica with the least, as slime's balancing comes to; lengths of a Gamma."""
    random, spread = np.random.default_rng(0), 0.6
    found = []
    for _ in range(200):
        loads = np.zeros(replicas)
        for length in np.sort(random.gamma(spread**-2, spread**2, replicas * each))[::-1]:
            loads[loads.argmin()] += length
        found.append(loads.max() / loads.mean())
    settings = (f"cluster.nodes={replicas}", f"trainer.prompts={replicas}", f"trainer.steps={16 // each}")
    phases = planned("tc_rag-mask4d", *settings, "trainer.tp=8").phases
    ratio = 1 + phases.imbalance / (phases.update + phases.exchange)
    assert ratio == pytest.approx(float(np.mean(found)), rel=0.2)


def test_what_comes_out_of_turns_and_limits() -> None:
    assert planned("search_r1", "rollout.turns=10").phases.tail == 0
    capped = planned("search_r1", "rollout.seconds=100").phases
    assert capped.rollout == pytest.approx(100)
    waves = planned("search_r1", "rollout.concurrency=32").phases
    once = planned("search_r1", "trainer.prompts=2", "trainer.steps=4").phases  # 4 rollouts on each engine as well
    assert waves.sampling + waves.tools == pytest.approx(2 * (once.sampling + once.tools))
    apart = planned("search_r1", "cluster.rollout_nodes=1", "cluster.engine_gpus=1", nodes=2).phases
    assert apart.sync == pytest.approx(8.044936192 / 8 + 8.044936192 / 50)


def test_stages_wait_for_each_other() -> None:
    settings = ("trainer.tp=1", "trainer.sp=false", "cluster.gpus=2", "cluster.engine_gpus=1")
    waiting = planned("tc_rag-logittree", *settings, "trainer.pp=2", "cluster.memory=1000").phases
    batches = math.ceil(8 * 26_200 / 32_768)
    assert waiting.imbalance == pytest.approx(waiting.update / batches)


def test_the_bottleneck_is_said_with_both_numbers() -> None:
    plan = planned("search_r1")
    assert plan.bottleneck.startswith(
        f"the longest rollout takes {plan.phases.tail:.0f} of {plan.phases.total:.0f} s, "
    )
    assert "more GPUs do not shorten it" in plan.bottleneck
    quick = planned("claude_code-logittree", "rollout.turns=10", gpu="a100")
    assert quick.bottleneck.startswith("computing updates takes")


# What is shipped


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", CELLS)
def test_every_cell_fits_on_every_number_of_nodes(name: str, nodes: int) -> None:
    plan = planned(name, nodes=nodes)
    assert plan.problems == ()
    assert plan.rank.total <= 0.9 * 80 * GB, "with some room for what is not counted"
    assert plan.longest_row >= plan.job.rows.longest
    assert plan.job.rollouts == (1024 if nodes == 32 else 64), "the paper's batch as long as it fits"
    assert plan.job.rollouts // 8 >= 2 * plan.job.replicas, "two rollouts for each replica in each step"


def test_one_node_is_what_the_cells_are_sized_for() -> None:
    for name in CELLS:
        path = CONFIGS / "cells" / f"{name}.yaml"
        assert load_cell(path) == load_cell(path, (), [CONFIGS / "nodes" / "1.yaml"])


@pytest.mark.parametrize("table", [memory_table, time_table, method_table])
def test_the_estimates_are_those_that_were_recorded(table: Callable[[], Iterator[str]]) -> None:
    again = "python -m tests.cluster.tables >tests/cluster/tables.txt writes them anew"
    assert "\n".join(table()) in (ROOT / "tests" / "cluster" / "tables.txt").read_text(encoding="utf-8"), again


# What does not fit


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("tc_rag-mask4d", ["method.budget=8192"], ["method.budget: 8,192", "32,768", "use at least 32,768"]),
        (
            "agentfold-mask4d",
            ["method.budget=null", "trainer.tp=2"],
            ["a rank needs 135.5 GB of 80 GB", "131,724 tokens", "set method.budget to at most 64,883"],
        ),
        ("agentfold-naive_full", ["trainer.tp=2"], ["121,000 tokens", "split the model further (trainer.tp)"]),
        (
            "tc_rag-logittree",
            ["trainer.recompute=false", "trainer.tp=2"],
            ["a rank needs", "32,768", "set trainer.recompute"],
        ),
        ("tc_rag-logittree", ["trainer.batch_tokens=200000"], ["200,000 tokens", "lower trainer.batch_tokens"]),
        ("tc_rag-logittree", ["cluster.engine_memory=0.11"], ["cluster.engine_memory", "5,120 tokens", "32,768"]),
    ],
)
def test_what_does_not_fit_is_said(name: str, overrides: list[str], words: list[str]) -> None:
    (problem,) = planned(name, *overrides).problems
    for word in words:
        assert word in problem
    result = run("plan", str(CONFIGS / "cells" / f"{name}.yaml"), *overrides)
    assert result.exit_code == 1
    assert result.stderr.endswith(f"{problem}\n")


def test_engines_that_may_run_short_are_noted() -> None:
    (note,) = planned("claude_code-sdcc").notes
    assert note.startswith("an engine holds 7.9 contexts of 40,952 tokens and is asked for 8 rollouts")


def test_agents_that_take_turns_are_noted() -> None:
    all_at_once, few = planned("claude_code-sdcc"), planned("claude_code-sdcc", "harness.processes=16")
    (note,) = few.notes
    assert note.startswith("16 agents run at once (harness.processes), so that 64 rollouts take 4 waves")
    assert few.engine.concurrency == 2
    assert few.phases.tools == pytest.approx(4 * all_at_once.phases.tools)


def test_an_evaluation_by_hand(tmp_path: Path) -> None:
    """Its rollouts are like those of training, in as many waves as engines and agents need."""
    training = planned("tc_rag-mask4d")  # 64 rollouts at once: one wave
    of_training = training.phases.sampling + training.phases.tools + training.phases.tail
    assert training.job.evaluation_rollouts == 256  # the file is not here, and has to be expected to be long
    waves = training.phases.sampling + training.phases.tools
    assert training.evaluation_seconds == pytest.approx(of_training + 3 * waves)
    questions = tmp_path / "dev.jsonl"
    questions.write_text('{"question": "a", "answers": ["b"]}\n' * 300)
    of_file = ("tc_rag-mask4d", f"evaluation.questions={questions}")
    assert planned(*of_file).job.evaluation_rollouts == 256
    assert planned(*of_file, "evaluation.limit=null", "evaluation.samples=2").job.evaluation_rollouts == 600
    assert planned("tc_rag-mask4d", "evaluation.questions=null").evaluation_seconds == 0
    unknown = planned("tc_rag-mask4d", "evaluation.limit=null")
    assert (unknown.evaluation_seconds, len(unknown.notes)) == (0, 1 + len(training.notes))
    assert "there is no file data/dev.jsonl" in unknown.notes[-1]


# The command


CELL = str(CONFIGS / "cells" / "agentfold-mask4d.yaml")


def test_the_command_prints() -> None:
    result = run("plan", CELL, "--with", str(CONFIGS / "nodes" / "4.yaml"), "--gpu", "a100")
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("agentfold x mask4d: 64 rollouts in 8 steps", "4 x 8 A100: 4 replicas of tp 8", "bottleneck: "):
        assert words in result.stdout
    assert "tokens (estimated)" in result.stdout


def test_the_command_as_json() -> None:
    result = run("plan", CELL, "--json")
    value = json.loads(result.stdout)
    plan = planned("agentfold-mask4d")
    assert value["rank"]["weights"] == plan.rank.weights
    assert value["rank_bytes"] == plan.rank.total
    assert value["iteration_seconds"] == plan.phases.total == pytest.approx(sum(value["phases"].values()))
    assert value["saturates"] == plan.bottleneck
    assert value["assumptions"]["tool_seconds"] == 3


def test_tokens_are_counted_in_records() -> None:
    result = run("plan", CELL, "--records", str(ROOT / "examples" / "records"), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    counted = json.loads(result.stdout)["workload"]
    names = ("offload_and_restore", "running_example", "weather")
    assert counted["tape"] == pytest.approx(sum(len(example(name)) for name in names) / 3)
    shown = run("plan", CELL, "--records", str(ROOT / "examples" / "records" / "running_example.json"))
    assert "tokens (counted)" in shown.stdout
    tokens = {line.split()[0]: line.split()[-4] for line in shown.stdout.splitlines() if "naive_" in line}
    assert tokens == {"naive_compressed": "11", "naive_full": "14"}


def test_another_number_for_what_is_estimated() -> None:
    result = run("plan", CELL, "--assume", "tool_seconds=0", "--assume", "sampled=2100", "--json")
    value = json.loads(result.stdout)
    assert (value["phases"]["tools"], value["workload"]["sampled"]) == (0, 2100)


@pytest.mark.parametrize(
    ("assumed", "message"),
    [
        ("tool_second=1", "there is no 'tool_second'; use 'tool_seconds'"),
        ("spread=much", "has no number"),
        ("mfu", ""),
        ("turns=0", "more than 0"),
    ],
)
def test_a_wrong_assumption_is_refused(assumed: str, message: str) -> None:
    result = run("plan", CELL, "--assume", assumed)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("key", MAY_BE_ZERO)
def test_what_may_be_zero_is_divided_by_nowhere(key: str) -> None:
    assert run("plan", CELL, "--assume", f"{key}=0").exit_code == 0


def test_a_job_that_cannot_run_is_refused_first(tmp_path: Path) -> None:
    result = run("plan", CELL, "--with", str(CONFIGS / "nodes" / "4.yaml"), "trainer.tp=2", "trainer.steps=16")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "4 rollouts per step" in result.stderr
    (tmp_path / "empty.json").write_text('{"tokens": []}')
    assert run("plan", CELL, "--records", str(tmp_path)).exit_code == 1
