"""One cell of the matrix of harnesses and methods: what one run is configured with."""

from __future__ import annotations

from slime_plugin.config.cluster import Cluster
from slime_plugin.config.evaluation import Evaluation
from slime_plugin.config.frozen import File, Frozen
from slime_plugin.config.harness import Harness, SearchR1
from slime_plugin.config.method import Mask4d, Method
from slime_plugin.config.objective import Objective
from slime_plugin.config.reward import ExactMatch, Reward
from slime_plugin.config.rollout import Engine, Rollout
from slime_plugin.config.tools import Tools
from slime_plugin.config.tracking import Tracking
from slime_plugin.config.trainer import Trainer


class Cell(Frozen):
    """Harness and method are two independent switches: any of the one goes with any of the other."""

    model: File | None = None
    """Folder of a Hugging Face checkpoint with its tokenizer: the policy."""
    harness: Harness = SearchR1()
    """How the live context is edited during a rollout: one of the two switches."""
    method: Method = Mask4d()
    """How a rollout is turned into training input: the other switch."""

    rollout: Rollout = Rollout()
    """How rollouts are sampled."""
    engine: Engine = Engine()
    """What samples them."""
    tools: Tools = ()
    """What the policy may call."""
    reward: Reward = ExactMatch()
    """What a rollout is worth."""

    objective: Objective = Objective()
    """What a policy update minimises."""
    std: bool = True
    """Divide advantages by the standard deviation of their group."""
    trainer: Trainer = Trainer()
    """How the policy is updated, and how the work is split over ranks."""
    evaluation: Evaluation = Evaluation()
    """How well the policy does meanwhile, on other questions."""
    tracking: Tracking = Tracking()
    """Where metrics go."""
    cluster: Cluster = Cluster()
    """Where slime runs it."""
