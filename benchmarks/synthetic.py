"""Rollouts of realistic shape and any size: an agent that searches, and an editor that pops old results."""

from __future__ import annotations

import numpy as np

from slime_plugin.record import Edit, Meta, Record

VOCABULARY = 151_936  # Qwen3


def popped_rollout(seed: int, *, tape: int = 40_000, edits: int = 20, live: int = 10_600) -> Record:
    """A tape of ``tape`` tokens with ``edits`` evictions that keep the live context at about ``live`` tokens.

    Turns are 40 to 360 sampled tokens and a tool result of 300 to 1,500; token ids follow a Zipf law, as words do.
    """
    rng = np.random.default_rng(seed)
    lengths, sampled, total = [1_000], [False], 1_000
    while total < tape:
        for size, is_sampled in ((rng.integers(40, 360), True), (rng.integers(300, 1_500), False)):
            size = int(min(size, tape - total))
            if size:
                lengths.append(size)
                sampled.append(is_sampled)
                total += size
    generated = np.repeat(sampled, lengths)
    generated[-1] = True  # the answer
    segments = np.cumsum([0, *lengths]).tolist()
    cuts = np.linspace(live, tape, edits + 1).astype(int).tolist()  # layer k ends at the segment before cuts[k]
    views, gone = [], set()
    for cut in cuts:
        ends = [i for i in range(len(lengths)) if segments[i + 1] <= cut]
        kept = [i for i in ends if i not in gone]
        views.append(_spans([(segments[i], segments[i + 1]) for i in kept]))
        envelopes = [i for i in kept if i > 0 and not sampled[i]]
        excess = sum(lengths[i] for i in kept) + tape // edits - live
        for i in envelopes:
            if excess <= 0:
                break
            gone.add(i)
            excess -= lengths[i]
        if not gone & set(kept):  # every layer ends with an eviction
            gone.add(envelopes[0])
    return Record(
        tokens=np.minimum(rng.zipf(1.15, tape) - 1, VOCABULARY - 1),
        generated=generated,
        logprobs=np.where(generated, -rng.exponential(0.4, tape), np.nan),
        views=views,
        edits=[Edit("pop", "policy")] * (len(views) - 1),
        meta=Meta(id=f"synthetic-{seed}", harness="tc_rag", group=seed // 16, reward=float(seed % 2)),
    )


def _spans(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged = pairs[:1]
    for start, stop in pairs[1:]:
        if merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
