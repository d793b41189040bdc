"""How the agent beside this file is started: all that it takes to train through your own agent.

harness: {type: "examples.black_box.driver:FoldingAgentDriver", corpus: facts.jsonl, fold_at: 85}
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from slime_plugin.agents import AgentTask, Driver, Launch
from slime_plugin.config.frozen import File
from slime_plugin.config.harness import BlackBox
from slime_plugin.errors import ConfigError

AGENT = Path(__file__).with_name("agent.py")


class FoldingAgent(BlackBox):
    """What stands beside ``type`` in the configuration; anything else there is refused before the run starts."""

    program: File | None = Path(sys.executable)
    instructions: str = ""
    corpus: File
    """The facts that it looks things up in."""
    fold_at: int = Field(default=85, ge=1)
    """Tokens of a turn, with its context, from which on it folds."""


class FoldingAgentDriver(Driver[FoldingAgent]):
    Settings = FoldingAgent
    command = "python"

    def prepare(self, task: AgentTask, home: Path, work: Path) -> Launch:
        settings = self.settings
        if not settings.corpus.is_file():  # whatever is wrong here is told before the first rollout
            raise ConfigError(f"harness.corpus: there is no file {settings.corpus}")
        env = {"OPENAI_BASE_URL": f"{task.url}/v1", "OPENAI_API_KEY": task.token}
        limits = ("--turns", str(task.turns), "--turn-tokens", str(task.turn_tokens))
        argv = (str(self.program()), "-I", str(AGENT), str(settings.corpus.resolve()))
        return Launch(
            (*argv, "--fold-at", str(settings.fold_at), *limits), self.environment(home) | env, self.request(task)
        )
