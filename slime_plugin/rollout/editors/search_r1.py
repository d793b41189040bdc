"""The control: a plain ReAct loop whose context only grows."""

from __future__ import annotations

from slime_plugin.config.harness import SearchR1
from slime_plugin.rollout.editors.editor import Editor


class SearchR1Editor(Editor[SearchR1]):
    """Never edits."""

    Settings = SearchR1


EDITOR = SearchR1Editor
