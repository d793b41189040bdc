"""TC-RAG: the tool results in the context are a stack, and the policy decides when one of them leaves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slime_plugin.config.harness import TcRag
from slime_plugin.rollout.context import Context
from slime_plugin.rollout.editors.editor import Action, Editor
from slime_plugin.rollout.tools.tool import Schema


class TcRagEditor(Editor[TcRag]):
    """``pop()`` evicts a whole tool result. A policy that never pops leaves K = 0."""

    Settings = TcRag

    def actions(self) -> Iterable[Action]:
        which = self.settings.evict
        yield Action(Schema("pop", f"Remove the {which} tool result from the conversation, to make room."), self._pop)

    def _pop(self, context: Context, arguments: Mapping[str, Any]) -> str:
        stack = context.results
        if not stack:
            return self.settings.empty
        popped = {"oldest": stack[0], "newest": stack[-1], "largest": max(stack, key=len)}[self.settings.evict]
        with context.edit("pop", author="policy"):
            context.evict([popped.id])
        return self.settings.reply


EDITOR = TcRagEditor
