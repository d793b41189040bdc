"""The configuration inside slime's arguments.

slime sets every key of ``--custom-config-path`` on its arguments, unchecked. So there is one key, and its content is
checked here.
"""

from __future__ import annotations

import functools
import json
from argparse import Namespace

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.errors import ConfigError

KEY = "memorywalker"


def cell_of(args: Namespace) -> Cell:
    """Return the cell in slime's arguments."""
    settings = getattr(args, KEY, None)
    if settings is None:
        raise ConfigError(f"the arguments have no {KEY!r}; put the cell under that key of --custom-config-path")
    return _parsed(json.dumps(settings, sort_keys=True))


def args_of(cell: Cell) -> Namespace:
    """Return the arguments that hooks read where slime does not run: the cell, and its settings by slime's names."""
    trainer = cell.trainer
    return Namespace(
        **{KEY: cell.to_json()},
        rollout_batch_size=trainer.prompts,
        n_samples_per_prompt=cell.rollout.samples,
        num_rollout=trainer.iterations,
        num_steps_per_rollout=trainer.steps,
        global_batch_size=trainer.prompts * cell.rollout.samples // trainer.steps,
        sglang_router_ip=None,
        sglang_router_port=None,
    )


@functools.lru_cache(maxsize=8)
def _parsed(settings: str) -> Cell:
    return parse_config(json.loads(settings), Cell, KEY)
