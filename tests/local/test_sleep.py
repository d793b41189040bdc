"""Updates after the memory of a trainer was given away and came back: bit for bit those of one that kept it.

The sleep check of ``memorywalker verify`` compares log-probabilities on any machine; this has all that updates keep.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime_plugin.config.method import Mask4d, MethodSettings, Sdcc
from slime_plugin.local.rank import Rank
from slime_plugin.train.ranks import run_ranks
from slime_plugin.train.snapshot import Snapshot
from slime_plugin.verify import sleep
from tests.local.test_updates import SPLITS, Work, train
from tests.train.conftest import Truth
from tests.verify.breakages import only_parameters_wake

METHODS: dict[str, MethodSettings] = {"mask4d": Mask4d(), "sdcc": Sdcc(weight=0.7, warmup=0, ema=0.9)}


@pytest.mark.parametrize(
    ("method", "split"), [("mask4d", "one"), ("sdcc", "one"), ("sdcc", "tp2+sp"), ("mask4d", "cp2")]
)
def test_the_next_iteration_is_the_same(method: str, split: str, truth: Truth, tmp_path: Path) -> None:
    assert updated(truth, METHODS[method], split, tmp_path, nap) == updated(truth, METHODS[method], split, tmp_path)


def test_what_does_not_come_back_shows(truth: Truth, tmp_path: Path) -> None:
    kept = updated(truth, METHODS["mask4d"], "one", tmp_path)
    assert updated(truth, METHODS["mask4d"], "one", tmp_path, nap_with_holes) != kept


def updated(truth: Truth, method: MethodSettings, split: str, folder: Path, *between: Any) -> tuple[Any, ...]:
    """What each rank has of the gradients, and the bytes of all weights."""
    work = Work(truth.folder, [r.record for r in truth.rollouts], method, SPLITS[split], folder / "weights")
    norms = run_ranks(work.trainer.ranks, train, work, *between)
    weights = load_file(work.out / "model.safetensors")
    return norms, {name: x.view(torch.int32).numpy().tobytes() for name, x in weights.items()}


def nap(rank: Rank) -> None:
    """Sleep and wake; what updates keep has no memory in between."""
    asleep = sleep.sleep()
    kept = what_updates_keep(rank)
    assert {name: x.untyped_storage().nbytes() for name, x in kept.items()} == dict.fromkeys(kept, 0)
    sleep.wake([replace(storage) for storage in asleep])


def nap_with_holes(rank: Rank) -> None:
    only_parameters_wake()
    sleep.wake(sleep.sleep())


def what_updates_keep(rank: Rank) -> dict[str, torch.Tensor]:
    """A tensor of each kind."""
    model: Any = rank.models[0]
    parameter = next(iter(model.parameters()))
    moments = rank._optimizer.optimizer.optimizer.state[parameter]
    snapshots = {
        f"{type(x).__name__} {i}": weight
        for x in gc.get_objects()
        if isinstance(x, Snapshot)
        for i, weight in enumerate(x.weights)
    }
    assert snapshots, "the reference at least"
    return {
        "weight": parameter,
        "gradient": parameter.main_grad,
        "first moment": moments["exp_avg"],
        "second moment": moments["exp_avg_sq"],
        "frequencies": model.module.rotary_pos_emb.inv_freq,
        **snapshots,
    }
