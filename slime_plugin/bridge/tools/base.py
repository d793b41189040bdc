"""What a tool is: a schema the policy is shown, and a coroutine that answers a call with text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_plugin.errors import ConfigError, MemoryWalkerError, nearest


class ToolError(MemoryWalkerError):
    """A call that cannot be answered. Its text becomes the tool result, so it speaks to the policy."""


TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
"""JSON types and what they are here."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a tool."""

    type: str
    """A JSON type: string, integer, number, boolean, array or object."""
    description: str = ""
    required: bool = True
    items: str | None = None
    """The JSON type of the items of an array."""

    def __post_init__(self) -> None:
        for kind in (self.type, self.items):
            if kind is not None and kind not in TYPES:
                raise ConfigError(f"{kind!r} is not the type of a tool's argument; use {nearest(kind, list(TYPES))}")


@dataclass(frozen=True, slots=True)
class Schema:
    """What the policy is told about a tool."""

    name: str
    description: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the function schema that chat templates expect."""
        properties: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            properties[name] = {"type": parameter.type, "description": parameter.description}
            if parameter.items is not None:
                properties[name]["items"] = {"type": parameter.items}
        required = [name for name, parameter in self.parameters.items() if parameter.required]
        schema = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


class Tool(Protocol):
    """Answers calls of any number of sessions at once; keeps no state of a session."""

    @property
    def schema(self) -> Schema: ...

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """The text of the result. ``arguments`` fit the schema. Raises :class:`ToolError` for what has no answer."""
        ...
