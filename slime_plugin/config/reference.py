"""The reference of all keys: a YAML file made from the models, with every key, its default and its documentation.

What it holds is the default configuration. What may stand in its place is commented out: take one ``#`` away from each
line of such a block, and it is in force.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
    default = Cell()
    for name, field in Cell.model_fields.items():
        lines += ["", *_entry(Cell, name, field, getattr(default, name))]
    return "\n".join(lines) + "\n"


def _entry(model: type[BaseModel], name: str, field: FieldInfo, value: Any) -> Iterator[str]:
    """A key with what stands above and below it."""
    yield from _comment(documentation(model, name, field))
    models = models_in(field.annotation)
    if isinstance(value, BaseModel):
        yield from _block(name, type(value), value)
    else:
        limits = _limits(field)
        text = to_yaml({name: _plain(value)}, width=WIDTH - 14).rstrip()
        yield from f"{text} # {limits}".splitlines() if limits and "\n" not in text else text.splitlines()
    if get_origin(field.annotation) is tuple and models:
        yield from _commented_out([f"{name}:", *_items(models)])
        return
    for other in models:
        if other is not type(value):
            yield from _commented_out(_block(name, other, None))


def _block(name: str, model: type[BaseModel], value: BaseModel | None) -> Iterator[str]:
    yield f"{name}:"
    yield from _indented(_entries(model, value))


def _items(models: Sequence[type[BaseModel]]) -> Iterator[str]:
    """One entry of a list for each model; its documentation stands before the dash."""
    for model in models:
        lines = list(_entries(model, None))
        first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
        yield from _indented(lines[:first])
        yield f"  - {lines[first]}"
        yield from _indented(lines[first + 1 :], "    ")


def _entries(model: type[BaseModel], value: BaseModel | None) -> Iterator[str]:
    """All keys of a model, its type first; without a value, with its defaults."""
    names = sorted(model.model_fields, key=lambda name: name != "type")
    for name in names:
        field = model.model_fields[name]
        if value is not None:
            current = getattr(value, name)
        else:
            current = _example(model, name, field) if field.is_required() else field.default
        yield from _entry(model, name, field, current)


def documentation(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """What is said about a key. A ``type`` says what the model is that it chooses, and so does a block without one."""
    parts = [field.description or ""]
    models = models_in(field.annotation)
    if name == "type":
        parts.insert(0, _summary(model))
    elif field.is_required():
        parts.insert(0, "Needed.")
    elif len(models) == 1 and "type" not in models[0].model_fields:
        optional = type(None) in get_args(field.annotation)
        parts.insert(0 if optional else 1, _summary(models[0]))
    text = re.sub(r":\w+:(?=`)", "", " ".join(parts)).replace("``", "`")
    return " ".join(text.split())


def _summary(model: type[BaseModel]) -> str:
    return inspect.getdoc(model) or ""


def _example(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """For a key without a default."""
    if issubclass(model, Custom):
        return CUSTOM
    return f"path/to/{name}" if field.annotation is Path else "http://127.0.0.1:8000"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _limits(field: FieldInfo) -> str:
    """What values there are, where a few words say it."""
    choices = _choices(field.annotation)
    if len(choices) > 1:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    words = [
        f"{text} {getattr(limit, bound):g}"
        for limit in field.metadata
        for bound, text in bounds.items()
        if getattr(limit, bound, None) is not None
    ]
    return ", ".join(words)


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, WIDTH - 14, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"


def _indented(lines: Iterable[str], by: str = "  ") -> Iterator[str]:
    for line in lines:
        yield f"{by}{line}"


def _commented_out(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"#{line}"
