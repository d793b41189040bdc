"""Open the environment of a cell: an editor in the turn loop, or an agent behind the tap."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slime_plugin.agents import driver_for
from slime_plugin.agents.environment import open_agent_environment
from slime_plugin.config.cell import Cell
from slime_plugin.rollout.environment import RolloutEnvironment, open_editor_environment


@asynccontextmanager
async def open_environment(cell: Cell) -> AsyncIterator[RolloutEnvironment]:
    """Open the environment of ``harness:``. Invalid settings are refused here, before the first rollout."""
    driver = driver_for(cell.harness)
    if driver is None:
        async with open_editor_environment(cell) as editors:
            yield editors
    else:
        async with open_agent_environment(cell, driver) as agents:
            yield agents
