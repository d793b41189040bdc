"""Trainer and engine take turns on a GPU: the trainer gives its memory away and gets it back. Done here twice.

The storage of every tensor of the process that lives on its device is copied to the host, freed, allocated again and
filled: of parameters, buffers, and whatever a layer or a cache has kept. Something else is written into the freed
memory meanwhile. The model then has to compute bit by bit what it computed before; where two passes differ by
themselves, as sums over ranks may on a GPU, it may differ by as much. On a GPU slime does this with
torch_memory_saver, which is not used here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slime_plugin.config.method import LogitTree
from slime_plugin.verify import world
from slime_plugin.verify.measurement import Measurement, worst
from slime_plugin.verify.model import rollouts_of, score, tree_of
from slime_plugin.verify.settings import Verification

ROUNDS = 2
_CHANGED = (
    "something that the model computes with does not come back: a tensor in a cache or a process group; give engines "
    "nodes of their own (cluster.rollout_nodes), and report it with the JSON output"
)


_KEPT = "memory of the model could not be freed here, so that nothing is known; report it with the JSON output"


def check(verification: Verification) -> Iterator[Measurement]:
    found = world.run_on_ranks(verification.parallel.ranks, measure, verification)
    given, held = sum(rank.given for rank in found), sum(rank.parameters for rank in found)
    yield Measurement.at_least("memory given away", given / 1e6, held / 1e6, _KEPT, "MB")
    noise = worst(rank.noise for rank in found)
    what = f"log-probabilities after {ROUNDS} rounds"
    yield Measurement.at_most(what, worst(rank.difference for rank in found), noise, _CHANGED, "nats")


@dataclass(frozen=True, slots=True)
class Slept:
    """What one rank found."""

    noise: float
    """Largest difference of a log-probability between two passes without sleep."""
    difference: float
    """The same, before and after it."""
    given: int
    """Bytes that were given away at once."""
    parameters: int
    """Bytes of the model."""


def measure(verification: Verification) -> Slept:
    rank = world.open_rank(verification)
    records = rollouts_of(verification, rank)
    methods = tree_of(verification), LogitTree()

    def logprobs() -> np.ndarray:
        scores = score(verification, rank, records, methods)
        return np.concatenate([record.logprobs for by_record in scores for record in by_record])

    before = logprobs()
    noise, differences, size = float(np.abs(logprobs() - before).max()), [], 0
    for _ in range(ROUNDS):
        asleep = sleep()
        size = sum(len(storage.content) for storage in asleep)
        other = torch.full((size,), 0xFF, dtype=torch.uint8, device=world.device())
        wake(asleep)
        del other
        differences.append(float(np.abs(logprobs() - before).max()))
    parameters = sum(p.nbytes for model in rank.models for p in model.parameters())
    return Slept(noise, worst(differences), size, parameters)


@dataclass(frozen=True, slots=True)
class SleepingStorage:
    """The memory of some tensors while it is given away."""

    storage: torch.UntypedStorage
    content: Tensor
    """[bytes] a copy of it on the host."""


def sleep() -> list[SleepingStorage]:
    """Give away the memory of all tensors on the device of this rank."""
    asleep = []
    for storage in held_storages(world.device().type):
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        asleep.append(SleepingStorage(storage, view.to("cpu", copy=True)))
        del view
        storage.resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return asleep


def wake(asleep: list[SleepingStorage]) -> None:
    """Take memory again, at whatever address, with the same content."""
    for sleeping in asleep:
        sleeping.storage.resize_(len(sleeping.content))
        view = torch.empty(0, dtype=torch.uint8, device=sleeping.storage.device)
        view.set_(sleeping.storage)
        view.copy_(sleeping.content)


def held_storages(device: str) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors of this process on a device, each once. Memory that is not torch's own, such
    as that of a numpy array on a CPU, cannot be given away and is left out."""
    found: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        # By type(): isinstance would ask lazy objects of libraries for their class, and they warn.
        if issubclass(type(thing), Tensor) and thing.device.type == device and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found.setdefault(storage.data_ptr(), storage)
    return list(found.values())
