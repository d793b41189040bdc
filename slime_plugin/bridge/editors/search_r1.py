"""The control: a plain ReAct loop whose context only grows."""

from __future__ import annotations

from slime_plugin.bridge.editors.base import Editor
from slime_plugin.config.harness import SearchR1


class SearchR1Editor(Editor[SearchR1]):
    """Never edits."""

    Settings = SearchR1
