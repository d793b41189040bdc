"""Checked access to the fields of a request, for all wire formats; errors name the path of the field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime_plugin.errors import nearest, printable
from slime_plugin.tap.payload import Part, TapError, ToolSpec

MAX_NAME_CHARS = 200
MEDIA = {"image", "image_url", "input_image", "audio", "input_audio", "document", "file", "input_file", "video_url"}
"""Blocks that are not text, in all wire formats."""


def _type_name(value: object) -> str:
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "missing" if value is None else kinds.get(type(value), "a number")


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a request with its path. A missing one has the value None.

    >>> Field({"messages": [{"role": "user"}]})["messages"].each()[0]["role"]
    Field(value='user', path='messages[0].role')
    """

    value: Any
    path: str = ""

    def __getitem__(self, key: str) -> Field:
        return Field(self.mapping().get(key), f"{self.path}.{key}" if self.path else key)

    def wrong(self, why: str) -> TapError:
        return TapError("invalid", why, self.path or None)

    def mapping(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong(f"must be an object, is {_type_name(self.value)}")
        return self.value

    def items(self) -> list[Any]:
        if not isinstance(self.value, list):
            raise self.wrong(f"must be a list, is {_type_name(self.value)}")
        return self.value

    def each(self, start: int = 0) -> list[Field]:
        return [Field(value, f"{self.path}[{i}]") for i, value in enumerate(self.items()[start:], start)]

    def text(self, default: str | None = None) -> str:
        if self.value is None and default is not None:
            return default
        if not isinstance(self.value, str):
            raise self.wrong(f"must be a string, is {_type_name(self.value)}")
        return self.value

    def name(self) -> str:
        """Return a string of limited length: it is stored with every answer."""
        if len(name := self.text()) > MAX_NAME_CHARS:
            raise self.wrong(f"has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed")
        return name

    def flag(self) -> bool:
        """Return a boolean; a missing one is False."""
        if self.value is not None and not isinstance(self.value, bool):
            raise self.wrong(f"must be true or false, is {_type_name(self.value)}")
        return bool(self.value)

    def count(self) -> int | None:
        """Return a number of tokens; None if it is missing."""
        if self.value is not None and (type(self.value) is not int or self.value < 1):
            raise self.wrong("must be a whole number of at least 1")
        return self.value

    def among(self, names: Iterable[str]) -> str:
        """Return one of some names, such as a role or a type."""
        names = list(names)
        if (name := self.text()) not in names:
            raise self.wrong(f"{printable(name)!r} is not supported; use {nearest(name, names)}")
        return name

    def block(self, names: Iterable[str]) -> str:
        """Return the type of a content block, one of ``names``."""
        kind = self["type"]
        if isinstance(kind.value, str) and kind.value in MEDIA:
            raise kind.wrong(f"{kind.value} blocks are refused: the model behind this provider reads only text")
        return kind.among(names)

    def unset(self, why: str, *allowed: object) -> None:
        """Refuse any value except an empty one and those allowed."""
        if self.value is None or self.value in ([], {}, "") or self.value is False or self.value in allowed:
            return
        raise self.wrong(why)


def read_tool(tool: Field, schema: str) -> ToolSpec:
    """Read a function whose parameters are under the key ``schema``."""
    name = tool["name"].text()
    if not name:
        raise tool["name"].wrong("must not be empty")
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}
    if tool[schema].value is not None:
        parameters = tool[schema].mapping()
    return ToolSpec(name, tool["description"].text(""), parameters)


def distinct(tools: Field, specs: Iterable[tuple[Field, ToolSpec]]) -> Iterator[ToolSpec]:
    """Refuse two tools of the same name."""
    seen: set[str] = set()
    for where, spec in specs:
        if spec.name in seen:
            raise where["name"].wrong(f"the name {printable(spec.name)!r} is taken by another of {tools.path}")
        seen.add(spec.name)
        yield spec


def require_parts(parts: tuple[Part, ...], where: Field) -> tuple[Part, ...]:
    """Refuse an empty conversation."""
    if not parts:
        raise where.wrong("the conversation is empty; send at least one message with text")
    return parts
