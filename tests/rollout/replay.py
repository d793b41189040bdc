"""The oracle of rollouts: transformers' own Qwen3, on the contexts that a record says the policy saw."""

from __future__ import annotations

from typing import Any

import torch

from slime_plugin.record import Record
from tests.conftest import ROOT

MODEL = ROOT / "examples" / "small_world" / "model"


def replayed(record: Record, policy: Any, temperature: float = 1.0) -> list[float]:
    """|log p of transformers - log p of the engine| of each sampled token, on the first view that holds it."""
    seen: set[int] = set()
    differences = []
    for view in record.views:
        positions = [p for start, stop in view for p in range(start, stop)]
        ids = torch.tensor([[int(record.tokens[p]) for p in positions]])
        with torch.no_grad():
            table = (policy(ids).logits[0].double() / temperature).log_softmax(-1)
        for i, p in enumerate(positions):
            if record.generated[p] and p not in seen:
                differences.append(abs(float(table[i - 1, ids[0, i]]) - float(record.logprobs[p])))
        seen.update(positions)
    assert len(differences) == int(record.generated.sum())
    return differences


def check_replay(records: list[Record], policy: Any, temperature: float = 1.0) -> None:
    differences = [difference for record in records for difference in replayed(record, policy, temperature)]
    assert sum(differences) / len(differences) < 1e-5
    assert max(differences) < 1e-4
