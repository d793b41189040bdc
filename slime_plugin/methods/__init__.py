"""The five ways to turn one record into training input, one file each. Pure: a record in, rows out.

=================  =========================================================  =======================================
method             rows                                                       what it gets wrong
=================  =========================================================  =======================================
naive_compressed   one chain, ``H_comp``                                      scores tokens without what they had seen
naive_full         one chain, ``H_full``                                      scores tokens with what they had lost
logittree          a chain per branch                                         nothing
mask4d             one tree (``trie``) or forest (``replicated``) per rollout  nothing (``union``: see there)
sdcc               ``H_comp``, and teacher rows for the diverging leaves      as naive_compressed, pulled back by a KL
=================  =========================================================  =======================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slime_plugin.config import method as config
from slime_plugin.methods import logittree, mask4d, naive_compressed, naive_full, sdcc
from slime_plugin.methods.credit import Credit, assign_credit
from slime_plugin.methods.row import Layout, Row, Teacher
from slime_plugin.methods.weights import token_weights
from slime_plugin.record import Record
from slime_plugin.tree import Trajectory

# Each function takes the configuration of its own method: the one type the registry cannot state.
METHODS: dict[str, Callable[[Trajectory, Any], Layout]] = {
    "naive_compressed": naive_compressed.lay_out,
    "naive_full": naive_full.lay_out,
    "logittree": logittree.lay_out,
    "mask4d": mask4d.lay_out,
    "sdcc": sdcc.lay_out,
}


def lay_out(record: Record | Trajectory, method: config.Method) -> Layout:
    """The training input of a record under a method. What the record says no method can train is lost under each."""
    trajectory = record if isinstance(record, Trajectory) else Trajectory.of(record)
    layout = METHODS[method.type](trajectory, method)
    untrained = trajectory.record.untrained
    return replace(layout, lost=dict(Counter(layout.lost) + Counter(untrained))) if untrained else layout


__all__ = ["METHODS", "Credit", "Layout", "Row", "Teacher", "assign_credit", "lay_out", "token_weights"]
