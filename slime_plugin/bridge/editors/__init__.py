"""The editors, one file each, and the registry that a configuration's ``harness.type`` is looked up in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_plugin.bridge.editors.agentfold import AgentFoldEditor
from slime_plugin.bridge.editors.base import Action, Ask, Editor
from slime_plugin.bridge.editors.memexrl import MemexRLEditor
from slime_plugin.bridge.editors.search_r1 import SearchR1Editor
from slime_plugin.bridge.editors.tc_rag import TcRagEditor
from slime_plugin.config.custom import load_object
from slime_plugin.config.frozen import Frozen, parse_config
from slime_plugin.config.harness import ClaudeCode, CustomEditor, Harness, OpenCode
from slime_plugin.errors import ConfigError

__all__ = ["EDITORS", "Action", "Ask", "Editor", "editor_factory"]

EDITORS: dict[str, type[Editor[Any]]] = {
    "search_r1": SearchR1Editor,
    "tc_rag": TcRagEditor,
    "agentfold": AgentFoldEditor,
    "memexrl": MemexRLEditor,
}


def editor_factory(harness: Harness) -> Callable[[], Editor[Any]]:
    """Makes the editor of one rollout. Whatever is wrong with the settings is said now, not then."""
    if isinstance(harness, ClaudeCode | OpenCode):
        raise ConfigError(
            f"harness: {harness.type} is an agent of its own, served through the tap, and has no editor; use one of "
            f"{', '.join(EDITORS)} here"
        )
    if not isinstance(harness, CustomEditor):
        editor = EDITORS[harness.type]
        return lambda: editor(harness)
    custom = load_object(harness.type, "harness.type")
    if not isinstance(custom, type) or not issubclass(custom, Editor):
        raise ConfigError(f"harness.type: {harness.type} is no subclass of slime_plugin.bridge.editors.Editor")
    if not issubclass(custom.Settings, Frozen):
        raise ConfigError(f"harness: {harness.type}.Settings has to derive from slime_plugin.config.frozen.Frozen")
    settings = parse_config(harness.settings, custom.Settings, "harness")
    return lambda: custom(settings)
