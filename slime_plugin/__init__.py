"""MemoryWalker: train agents on the contexts they really saw.

The sub-packages follow the data: ``rollout`` and ``tap`` sample, ``recovery`` reconstructs what an agent did,
``record`` is what a rollout leaves, ``tree`` and ``methods`` turn it into rows, ``train`` computes losses and
gradients, ``slime`` and ``hooks`` are what slime calls, ``local`` and ``cluster`` run it, ``report`` and ``cli`` are
for people. Imports point one way, from the last to the first (the contracts are in ``pyproject.toml``).
"""

__version__ = "0.7.0"
