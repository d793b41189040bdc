"""The model itself: next-token losses work on trees, a moving average follows, and what cannot work is refused."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime_plugin.architecture import Architecture
from slime_plugin.config.method import Mask4d
from slime_plugin.config.parallel import Parallelism
from slime_plugin.errors import ConfigError, LayoutError, MemoryWalkerError
from slime_plugin.methods import lay_out
from slime_plugin.train.process_groups import context_group, start_groups
from slime_plugin.train.ranks import OnProgress, run_ranks
from slime_plugin.train.snapshot import MovingAverage
from slime_plugin.train.transformer_config import transformer_config
from slime_plugin.train.tree_model import check_model
from slime_plugin.train.tree_sequence import tree_sequence, window_of
from slime_plugin.train.vocabulary import Shard, token_statistics
from tests.train import oracle
from tests.train.conftest import Truth
from tests.train.jobs import Job, load_model


@dataclass(frozen=True)
class Stream:
    """Trees side by side, and a chain that pads them."""

    tokens: np.ndarray
    parent: np.ndarray


def tree_batch(job: Job) -> Stream:
    tokens: list[int] = []
    parent: list[int] = []
    for record in job.records:
        (row,) = lay_out(record, Mask4d()).rows
        parent += [-1 if above < 0 else above + len(tokens) for above in row.parent.tolist()]
        tokens += row.tokens.tolist()
    padding = -len(tokens) % job.parallel.multiple
    parent += [-1 if i == 0 else len(tokens) + i - 1 for i in range(padding)]
    return Stream(np.array(tokens + [0] * padding, dtype=np.int32), np.array(parent, dtype=np.int32))


def next_token_logprobs(on_progress: OnProgress, job: Job) -> list[tuple[int, float]]:
    """As a loss that knows nothing of trees would see it: row ``i - 1`` of the logits predicts token ``i``."""
    groups = start_groups(job.parallel)
    architecture = Architecture.read(job.folder)
    model = load_model(job.folder, groups, job.parallel, job.dtype)
    batch, cp_group = tree_batch(job), context_group(groups)
    low, high = window_of(len(batch.tokens), cp_group)
    with torch.no_grad():
        logits = model(
            input_ids=torch.from_numpy(batch.tokens[low:high].astype(np.int64))[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=tree_sequence(batch.parent, cp_group=cp_group),
        )[0]
    following = torch.from_numpy(np.roll(batch.tokens, -1)[low:high].astype(np.int64))
    shard = Shard.of(architecture.vocabulary, logits.shape[1], groups.tp)
    logprobs, _ = token_statistics(logits, following, shard)
    return [(low + i + 1, value) for i, value in enumerate(logprobs.tolist())]


SPLITS = {
    "one": Parallelism(),
    "tp2 sp": Parallelism(tp=2, sp=True),
    "cp2": Parallelism(cp=2),
    "tp2 cp2 sp": Parallelism(tp=2, cp=2, sp=True),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_loss_that_knows_nothing_of_trees_sees_every_token_after_its_path(split: str, truth: Truth) -> None:
    job = truth.job(parallel=SPLITS[split], dtype=torch.float64)
    found = {token: value for rank in run_ranks(job.parallel.ranks, next_token_logprobs, job) for token, value in rank}
    model = oracle.load_model(truth.folder, torch.float64)
    batch = tree_batch(job)
    checked = 0
    with torch.no_grad():
        for token in range(1, sum(len(lay_out(record, Mask4d()).rows[0]) for record in job.records)):
            path = [int(batch.tokens[above]) for above in walk(batch, token)]
            if path:
                logits = model(torch.tensor([path])).logits[0, -1]
                expected = torch.log_softmax(logits, -1)[int(batch.tokens[token])]
                assert found[token] == pytest.approx(float(expected), abs=1e-10)
                checked += 1
    assert checked > 100


def walk(batch: Stream, token: int) -> list[int]:
    """From the root down to, and without, the token."""
    above = int(batch.parent[token])
    return [] if above < 0 else [*walk(batch, above), above]


def stock_loss(on_progress: OnProgress, job: Job) -> tuple[float, float]:
    """Megatron's own cross entropy over labels, on a tree; and the mean of the log-probabilities that predict them."""
    groups = start_groups(job.parallel)
    architecture = Architecture.read(job.folder)
    model = load_model(job.folder, groups, job.parallel, job.dtype)
    batch = tree_batch(job)
    tokens = torch.from_numpy(batch.tokens.astype(np.int64))
    inputs: dict[str, Any] = {"input_ids": tokens[None], "position_ids": None, "attention_mask": None}
    sequence = tree_sequence(batch.parent)
    losses = model(**inputs, packed_seq_params=sequence, labels=tokens.roll(-1)[None])
    logits = model(**inputs, packed_seq_params=sequence)[0]
    logprobs, _ = token_statistics(logits, tokens.roll(-1), Shard.of(architecture.vocabulary, 131, groups.tp))
    return float(losses.mean()), -float(logprobs.mean())


def test_megatrons_own_loss_runs_on_a_tree(truth: Truth) -> None:
    ((stock, ours),) = run_ranks(1, stock_loss, truth.job(dtype=torch.float64))
    assert stock == pytest.approx(ours, rel=1e-6)  # stock statistics are float32


def follow(on_progress: OnProgress, job: Job) -> dict[str, float]:
    groups = start_groups(job.parallel)
    model = load_model(job.folder, groups, job.parallel, job.dtype)
    average = MovingAverage([model], decay=0.75)
    weight = next(model.parameters())
    values = {"before": float(weight[0, 0])}
    with torch.no_grad():
        weight += 8.0
    average.update()
    with average.in_place():
        values["average"] = float(weight[0, 0])
    return values | {"after": float(weight[0, 0])}


def test_a_moving_average_follows_at_its_pace_and_steps_aside(truth: Truth) -> None:
    (values,) = run_ranks(1, follow, truth.job())
    assert values["average"] - values["before"] == pytest.approx(2.0, abs=1e-5)
    assert values["after"] - values["before"] == pytest.approx(8.0, abs=1e-5)


REFUSED = {
    "hidden_dropout": (0.1, "hidden_dropout is 0.1: a token on several branches.*set hidden_dropout=0"),
    "attention_dropout": (0.2, "attention_dropout is 0.2: .*set attention_dropout=0"),
    "mtp_num_layers": (1, "mtp_num_layers is 1: multi-token prediction shifts labels.*train without it"),
    "multi_latent_attention": (True, "multi_latent_attention is not supported by tree attention; .*logittree"),
    "experimental_attention_variant": ("gated_delta_net", "gated_delta_net attention does not read exactly.*logittree"),
    "window_size": ((128, 0), r"a sliding window of \(128, 0\) does not read exactly.*logittree"),
    "num_attention_heads": (5, "num_attention_heads is 5, which 2 tensor-parallel ranks do not divide"),
    "num_query_groups": (1, "num_query_groups is 1, which 2 tensor-parallel ranks do not divide"),
    "num_layers": (5, "num_layers is 5, which 2 pipeline-parallel ranks do not divide"),
}


def refuse(on_progress: OnProgress, job: Job, changes: dict[str, Any]) -> dict[str, str]:
    groups = start_groups(job.parallel)
    said = {}
    for name, value in changes.items():
        config = transformer_config(Architecture.read(job.folder), job.parallel)
        check_model(config, groups)
        setattr(config, name, value)
        try:
            check_model(config, groups)
        except ConfigError as error:
            said[name] = str(error)
    return said


def test_what_would_train_something_else_is_refused(truth: Truth) -> None:
    job = truth.job(parallel=Parallelism(tp=2, pp=2))
    said = run_ranks(4, refuse, job, {name: value for name, (value, _) in REFUSED.items()})[0]
    for name, (_, message) in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            raise ConfigError(said.get(name, f"{name} was not refused"))


def test_worlds_that_do_not_fit_are_refused(truth: Truth) -> None:
    with pytest.raises(ConfigError, match="1 processes cannot hold replicas of tp 2 x pp 1 x cp 1 = 2 ranks"):
        run_ranks(1, refuse, truth.job(parallel=Parallelism(tp=2)), {})
    with pytest.raises(ConfigError, match="with tp 1 leave it off"):
        Parallelism(sp=True)


def plain_sequence(on_progress: OnProgress, job: Job) -> None:
    groups = start_groups(job.parallel)
    model = load_model(job.folder, groups, job.parallel, job.dtype)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=4, max_seqlen_kv=4)
    model(input_ids=torch.arange(4)[None], position_ids=None, attention_mask=None, packed_seq_params=packed)


def test_stock_packed_sequences_are_refused(truth: Truth) -> None:
    with pytest.raises(
        LayoutError, match="got PackedSeqParams instead of a TreeSequence; pass packed_seq_params=tree_"
    ):
        run_ranks(1, plain_sequence, truth.job())


def fail(on_progress: OnProgress, how: str) -> None:
    if torch.distributed.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConfigError("the remedy") if how == "refused" else ValueError("this rank only")
    torch.distributed.barrier()


def test_an_error_on_one_rank_ends_all_and_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^the remedy$"):
        run_ranks(2, fail, "refused")
    with pytest.raises(MemoryWalkerError, match=r"^rank 1 was killed; is there enough memory"):
        run_ranks(2, fail, "killed")
    with pytest.raises(RuntimeError, match="of 2:\n"):
        run_ranks(2, fail, "broken")
