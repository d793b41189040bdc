"""The editors, one file each.

To add one: its settings in ``config/harness.py``, and a file here that is named after its ``type`` and ends with
``EDITOR = <its class>``. An edit kind of its own needs no entry anywhere: ``context.edit("my_editor:branch")``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_plugin.config.custom import built_in, load_class
from slime_plugin.config.harness import EDITOR_TYPES, BlackBox, CustomHarness, Harness
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.editors.editor import Action, Ask, Editor

__all__ = ["EDITORS", "Action", "Ask", "Editor", "editor_factory"]

EDITORS: dict[str, type[Editor[Any]]] = built_in(__name__, "EDITOR", EDITOR_TYPES)


def editor_factory(harness: Harness) -> Callable[[], Editor[Any]]:
    """Return what makes the editor of one rollout. Invalid settings are refused here, before the first rollout."""
    if isinstance(harness, BlackBox):
        raise ConfigError(
            f"harness: {harness.type} is an agent of its own, served through the tap, and has no editor; use one of "
            f"{', '.join(EDITORS)} here"
        )
    if not isinstance(harness, CustomHarness):
        editor = EDITORS[harness.type]
        return lambda: editor(harness)
    custom, settings = load_class(harness, Editor, "harness")
    return lambda: custom(settings)
