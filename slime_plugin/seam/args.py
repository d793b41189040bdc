"""The configuration inside slime's arguments.

slime sets every key of ``--custom-config-path`` on its arguments, unchecked. So there is one key, and what is below it
is checked here.
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
    """The cell that the arguments carry."""
    settings = getattr(args, KEY, None)
    if settings is None:
        raise ConfigError(f"the arguments have no {KEY!r}; put the cell under that key of --custom-config-path")
    return _parsed(json.dumps(settings, sort_keys=True))


def carry(cell: Cell) -> dict[str, object]:
    """A cell as the value of that key: plain data, for any process."""
    return cell.model_dump(mode="json")


@functools.lru_cache(maxsize=8)
def _parsed(settings: str) -> Cell:
    return parse_config(json.loads(settings), Cell, KEY)
