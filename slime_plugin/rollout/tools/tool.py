"""The tool interface: a schema for the policy, and a coroutine that returns the text of a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from slime_plugin.errors import ConfigError, MemoryWalkerError, nearest

ErrorKind = Literal[
    "malformed",
    "unknown tool",
    "arguments",
    "refused",
    "out of time",
    "key",
    "rate limit",
    "unavailable",
    "timeout",
    "crashed",
]
"""Why a call failed. The first four are caused by the policy, ``out of time`` is the limit of the rollout, and the
others are in :data:`TOOL_FAILURES`."""
TOOL_FAILURES = frozenset[str]({"key", "rate limit", "unavailable", "timeout", "crashed"})
"""Kinds of errors that no policy can avoid: what it reads of them teaches it nothing about its calls."""


class ToolError(MemoryWalkerError):
    """A call that failed. Its message becomes the tool result, so it addresses the policy."""

    kind: ErrorKind = "refused"

    def __init__(self, message: str = "", kind: ErrorKind = "refused") -> None:
        super().__init__(message)
        kinds = get_args(ErrorKind)
        if kind not in kinds:
            raise ConfigError(f"{kind!r:.40} is not a kind of tool error; use {nearest(kind, kinds)}")
        self.kind = kind


TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
"""Python types of JSON types."""


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
    """Name, description and parameters of a tool, for the policy."""

    name: str
    description: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the function schema that chat templates expect."""
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
    """Executes calls of many rollouts at once; keeps no state of a rollout."""

    @property
    def schema(self) -> Schema: ...

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of the result. ``arguments`` match the schema. Raises :class:`ToolError`."""
        ...
