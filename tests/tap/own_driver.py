"""A black box of one's own: all that it takes."""

from __future__ import annotations

import sys
from pathlib import Path

from slime_plugin.agents import AgentTask, Driver, Launch
from slime_plugin.config.frozen import File
from slime_plugin.config.harness import BlackBox


class OwnSettings(BlackBox):
    program: File | None = Path(sys.executable)
    asks: int = 3
    forget: int = 2
    hang: bool = False
    strict: bool = False
    """It fails if the policy is cut off."""


class OwnDriver(Driver[OwnSettings]):
    Settings = OwnSettings
    command = "python"

    def prepare(self, task: AgentTask, home: Path, work: Path) -> Launch:
        settings = self.settings
        env = {"URL": task.url, "TOKEN": task.token, "TURNS": str(settings.asks), "FORGET": str(settings.forget)}
        env |= {name.upper(): "1" for name in ("hang", "strict") if getattr(settings, name)}
        agent = Path(__file__).with_name("agent.py")
        return Launch((sys.executable, "-I", str(agent)), self.environment(home) | env, self.request(task))
