"""One cell of the matrix of harnesses and methods: what one run is configured with."""

from __future__ import annotations

from slime_plugin.config.frozen import File, Frozen
from slime_plugin.config.harness import Harness, SearchR1
from slime_plugin.config.method import Mask4d, Method
from slime_plugin.config.objective import Objective
from slime_plugin.config.reward import ExactMatch, Reward
from slime_plugin.config.rollout import Engine, Rollout
from slime_plugin.config.tools import Tools


class Cell(Frozen):
    """Harness and method are two independent switches: any of the one goes with any of the other."""

    model: File | None = None
    """Folder of a Hugging Face checkpoint with its tokenizer: the policy."""
    harness: Harness = SearchR1()
    method: Method = Mask4d()

    rollout: Rollout = Rollout()
    engine: Engine = Engine()
    tools: Tools = ()
    reward: Reward = ExactMatch()

    objective: Objective = Objective()
    std: bool = True
    """Divide advantages by the standard deviation of their group."""
