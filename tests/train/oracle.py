"""Losses and gradients by the long way: transformers' own Qwen3, one forward pass per sampled token.

Contexts come from the simulator, which wrote them down when it sampled; no view, branch, tree or row is involved. The
model, the objective and the KL are plain full-vocabulary torch on one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from slime_plugin.config.objective import Objective
from slime_plugin.record import Meta, Record
from tests.histories import History, twin_at_a_fork, twin_rollout

VOCABULARY = 131  # odd, so that two ranks need padding


@dataclass(frozen=True)
class Rollout:
    """A record and, for every sampled tape position, the token ids it was sampled after."""

    record: Record
    live: dict[int, tuple[int, ...]]


def make_model(folder: Path, *, tied: bool, layers: int = 4, seed: int = 0, vocabulary: int = VOCABULARY) -> Path:
    """A small random Qwen3 on disk, with weights large enough that contexts matter."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        rms_norm_eps=1e-3,  # neither this nor the base of RoPE is anyone's default
        rope_parameters={"rope_type": "default", "rope_theta": 3e4},
    )
    model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers'
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones at first, which would hide a norm in the wrong place
                parameter.uniform_(0.5, 1.5)
            parameter.copy_(parameter.bfloat16())  # so that every data type computes the same function
    model.save_pretrained(folder)
    return folder


def load_model(folder: Path, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """transformers' norm always computes in float32; for float64 it is told not to."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.forward = _exact_norm.__get__(module)
    return model


def _exact_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    weighted: torch.Tensor = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return weighted


def simulate(seed: int, *, turns: int = 5) -> Rollout:
    """An agent that speaks, reads, and loses, regains and summarises parts of its context."""
    rng = np.random.default_rng(seed)
    history = History()

    def words(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, VOCABULARY, count)]

    for token in words(4):
        history.append(token, sampled=False)
    for turn in range(turns):
        for token in words(int(rng.integers(1, 5))):
            history.append(token, sampled=True)
        for token in words(int(rng.integers(1, 5))):
            history.append(token, sampled=False)
        edit = (seed + turn) % 5
        if edit == 1:
            history.evict(int(rng.integers(3, 8)), 3, kind="offload")
        elif edit == 2:
            history.restore(int(rng.integers(2, 6)), 3)
        elif edit == 3:
            history.fold_in_place(int(rng.integers(2, 5)), 2)
        elif edit == 4:
            history.evict(int(rng.integers(2, 6)), 2)
    for token in words(3):
        history.append(token, sampled=True)
    return Rollout(history.record(), history.live)


def batch_of_rollouts(folder: Path) -> list[Rollout]:
    """Two groups of rollouts with rewards, logged log-probabilities near the true ones, and twins among them."""
    made = [
        *(simulate(seed) for seed in range(6)),
        *(Rollout(r, h.live) for r, h in (twin_rollout(), twin_at_a_fork())),
    ]
    model = load_model(folder, torch.float64)
    rng = np.random.default_rng(0)
    finished = []
    for i, rollout in enumerate(made):
        logprobs = np.full(len(rollout.record), np.nan, dtype=np.float32)
        with torch.no_grad():
            for position, (_, logits) in score_live(model, rollout).items():
                true = torch.log_softmax(logits, -1)[int(rollout.record.tokens[position])]
                logprobs[position] = min(0.0, float(true) + rng.normal(0, 0.3))
        record = Record(
            tokens=rollout.record.tokens,
            generated=rollout.record.generated,
            logprobs=logprobs,
            views=rollout.record.views,
            edits=rollout.record.edits,
            meta=Meta(id=f"r{i}", harness="simulated", group=i // 4, reward=float(rng.integers(0, 5))),
        )
        finished.append(replace(rollout, record=record))
    return finished


Scores = dict[int, tuple[int, torch.Tensor]]
"""Tape position -> (token id, [V] logits that predict it)."""


def score_live(model: Qwen3ForCausalLM, rollout: Rollout) -> Scores:
    """Every sampled token under the context it was sampled in, which has to have something in it."""
    return {p: (int(rollout.record.tokens[p]), _last(model, live)) for p, live in rollout.live.items() if live}


def score_compressed(model: Qwen3ForCausalLM, rollout: Rollout) -> Scores:
    """Every sampled token of the last context, under the last context."""
    last = final_context(rollout)
    tokens = [int(rollout.record.tokens[p]) for p in last]
    logits = model(torch.tensor([tokens])).logits[0]
    return {p: (tokens[i], logits[i - 1]) for i, p in enumerate(last) if i and rollout.record.generated[p]}


def score_full(model: Qwen3ForCausalLM, rollout: Rollout) -> Scores:
    """Every sampled token under everything that was visible before it came."""
    tokens = [int(token) for token in rollout.record.tokens]
    logits = model(torch.tensor([tokens])).logits[0]
    return {p: (tokens[p], logits[p - 1]) for p in range(1, len(tokens)) if rollout.record.generated[p]}


def diverging(rollout: Rollout) -> list[int]:
    """Sampled tokens of the last context that had another one when they were sampled."""
    last = final_context(rollout)
    tokens = [int(rollout.record.tokens[p]) for p in last]
    return [p for i, p in enumerate(last) if i and p in rollout.live and rollout.live[p] != tuple(tokens[:i])]


def final_context(rollout: Rollout) -> list[int]:
    return [p for start, stop in rollout.record.views[-1] for p in range(start, stop)]


def grpo(
    scores: Sequence[Scores],
    rollouts: Sequence[Rollout],
    references: Sequence[np.ndarray],
    objective: Objective,
    old: Sequence[np.ndarray] | None = None,
) -> torch.Tensor:
    """Mean over rollouts of the mean over tokens of the clipped, regularised policy loss.

    Ratios are to ``old`` log-probabilities, by default to those that were logged. A token counts as much as its record
    says, and is still one token of the mean.
    """
    logged = [rollout.record.logprobs for rollout in rollouts] if old is None else old
    metas = [rollout.record.meta for rollout in rollouts if rollout.record.meta.status != "aborted"]
    losses = []
    for scored, rollout, reference, before in zip(scores, rollouts, references, logged, strict=True):
        if is_left_out(rollout):
            losses.append(torch.zeros((), dtype=torch.float64))
            continue
        group = [float(meta.reward or 0.0) for meta in metas if meta.group == rollout.record.meta.group]
        spread = statistics.stdev(group)
        centred = float(rollout.record.meta.reward or 0.0) - statistics.mean(group)
        advantage = centred / (spread + 1e-6) if spread else 0.0
        tokens = []
        for position, (token, logits) in scored.items():
            probabilities = torch.softmax(logits, -1)
            new = torch.log(probabilities[token])
            ratio = torch.exp(new - float(before[position]))
            low, high = 1 - objective.clip_low, 1 + objective.clip_high
            policy = torch.max(-ratio * advantage, -torch.clip(ratio, low, high) * advantage)
            log_ratio = float(reference[position]) - new
            reference_kl = torch.exp(log_ratio) - log_ratio - 1
            if reference_kl > 10:  # nats, the most that a token may add
                reference_kl = torch.full_like(new, 10.0)
            entropy = -(probabilities * torch.log(probabilities)).sum()
            counts = counts_for(rollout.record, position)
            if counts:  # what counts nothing is not there at all
                tokens.append(counts * (policy + objective.kl * reference_kl - objective.entropy * entropy))
        losses.append(torch.stack(tokens).sum() / len(scored) if tokens else torch.zeros((), dtype=torch.float64))
    return torch.stack(losses).mean()


def distillation(students: Sequence[Scores], teachers: Sequence[Scores], rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Mean over rollouts of KL(teacher || student), summed over leaves and divided by the trained tokens."""
    losses = []
    for student, teacher, rollout in zip(students, teachers, rollouts, strict=True):
        total = torch.zeros((), dtype=torch.float64)
        for position in [] if is_left_out(rollout) else diverging(rollout):
            target = torch.softmax(teacher[position][1].detach(), -1)
            kl = (target * (target.log() - torch.log_softmax(student[position][1], -1))).sum()
            counts = counts_for(rollout.record, position)
            total = total + counts * kl if counts else total
        losses.append(total / len(student))
    return torch.stack(losses).mean()


def is_left_out(rollout: Rollout) -> bool:
    """Whether it is not trained. It is a rollout of the batch's mean all the same."""
    meta = rollout.record.meta
    return meta.status == "aborted" or bool(meta.extra.get("removed"))


def with_weights(rollout: Rollout, weights: list[list[float]]) -> Rollout:
    meta = replace(rollout.record.meta, extra={"weights": weights})
    return replace(rollout, record=replace(rollout.record, meta=meta))


def counts_for(record: Record, position: int) -> float:
    """What one token counts in training."""
    for start, stop, weight in record.meta.extra.get("weights", []):
        if start <= position < stop:
            return float(weight)
    return 1.0


def gradients(model: Qwen3ForCausalLM, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of every parameter, by name."""
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _last(model: Qwen3ForCausalLM, context: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([list(context)])).logits[0, -1]
    return logits
