"""The drivers, one file each, and the registry that a configuration's ``harness.type`` is looked up in."""

from __future__ import annotations

from typing import Any

from slime_plugin.config.custom import load_object
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.harness import BlackBox, CustomEditor, Harness
from slime_plugin.errors import ConfigError
from slime_plugin.tap.drivers.base import Driver, Errand, Finished, Launch
from slime_plugin.tap.drivers.claude_code import ClaudeCodeDriver
from slime_plugin.tap.drivers.opencode import OpenCodeDriver
from slime_plugin.tap.drivers.process import run_agent

__all__ = ["DRIVERS", "Driver", "Errand", "Finished", "Launch", "driver_for", "run_agent"]

DRIVERS: dict[str, type[Driver[Any]]] = {"claude_code": ClaudeCodeDriver, "opencode": OpenCodeDriver}


def driver_for(harness: Harness) -> Driver[Any] | None:
    """What starts the agent; None if the harness is an editor, and so no agent of its own."""
    if isinstance(harness, BlackBox):
        return DRIVERS[harness.type](harness)
    if not isinstance(harness, CustomEditor):
        return None
    custom = load_object(harness.type, "harness.type")
    if not isinstance(custom, type) or not issubclass(custom, Driver):
        return None
    if not issubclass(custom.Settings, BlackBox):
        raise ConfigError(f"harness: {harness.type}.Settings has to derive from slime_plugin.config.harness.BlackBox")
    return custom(parse_config(harness.settings, custom.Settings, "harness"))
