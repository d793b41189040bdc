"""The drivers, one file each.

To add one: its settings in ``config/harness.py``, and a file here that is named after its ``type`` and ends with
``DRIVER = <its class>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime_plugin.agents.agent_process import run_agent
from slime_plugin.agents.driver import AgentTask, Driver, Finished, Launch
from slime_plugin.config.custom import built_in, load_class, load_object
from slime_plugin.config.harness import BLACK_BOXES, BlackBox, CustomHarness, Harness
from slime_plugin.tap.payload import Thread, ThreadOf

__all__ = ["DRIVERS", "AgentTask", "Driver", "Finished", "Launch", "Thread", "any_thread_of", "driver_for", "run_agent"]

DRIVERS: dict[str, type[Driver[Any]]] = built_in(__name__, "DRIVER", BLACK_BOXES)


def any_thread_of(driver: Driver[Any] | None = None) -> ThreadOf:
    """Read thread headers of any client: those of this driver first, then those of the built-in drivers."""
    drivers = [*([] if driver is None else [type(driver)]), *DRIVERS.values()]

    def thread_of(headers: Mapping[str, str]) -> Thread:
        threads = [driver.thread_of(headers) for driver in drivers]
        named = next((thread for thread in threads if thread.name), Thread())
        return replace(named, purpose=next((thread.purpose for thread in threads if thread.purpose), ""))

    return thread_of


def driver_for(harness: Harness) -> Driver[Any] | None:
    """The driver of an agent; None for an editor."""
    if isinstance(harness, BlackBox):
        return DRIVERS[harness.type](harness)
    if not isinstance(harness, CustomHarness):
        return None
    custom = load_object(harness.type, "harness.type")
    if not isinstance(custom, type) or not issubclass(custom, Driver):
        return None  # an editor
    driver, settings = load_class(harness, Driver, "harness", BlackBox)  # type: ignore[type-abstract]  # a subclass
    return driver(settings)
