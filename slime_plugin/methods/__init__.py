"""The ways to turn one record into training input, one file each. Pure: a record in, rows out.

=================  =========================================================  =======================================
method             rows                                                       error
=================  =========================================================  =======================================
naive_compressed   one chain, ``H_comp``                                      tokens are scored without what they saw
naive_full         one chain, ``H_full``                                      tokens are scored with what they had lost
logittree          a chain per branch                                         none
mask4d             one tree (``trie``) or forest (``replicated``) per rollout  none (``union``: see there)
sdcc               ``H_comp``, and teacher rows for the diverging leaves      as naive_compressed, reduced by a KL
=================  =========================================================  =======================================

To add one: its settings in ``config/method.py``, and a file here that is named after its ``type`` and ends with
``METHOD = <its class>``.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

from slime_plugin.config import method as config
from slime_plugin.config.custom import NoSettings, built_in, load_class
from slime_plugin.config.method import METHODS, Distillation
from slime_plugin.errors import LayoutError
from slime_plugin.methods.base import Method, TrainedTokens
from slime_plugin.methods.cost import Computed, Workload
from slime_plugin.methods.row import Layout, Row, Teacher, chain_row, token_weights, trie_row
from slime_plugin.methods.teacher import teachers_of
from slime_plugin.methods.totals import Totals
from slime_plugin.record import Record
from slime_plugin.tree import Trajectory

DENOMINATOR = config.NaiveCompressed().type
"""The method that costs are measured against."""
_BUILT_IN: dict[str, type[Method[Any]]] = built_in(__name__, "METHOD", METHODS)


@functools.lru_cache(maxsize=64)
def method_of(settings: config.MethodSettings) -> Method[Any]:
    """Return the method of a configuration: a file of this package, or the user's own."""
    if isinstance(settings, config.CustomMethod):
        custom, own_settings = load_class(settings, Method, "method")
        return custom(own_settings, settings.type)
    return _BUILT_IN[settings.type](settings, settings.type)


def lay_out(record: Record | Trajectory, method: config.MethodSettings) -> Layout:
    """Return the rows of a record. Tokens that the record counts as untrained are lost under every method."""
    trajectory = record if isinstance(record, Trajectory) else Trajectory.of(record)
    layout = method_of(method).lay_out(trajectory)
    if len(layout.teachers) > 1 or (layout.teachers and len(layout.rows) != 1):
        raise LayoutError(
            f"{trajectory.record.label}: {len(layout.teachers)} teacher rows for {len(layout.rows)} rows of "
            f"{layout.method}; a rollout has one student row and at most one teacher row"
        )
    untrained = trajectory.record.untrained
    return replace(layout, lost=dict(Counter(layout.lost) + Counter(untrained))) if untrained else layout


__all__ = [
    "DENOMINATOR",
    "METHODS",
    "Computed",
    "Distillation",
    "Layout",
    "Method",
    "NoSettings",
    "Row",
    "Teacher",
    "Totals",
    "TrainedTokens",
    "Workload",
    "chain_row",
    "lay_out",
    "method_of",
    "teachers_of",
    "token_weights",
    "trie_row",
]
