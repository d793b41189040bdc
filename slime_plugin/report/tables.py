"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text


def number_table(headings: Iterable[str], *, left: int = 1, no_wrap: bool = False, **options: Any) -> Table:
    """A table without lines whose columns hold numbers, flush right, from the ``left``-th on."""
    table = Table(**{"box": None, "pad_edge": False, "title_justify": "left", "caption_justify": "left", **options})
    for i, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if i >= left else "left", no_wrap=no_wrap)
    return table
