"""One real call of each tool of the cell: the same services, keys and limits as in a rollout, and no cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.errors import ConfigError, printable
from slime_plugin.rollout.questions import read_questions
from slime_plugin.rollout.tools import Tool, ToolError, open_tools
from slime_plugin.rollout.tools.tool import TOOL_FAILURES, Parameter
from slime_plugin.verify.measurement import Measurement, SkippedError
from slime_plugin.verify.settings import Verification

QUESTION = "Which city is the capital of France?"
ARGUMENTS = {"url": "https://example.com/", "goal": "What is this page for?"}
"""By name of a parameter; every other text is a question of the cell."""
_VALUES: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": False, "array": [], "object": {}}
_REMEDIES = {
    "key": "set the environment variable that the tool's key_variable names to a valid key",
    "rate limit": "lower the tool's rate, or ask the service for more",
    "timeout": "check the network and proxies, or raise the tool's timeout",
    "unavailable": "check the tool's url, the network, and http_proxy with no_proxy",
}
_CRASHED = "correct the tool's code: every rollout that calls it would read this"


def check(verification: Verification) -> Iterator[Measurement]:
    cell = verification.cell
    if not cell.tools:
        raise SkippedError("the cell has no tools")
    yield from asyncio.run(_call_all(_without_caches(cell)))


async def _call_all(cell: Cell) -> list[Measurement]:
    async with open_tools(cell.tools) as tools:
        question = _question(cell)
        return [await _call(tool, question, cell.rollout.tool_seconds) for tool in tools.values()]


async def _call(tool: Tool, question: str, timeout_s: float) -> Measurement:
    arguments = {name: _argument(name, parameter, question) for name, parameter in tool.schema.parameters.items()}
    what, started = tool.schema.name, time.perf_counter()
    try:
        text = await asyncio.wait_for(tool(arguments), timeout_s)
    except ToolError as error:
        if error.kind in TOOL_FAILURES:
            return Measurement(what, False, f"{error.kind}: {error}", remedy=_REMEDIES.get(error.kind, _CRASHED))
        return Measurement(what, True, f"answered with a refusal: {printable(error)}")
    except TimeoutError:
        return Measurement(what, False, f"no answer within {timeout_s:g} s", remedy=_REMEDIES["timeout"])
    except Exception as error:  # noqa: BLE001  # of a tool of one's own; a rollout would go on as well
        return Measurement(what, False, f"{type(error).__name__}: {printable(error)}", remedy=_CRASHED)
    seconds = time.perf_counter() - started
    return Measurement(what, True, f"{len(text):,} characters in {seconds:.2g} s: {printable(text, 40)}")


def _argument(name: str, parameter: Parameter, question: str) -> Any:
    return ARGUMENTS.get(name, question) if parameter.type == "string" else _VALUES[parameter.type]


def _question(cell: Cell) -> str:
    path = cell.rollout.questions
    if path is None or not path.is_file():
        return QUESTION
    return read_questions(path)[0].text


def _without_caches(cell: Cell) -> Cell:
    """Return the cell with tools that ask their services, whatever was asked before."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: None if key == "cache" else changed(item) for key, item in value.items()}
        return [changed(item) for item in value] if isinstance(value, list) else value

    tools = changed(cell.to_json()["tools"])
    try:
        return cell.model_copy(update={"tools": parse_config({"tools": tools}, Cell, "tools").tools})
    except ConfigError:  # a tool of one's own whose setting of that name is another thing
        return cell
