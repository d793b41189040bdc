"""Rollouts of realistic shape and any size: an agent that searches, and an editor that pops old results."""

from __future__ import annotations

import numpy as np

from slime_plugin.record import Edit, Meta, Record, Span

VOCABULARY = 151_936  # Qwen3


def popped_rollout(seed: int, *, tape: int = 40_000, edits: int = 20, live: int = 11_800) -> Record:
    """A tape of ``tape`` tokens with ``edits`` evictions that keep the live context at about ``live`` tokens.

    A turn is a message of the policy and a tool result four times as long; there are three turns between two edits,
    and an edit takes out as many of the oldest results as it needs to. Token ids follow a Zipf law, as words do.
    """
    rng = np.random.default_rng(seed)
    layers, turns = edits + 1, 3 * (edits + 1)
    prompt = tape // 40
    shares = rng.uniform(0.5, 1.5, (turns, 2)) * (1, 4)  # message, result
    sizes = np.maximum(1, shares / shares.sum() * (tape - prompt)).astype(int).ravel()
    bounds = np.concatenate(([0], prompt + np.cumsum([0, *sizes])))  # segments: prompt, message, result, message, ...
    bounds[-1] = tape
    generated = np.repeat(np.arange(len(bounds) - 1) % 2 == 1, np.diff(bounds))
    generated[-1] = True  # the answer
    views, gone = [], 0  # how many of the oldest results have been popped
    for k in range(layers):
        segments = range(len(bounds) - 1) if k == edits else range(1 + 6 * (k + 1))
        kept = [i for i in segments if i % 2 == 1 or i == 0 or i // 2 > gone]
        views.append(_merged([(int(bounds[i]), int(bounds[i + 1])) for i in kept]))
        size, gone = sum(int(bounds[i + 1] - bounds[i]) for i in kept), gone + 1
        while size - (bounds[2 * gone + 1] - bounds[2 * gone]) > live - tape / layers and gone < 3 * (k + 1) - 1:
            size -= int(bounds[2 * gone + 1] - bounds[2 * gone])
            gone += 1
    return Record(
        tokens=np.minimum(rng.zipf(1.15, tape) - 1, VOCABULARY - 1),
        generated=generated,
        logprobs=np.where(generated, -rng.exponential(0.4, tape), np.nan),
        views=views,
        edits=[Edit("pop", "policy")] * edits,
        meta=Meta(id=f"synthetic-{seed}", harness="tc_rag", group=seed // 16, reward=float(seed % 2)),
    )


def _merged(spans: list[Span]) -> list[Span]:
    """Spans in order, neighbours joined."""
    merged = spans[:1]
    for start, stop in spans[1:]:
        if merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
