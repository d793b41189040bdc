"""Import paths of version 0.6 for a user's own editors, tools, rewards and engines, until 0.8.

They are in ``slime_plugin.rollout`` now. Nothing of the package imports this one.
"""

from __future__ import annotations

import sys
import warnings

from slime_plugin.rollout import chat, context, editors, engine, messages, questions, reward, tools
from slime_plugin.rollout.chat import chat as chat_base
from slime_plugin.rollout.editors import editor
from slime_plugin.rollout.engine import engine as engine_base
from slime_plugin.rollout.tools import tool

_MODULES = (chat, context, editors, engine, messages, questions, reward, tools)
_BASES = {chat: chat_base, editors: editor, engine: engine_base, tools: tool}
for _module in _MODULES:
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
for _package, _module in _BASES.items():
    sys.modules[f"{__name__}.{_package.__name__.rpartition('.')[2]}.base"] = _module
    _package.__dict__["base"] = _module  # for `from slime_plugin.bridge.tools import base`

warnings.warn(
    "slime_plugin.bridge is now slime_plugin.rollout; the old path is removed in version 0.8", FutureWarning, 2
)
