"""What the rollouts of a cell need from outside of its configuration: code, corpora, keys, an agent's program.

Checked on the machine that will use it, before anything expensive is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from slime_plugin.agents import driver_for
from slime_plugin.config.cell import Cell
from slime_plugin.config.custom import Custom, load_object
from slime_plugin.config.tools import Bm25
from slime_plugin.config.tracking import Tracking
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.tools.api_keys import read_key
from slime_plugin.run.metrics import load_user_metrics


@dataclass(frozen=True, slots=True)
class Need:
    """Something outside of a configuration that it names."""

    kind: Literal["code", "corpus", "key", "agent"]
    found: str
    """What is there; empty if there is a problem."""
    problem: str = ""
    remedy: str = ""


def needs_of(cell: Cell) -> Iterator[Need]:
    """Look for everything that the rollouts of a cell need, on this machine. Nothing is opened or sent."""
    broken = set()
    for where, block in _blocks(cell):
        for need in _needs_of_block(where, block):
            broken.add(need.problem)
            yield need
    yield from (need for need in _agent(cell) if not need.problem or need.problem not in broken)


def rollout_problems(cell: Cell) -> Iterator[str]:
    """Why the rollouts of a cell would fail on this machine."""
    return (need.problem for need in needs_of(cell) if need.problem)


def _blocks(value: Any, where: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Yield every block of a configuration with its key."""
    if isinstance(value, BaseModel):
        yield where, value
        for name in type(value).model_fields:
            yield from _blocks(getattr(value, name), f"{where}.{name}".lstrip("."))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _blocks(item, f"{where}.{i}")


def _needs_of_block(where: str, block: BaseModel) -> Iterator[Need]:
    if isinstance(block, Custom):
        yield _code(where, block)
    elif isinstance(block, Tracking) and block.metrics:
        yield _metrics(where, block)
    elif isinstance(block, Bm25):
        yield _corpus(where, block)
    variable = getattr(block, "key_variable", None)
    if variable is not None:
        yield _key(where, variable)


def _code(where: str, block: Custom) -> Need:
    return _imported(f"{where}.type", lambda: load_object(block.type, f"{where}.type"), f"{where}: {block.type}")


def _metrics(where: str, block: Tracking) -> Need:
    found = f"{where}.metrics: {', '.join(block.metrics)}"
    return _imported(f"{where}.metrics", lambda: load_user_metrics(block.metrics), found)


def _imported(where: str, load: Callable[[], object], found: str) -> Need:
    try:
        load()
    except ConfigError as error:
        return Need("code", "", str(error))
    except Exception as error:  # noqa: BLE001  # the user's module may raise anything, and may be needed elsewhere only
        problem = f"{where}: cannot be imported here ({type(error).__name__}: {error}); install what it needs"
        return Need("code", "", problem)
    return Need("code", found)


def _corpus(where: str, block: Bm25) -> Need:
    try:
        with open(block.corpus, "rb") as file:
            if file.read(1):
                return Need("corpus", f"{block.corpus}: {os.fstat(file.fileno()).st_size:,} bytes")
            reason = "is empty"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    return Need("corpus", "", f"{where}.corpus: {block.corpus} {reason}; name a file of JSON lines with `text`")


def _key(where: str, variable: str) -> Need:
    try:
        read_key(variable, os.environ, where)
    except ConfigError as error:
        return Need("key", "", str(error), f"export {variable}=...")
    return Need("key", f"{where}: {variable} is set")


def _agent(cell: Cell) -> Iterator[Need]:
    try:
        driver = driver_for(cell.harness)
        if driver is None:
            return
        from slime_plugin.agents.environment import check_black_box  # needs the packages of the tap

        check_black_box(cell, driver)
        found = str(driver.program())
        version = driver.version() if driver.verified else ""
    except ConfigError as error:
        yield Need("agent", "", str(error))
        return
    remedy = f"launch/harnesses.sh installs {driver.verified}, which the driver was tested with"
    if version == driver.verified:
        yield Need("agent", f"{found} {version}".strip())
    else:
        yield Need("agent", f"{found} is version {version}", remedy=remedy)
