"""MemoryWalker: train agents on the contexts they really saw.

The sub-packages follow the data: ``bridge`` (where rollouts come from), ``record`` (what a rollout leaves behind),
``tree`` (what is derived from it), ``methods`` (what a trainer is fed), ``megatron`` (what a trainer does with it),
``seam`` and ``hooks`` (all of that as slime wants it), ``local`` (the whole loop on one machine), ``report`` (what a
person looks at), ``cli`` (how it is called). A module imports only what lies upstream of it; ``make check`` enforces
that.
"""

__version__ = "0.6.0"
