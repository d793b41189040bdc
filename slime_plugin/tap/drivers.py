"""Import path of version 0.6 for a user's own drivers. Removed in 0.8; use ``slime_plugin.agents``."""

import warnings

from slime_plugin.agents import AgentTask, Driver, Finished, Launch
from slime_plugin.agents import AgentTask as Errand

__all__ = ["AgentTask", "Driver", "Errand", "Finished", "Launch"]

warnings.warn(
    "slime_plugin.tap.drivers is now slime_plugin.agents, and Errand is AgentTask; the old path is removed in 0.8",
    FutureWarning,
    2,
)
