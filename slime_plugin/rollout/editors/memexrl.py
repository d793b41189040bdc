"""MemexRL: the policy moves tool results from its context into a store, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slime_plugin.config.harness import MemexRL
from slime_plugin.rollout.context import Context, Segment
from slime_plugin.rollout.editors.editor import Action, Editor
from slime_plugin.rollout.messages import Message
from slime_plugin.rollout.tools.tool import Parameter, Schema, ToolError

_NAME = Parameter("string", "The name of the entry.")
OFFLOAD = Schema(
    "memory_offload",
    "Move tool results out of the conversation into memory. Only the name of the entry stays visible.",
    {
        "name": _NAME,
        "items": Parameter(
            "array",
            "Which tool results, by their number: 1 is the first one in the conversation. All, if not given.",
            required=False,
            items="integer",
        ),
    },
)
RETRIEVE = Schema(
    "memory_retrieve", "Bring the tool results of an entry back, to the end of the conversation.", {"name": _NAME}
)


class MemexRLEditor(Editor[MemexRL]):
    """Evicts tool results, restores them at the end on request, and restores all of them before the policy answers."""

    Settings = MemexRL

    def __init__(self, settings: MemexRL) -> None:
        super().__init__(settings)
        self._store: dict[str, tuple[Segment, list[int]]] = {}  # name -> its stub, the ids it replaces

    def actions(self) -> Iterable[Action]:
        yield Action(OFFLOAD, self._offload)
        yield Action(RETRIEVE, self._retrieve)

    def _offload(self, context: Context, arguments: Mapping[str, Any]) -> str:
        name = arguments["name"]
        results = context.results
        wanted = arguments.get("items", range(1, len(results) + 1))
        if name in self._store:
            raise ToolError(f"memory holds {name!r} already; choose another name")
        if not results:
            raise ToolError("there is no tool result to offload")
        wrong = [item for item in wanted if not 1 <= item <= len(results)]
        if wrong or not wanted:
            what = f"there is no tool result {wrong[0]}" if wrong else "items is empty"
            raise ToolError(f"{what}; tool results are numbered from 1 to {len(results)}")
        ids = [results[item - 1].id for item in sorted(set(wanted))]
        with context.edit("offload", author="policy", name=name):
            stub = context.replace(ids, Message("tool", self.settings.stub.replace("{name}", name), note=True))
        self._store[name] = stub, ids
        return self.settings.reply

    def _retrieve(self, context: Context, arguments: Mapping[str, Any]) -> str:
        name = arguments["name"]
        if name not in self._store:
            raise ToolError(f"memory holds no {name!r}; it holds {', '.join(self._store) or 'nothing'}")
        stub, ids = self._store.pop(name)
        with context.edit("retrieve", author="policy", name=name):
            context.evict([stub.id])
            context.restore(ids)
        return ""

    def before_answer(self, context: Context, draft: Segment | None) -> bool:
        if not self.settings.restore or not self._store:
            return False
        with context.edit("restore", author="harness", names=sorted(self._store)):
            if draft is not None:
                context.evict([draft.id])
            for stub, ids in self._store.values():
                index = context.index(stub.id)
                context.evict([stub.id])
                context.restore(ids, at=index)
        self._store.clear()
        return True


EDITOR = MemexRLEditor
