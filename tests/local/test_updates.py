"""Whole iterations of a rank leave the weights that transformers and torch's own AdamW leave: old and reference
log-probabilities, advantages, loss, clipping, weight decay and learning rate together, over several updates."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Mask4d, MethodSettings, Sdcc
from slime_plugin.config.objective import Objective
from slime_plugin.config.trainer import Trainer
from slime_plugin.hooks.rollout import convert_samples
from slime_plugin.local.micro_batches import split_batch
from slime_plugin.local.rank import Rank
from slime_plugin.local.sample import recorded_samples
from slime_plugin.record import Record
from slime_plugin.train.ranks import OnProgress, run_ranks
from tests.train import oracle
from tests.train.conftest import Truth

ITERATIONS, STEPS = 2, 2
OBJECTIVE = Objective(kl=0.1, entropy=0.05)
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "iterations": ITERATIONS,
    "lr": 3e-3,
    "lr_warmup": 3,
    "clip_grad": 5.0,
    "weight_decay": 0.1,
}
SPLITS = {
    "one": Trainer(**SETTINGS, batch_tokens=90),
    "tp2+sp": Trainer(**SETTINGS, tp=2, sp=True),
    "pp2xdp2": Trainer(**SETTINGS, pp=2, dp=2, batch_tokens=60),
    "pp3": Trainer(**SETTINGS, pp=3),  # four layers: 1, 1 and 2
    "cp2": Trainer(**SETTINGS, cp=2),
}


@dataclass(frozen=True)
class Work:
    model: Path
    records: Sequence[Record]
    method: MethodSettings
    trainer: Trainer
    out: Path


@pytest.mark.parametrize("split", SPLITS)
def test_iterations_leave_the_weights_of_plain_torch(truth: Truth, split: str, tmp_path: Path) -> None:
    expected, norms = _plain(truth, distilled=0.0)
    work = Work(truth.folder, [r.record for r in truth.rollouts], Mask4d(), SPLITS[split], tmp_path / "weights")
    results = run_ranks(work.trainer.ranks, train, work)
    found: dict[str, torch.Tensor] = {}
    for path in work.out.glob("*.safetensors"):
        found |= load_file(path)
    start = oracle.load_model(truth.folder, torch.float32).state_dict()
    assert found.keys() == {name for name in expected if name in start and name != "lm_head.weight"}
    for name, value in found.items():
        moved = (expected[name] - start[name]).norm()
        assert (value - expected[name]).norm() < 2e-3 * moved, name  # Adam divides by what may be almost nothing
    assert results[0] == pytest.approx(norms, rel=1e-4)
    assert all(result == results[0] for result in results), "every rank has the same norms"
    assert max(norms) > work.trainer.clip_grad > min(norms), "some gradients are clipped, and some are not"


def test_sdcc_distills_from_the_weights_of_each_update(truth: Truth, tmp_path: Path) -> None:
    expected, norms = _plain(truth, distilled=0.7)
    records = [r.record for r in truth.rollouts]
    work = Work(truth.folder, records, Sdcc(weight=0.7, warmup=0), SPLITS["one"], tmp_path / "weights")
    (result,) = run_ranks(1, train, work)
    assert result == pytest.approx(norms, rel=1e-4)
    found = load_file(work.out / "model.safetensors")
    name = "model.layers.2.self_attn.q_proj.weight"
    start = oracle.load_model(truth.folder, torch.float32).state_dict()[name]
    assert (found[name] - expected[name]).norm() < 2e-3 * (expected[name] - start).norm()


def train(on_progress: OnProgress, work: Work, between: Callable[[Rank], None] = lambda rank: None) -> list[float]:
    """On every rank: all iterations, with something between them, and the weights on disk at the end. The norms of the
    gradients."""
    cell = Cell(model=work.model, method=work.method, objective=OBJECTIVE, trainer=work.trainer)
    args = Namespace(memorywalker=cell.to_json())
    rank = Rank(args)
    norms = []
    for iteration in range(ITERATIONS):
        if iteration:
            between(rank)
        samples = recorded_samples(work.records, iteration * len(work.records))
        parts = split_batch(
            convert_samples(args, samples),
            replicas=work.trainer.dp,
            steps=STEPS,
            batch_tokens=work.trainer.batch_tokens,
        )
        norms += [step.grad_norm for step in rank.train(iteration, parts[rank.replica()]).steps]
    rank.export(work.out)
    return norms


def _plain(truth: Truth, distilled: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The long way: one forward pass per sampled token, torch's AdamW and clipping."""
    model = oracle.load_model(truth.folder, torch.float32)
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": SETTINGS["weight_decay"]},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS["lr"], betas=(0.9, 0.98))
    score = oracle.score_compressed if distilled else oracle.score_live
    references = [_logprobs(score(model, rollout), rollout.record) for rollout in truth.rollouts]
    norms, update = [], 0
    for _ in range(ITERATIONS):
        old = [_logprobs(score(model, rollout), rollout.record) for rollout in truth.rollouts]
        begun = [
            replace(r, record=_with_logprobs(r.record, logprobs))
            for r, logprobs in zip(truth.rollouts, old, strict=True)
        ]
        half = len(begun) // STEPS  # a group each, so that advantages are those of the whole batch
        for step in range(STEPS):
            now = slice(step * half, (step + 1) * half)
            rollouts, reference = begun[now], references[now]
            scores = [score(model, rollout) for rollout in rollouts]
            loss = oracle.grpo(scores, rollouts, reference, OBJECTIVE)
            if distilled:
                with torch.no_grad():
                    teachers = [oracle.score_live(model, rollout) for rollout in rollouts]
                loss = loss + distilled * oracle.distillation(scores, teachers, rollouts)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            norms.append(float(torch.nn.utils.clip_grad_norm_(list(parameters.values()), SETTINGS["clip_grad"])))
            for group in optimizer.param_groups:
                group["lr"] = SETTINGS["lr"] * min(1.0, update / SETTINGS["lr_warmup"])
            optimizer.step()
            update += 1
    return {name: p.detach() for name, p in parameters.items()}, norms


def _logprobs(scores: oracle.Scores, record: Record) -> np.ndarray:
    logprobs = np.full(len(record), np.nan)
    for position, (token, logits) in scores.items():
        logprobs[position] = float(torch.log_softmax(logits.detach(), -1)[token])
    return logprobs


def _with_logprobs(record: Record, logprobs: np.ndarray) -> Record:
    known = np.where(np.isnan(logprobs) & record.generated, -1.0, logprobs).astype(np.float32)
    return replace(record, logprobs=np.minimum(known, 0.0))
