"""An editor of your own, complete: clear all but the last n tool results, as many coding agents do.

harness: {type: "examples.editors.keep_last:KeepLast", keep: 2}
"""

from __future__ import annotations

from pydantic import Field

from slime_plugin.config.frozen import Frozen
from slime_plugin.rollout.context import Context
from slime_plugin.rollout.editors import Ask, Editor
from slime_plugin.rollout.messages import Message


class KeepLastSettings(Frozen):
    """What stands beside ``type`` in the configuration; anything else there is refused before the run starts."""

    keep: int = Field(default=2, ge=0)
    """How many tool results stay."""
    note: str = "[cleared]"
    """What stands in place of the others."""


class KeepLast(Editor[KeepLastSettings]):
    """Before every turn, older tool results are replaced by a note."""

    Settings = KeepLastSettings

    async def before_turn(self, context: Context, ask: Ask) -> None:
        old = max(0, len(context.results) - self.settings.keep)
        for result in context.results[:old]:
            with context.edit("prune", author="harness", tool=result.name):
                context.replace([result.id], Message("tool", self.settings.note, note=True))
