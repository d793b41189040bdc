"""What edits did to a batch of rollouts, and what the method makes of them: see docs/training.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_plugin.config.cell import Cell
from slime_plugin.record import Record
from slime_plugin.seam.rollout import DISCARDED
from slime_plugin.seam.train_data import lay_out_batch
from slime_plugin.tree import Trajectory, count
from slime_plugin.tree.counts import compression_of


def statistics(records: Sequence[Record], cell: Cell) -> dict[str, Any]:
    """What is undefined is None, never 0."""
    counts = [count(Trajectory.of(record)) for record in records]
    compression = compression_of(counts)
    layouts = [rollout.layout for rollout in lay_out_batch(records, range(len(records)), cell)]
    rewards = [float(record.meta.reward) for record in records if record.meta.reward is not None]
    evictions = [size for of_record in counts for size in of_record.E]
    tape, branches, trie = (sum(getattr(c, key) for c in counts) for key in ("L", "branch_tokens", "trie_tokens"))
    return {
        "rollouts": len(records),
        "statuses": dict(Counter(record.meta.status for record in records)),
        "reward": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
        **{key: float(np.mean([getattr(c, key) for c in counts])) for key in ("K", "D", "L", "C", "R")},
        "E": float(np.mean(evictions)) if evictions else None,
        "edits": dict(Counter(edit.kind for record in records for edit in record.edits)),
        "frequency": compression.frequency,
        "depth": compression.depth,
        "eviction_density": sum(c.evicted for c in counts) / tape,
        "branch_tokens": branches,
        "trie_tokens": trie,
        "trie_ratio": trie / branches if branches else None,
        "compressed_tokens": sum(c.C for c in counts),
        "sampled": sum(c.sampled for c in counts),
        "trained": sum(layout.trained for layout in layouts),
        "off_context": sum(layout.off_context or 0 for layout in layouts),
        "lost": dict(sum((Counter(layout.lost) for layout in layouts), Counter())),
        "discarded": sum(record.meta.extra.get(DISCARDED, 0) for record in records),
        "tokens": sum(layout.tokens for layout in layouts),
        "teacher_tokens": sum(layout.teacher_tokens for layout in layouts),
        "turns": sum(len(record.meta.extra.get("turns", ())) for record in records),
    }
