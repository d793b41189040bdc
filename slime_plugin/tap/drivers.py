"""Import path of version 0.6 for a user's own drivers. Removed in 0.8; use ``slime_plugin.agents``."""

import sys
import warnings

from slime_plugin.agents import DRIVERS, AgentTask, Driver, Finished, Launch, driver_for, run_agent
from slime_plugin.agents import AgentTask as Errand

__all__ = ["DRIVERS", "AgentTask", "Driver", "Errand", "Finished", "Launch", "driver_for", "run_agent"]

sys.modules[f"{__name__}.base"] = sys.modules[__name__]

warnings.warn(
    "slime_plugin.tap.drivers is now slime_plugin.agents, and Errand is AgentTask; the old path is removed in 0.8",
    FutureWarning,
    2,
)
