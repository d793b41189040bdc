"""Parse tool calls from a turn: Hermes and Qwen write JSON between ``<tool_call>`` tags.

A call that cannot be executed is not an error of the rollout: its tool result says what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_plugin.errors import nearest, printable
from slime_plugin.rollout.tools.tool import TYPES, Schema

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z|(?=<tool_call>))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that cannot be parsed."""

    reason: str


def split_calls(text: str) -> tuple[str, list[Call]]:
    """Return the text without the calls, and the calls. A call that cannot be parsed stays text.

    >>> split_calls('Look: <tool_call>{"name": "ls"}</tool_call> <tool_call>{"na')
    ('Look:  <tool_call>{"na', [Call(name='ls', arguments={})])
    """
    calls: list[Call] = []

    def taken(match: re.Match[str]) -> str:
        call = _parse(match[1], closed=match[2] == "</tool_call>")
        if isinstance(call, BadCall):
            return match[0]
        calls.append(call)
        return ""

    return _CALL.sub(taken, text), calls


def parse_calls(text: str) -> list[Call | BadCall]:
    """Return the calls of a turn, in order.

    >>> parse_calls('<tool_call>\\n{"name": "pop", "arguments": {}}\\n</tool_call>')
    [Call(name='pop', arguments={})]
    >>> parse_calls('<tool_call>\\n{"name": "sea')
    [BadCall(reason='the call has no closing </tool_call>')]
    """
    return [_parse(match[1], closed=match[2] == "</tool_call>") for match in _CALL.finditer(text)]


def _parse(body: str, *, closed: bool) -> Call | BadCall:
    if not closed:
        return BadCall("the call has no closing </tool_call>")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return BadCall(f"the call is not JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('the call has to be an object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return BadCall(f'"arguments" has to be an object, not {type(arguments).__name__}')
    return Call(value["name"], arguments)


def unknown_tool(name: str, known: list[str]) -> str:
    return f"there is no tool {printable(name, 40)!r}; use {nearest(name, known)}"


def wrong_arguments(schema: Schema, arguments: Mapping[str, Any]) -> str | None:
    """Return the first mismatch between a call's arguments and the schema, if there is one."""
    for name in arguments:
        if name not in schema.parameters:
            known = list(schema.parameters)
            remedy = f"use {nearest(name, known)}" if known else "it takes none"
            return f"{schema.name} has no argument {printable(name, 40)!r}; {remedy}"
    for name, parameter in schema.parameters.items():
        if name not in arguments:
            if parameter.required:
                return f"{schema.name} needs the argument {name!r} ({parameter.type})"
            continue
        value = arguments[name]
        items = value if parameter.type == "array" and isinstance(value, list) else []
        if not _fits(value, parameter.type):
            return f"argument {name!r} of {schema.name} has to be {parameter.type}, not {type(value).__name__}"
        if parameter.items is not None and not all(_fits(item, parameter.items) for item in items):
            return f"argument {name!r} of {schema.name} has to hold only {parameter.items} items"
    return None


def _fits(value: object, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
