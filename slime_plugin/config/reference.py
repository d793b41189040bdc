"""The reference of all keys: the default configuration as YAML, generated from the models with their documentation.

Alternatives are commented out; without the first ``#`` of each of its lines such a block is in force.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from slime_plugin.config.cell import Cell
from slime_plugin.config.custom import CUSTOM, Custom
from slime_plugin.config.frozen import models_in, to_yaml

WIDTH = 120

_HEADER = f"""\
Every key of a configuration, with its default; written by: memorywalker config reference

A configuration names only what differs from this. Any key can also be given on the command line, as in
memorywalker config show configs/quickstart.yaml method=sdcc trainer.tp=2

Other types of a block, and blocks that are off by default, are commented out. Without the first # of each of its
lines such a block is in force, in place of the one above it. A type of your own is an import path,
{CUSTOM}, with its settings beside it."""


def reference() -> str:
    """As text; loading it gives the defaults."""
    lines = [f"# {line}".rstrip() for line in _HEADER.splitlines()]
    for name, value in Cell():
        lines += ["", *_entry(Cell, name, value)]
    return "\n".join(lines) + "\n"


def _entry(model: type[BaseModel], name: str, value: Any) -> list[str]:
    """A key with its documentation above and its alternatives below."""
    field = model.model_fields[name]
    comment = textwrap.wrap(_documentation(model, name, field), WIDTH - 14, break_on_hyphens=False)
    lines = _prefixed("# ", comment)
    if isinstance(value, BaseModel):
        lines += [f"{name}:", *_prefixed("  ", _entries(type(value), value))]
    else:
        limits = _limits(field)
        text = to_yaml({name: to_jsonable_python(value)}, width=WIDTH - 14).rstrip()
        lines += (f"{text} # {limits}" if limits and "\n" not in text else text).splitlines()
    models = models_in(field.annotation)
    if get_origin(field.annotation) is tuple and models:
        return lines + _prefixed("#", [f"{name}:", *(line for other in models for line in _item(other))])
    for other in models:
        if other is not type(value):
            lines += _prefixed("#", [f"{name}:", *_prefixed("  ", _entries(other))])
    return lines


def _item(model: type[BaseModel]) -> list[str]:
    """An item of a list; its documentation is above the dash."""
    lines = _entries(model)
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return [*_prefixed("  ", lines[:first]), f"  - {lines[first]}", *_prefixed("    ", lines[first + 1 :])]


def _entries(model: type[BaseModel], value: BaseModel | None = None) -> list[str]:
    """All keys of a model, its type first; without a value, with its defaults."""
    lines = []
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] != "type"):
        default = _example(model, name, field) if field.is_required() else field.default
        lines += _entry(model, name, default if value is None else getattr(value, name))
    return lines


def _documentation(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """The docstring of a key; with that of its model for a ``type``, and for a block without one."""
    parts = [field.description or ""]
    models = models_in(field.annotation)
    if name == "type":
        parts.insert(0, inspect.getdoc(model) or "")
    elif field.is_required():
        parts.insert(0, "Required.")
    elif len(models) == 1 and "type" not in models[0].model_fields:
        optional = type(None) in get_args(field.annotation)
        parts.insert(0 if optional else 1, inspect.getdoc(models[0]) or "")
    text = re.sub(r":\w+:(?=`)", "", " ".join(parts)).replace("``", "`")
    return " ".join(text.split())


def _example(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """The value of a key without a default."""
    if issubclass(model, Custom):
        return CUSTOM
    return f"path/to/{name}" if field.annotation is Path else "http://127.0.0.1:8000"


def _limits(field: FieldInfo) -> str:
    """The valid values, where a few words list them."""
    choices = _choices(field.annotation)
    if len(choices) > 1:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    return ", ".join(
        f"{text} {getattr(limit, bound):g}"
        for limit in field.metadata
        for bound, text in bounds.items()
        if getattr(limit, bound, None) is not None
    )


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _prefixed(prefix: str, lines: Iterable[str]) -> list[str]:
    return [f"{prefix}{line}" for line in lines]
