"""Import paths of version 0.6 for a user's own editors, tools and rewards, until 0.8.

They are in ``slime_plugin.rollout`` now. Nothing of the package imports this one.
"""

from __future__ import annotations

import sys
import warnings

from slime_plugin.rollout import context, editors, messages, questions, reward, tools
from slime_plugin.rollout.editors import editor
from slime_plugin.rollout.tools import tool

_MOVED = {
    "context": context,
    "editors": editors,
    "editors.base": editor,
    "messages": messages,
    "questions": questions,
    "reward": reward,
    "tools": tools,
    "tools.base": tool,
}
for _name, _module in _MOVED.items():
    sys.modules[f"{__name__}.{_name}"] = _module
    if _name.endswith(".base"):  # for `from slime_plugin.bridge.tools import base`
        sys.modules[f"{__name__}.{_name.removesuffix('.base')}"].__dict__["base"] = _module

warnings.warn(
    "slime_plugin.bridge is now slime_plugin.rollout; the old path is removed in version 0.8", FutureWarning, 2
)
