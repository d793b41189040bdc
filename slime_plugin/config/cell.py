"""The configuration of one run: a cell of the matrix of harnesses and methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_plugin.config.cluster import Cluster
from slime_plugin.config.evaluation import Evaluation
from slime_plugin.config.frozen import File, Frozen
from slime_plugin.config.harness import Harness, SearchR1
from slime_plugin.config.method import Mask4d, MethodSettings
from slime_plugin.config.objective import Objective
from slime_plugin.config.reward import ExactMatch, Reward
from slime_plugin.config.rollout import EngineSettings, Rollout
from slime_plugin.config.tools import Tools
from slime_plugin.config.tracking import Tracking
from slime_plugin.config.trainer import Trainer
from slime_plugin.errors import ConfigError

NO_MODEL = "model: missing; name the folder of a Hugging Face checkpoint with its tokenizer"
NO_QUESTIONS = "rollout.questions: missing; name a file of JSON lines with question and answers"


class Cell(Frozen):
    """Harness and method are two independent switches: any harness works with any method."""

    model: File | None = None
    """Folder of a Hugging Face checkpoint with its tokenizer: the policy."""
    harness: Harness = SearchR1()
    """How the live context is edited during a rollout: one of the two switches."""
    method: MethodSettings = Mask4d()
    """How a rollout is turned into training input: the other switch."""

    rollout: Rollout = Rollout()
    """How rollouts are sampled."""
    engine: EngineSettings = EngineSettings()
    """The server that samples them."""
    tools: Tools = ()
    """Tools that the policy may call."""
    reward: Reward = ExactMatch()
    """The reward of a rollout."""

    objective: Objective = Objective()
    """The loss of a policy update."""
    std: bool = True
    """Divide advantages by the standard deviation of their group."""
    trainer: Trainer = Trainer()
    """How the policy is updated, and its parallelism."""
    evaluation: Evaluation = Evaluation()
    """Evaluation on other questions during training."""
    tracking: Tracking = Tracking()
    """Metric writers."""
    cluster: Cluster = Cluster()
    """Machines and GPUs of a job under slime."""

    def require_model(self) -> Path:
        if self.model is None:
            raise ConfigError(NO_MODEL)
        return self.model

    def require_questions(self) -> Path:
        if self.rollout.questions is None:
            raise ConfigError(NO_QUESTIONS)
        return self.rollout.questions

    def to_json(self) -> dict[str, Any]:
        """JSON values, for other processes and for ``run.json``."""
        return self.model_dump(mode="json")
