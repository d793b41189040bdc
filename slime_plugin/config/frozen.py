"""The base of all configuration models, and a YAML reader whose errors name the key and the remedy.

PyYAML follows YAML 1.1, where ``1e-6`` is a string; here it is a number, and a string ``1e-6`` needs quotes.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from slime_plugin.errors import ConfigError, nearest


class Frozen(BaseModel):
    """An immutable model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Old to new name of a renamed key. The old name is accepted with a warning until its line here is removed."""

    @model_validator(mode="before")
    @classmethod
    def _rename_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for old, new in cls.RENAMED.items():
            if old in value:
                if new in value:
                    raise ValueError(f"{old} is the old name of {new}, and both are given; use {new} alone")
                warnings.warn(f"configuration key {old} is now {new}; rename it", FutureWarning, stacklevel=2)
                value = {new if key == old else key: item for key, item in value.items()}
        return value


Model = TypeVar("Model", bound=Frozen)

ABSOLUTE = "absolute"
"""Serialization context that writes all paths as absolute ones, for other folders and nodes."""


def _path_text(path: Path, info: SerializationInfo) -> str:
    return str(path.resolve() if info.context == ABSOLUTE else path)


# not strict: YAML has texts, not paths
File = Annotated[Path, Field(strict=False), PlainSerializer(_path_text, when_used="json")]
"""A path, relative to the folder that a command is run in. Not strict, because YAML has strings."""


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"scheme {parts.scheme!r} is neither http nor https; write http://host:port/path")
    if parts.username or parts.password:
        raise ValueError("it has a password in it, which ends up in logs; name an environment variable as key_variable")
    return url


Url = Annotated[str, AfterValidator(_check_url)]


class _Loader(yaml.SafeLoader):
    """Safe YAML with the floats of YAML 1.2, where a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        mapping = super().construct_mapping(node, deep)
        duplicate = next((key for key in keys if keys.count(key) > 1), None)
        if duplicate is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key {duplicate!r} is given twice", node.start_mark)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Its output is read back unchanged by the loader."""


def _list_node(dumper: _Dumper, items: list[Any]) -> yaml.Node:
    scalars = not any(isinstance(item, dict | list) for item in items)  # a list of scalars stays on one line
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=scalars)


_Dumper.add_representer(list, _list_node)

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
        list("-+.0123456789"),
    )


@dataclass(frozen=True, slots=True)
class Mistake:
    """One error in a configuration."""

    keys: tuple[str, ...]
    """Path of its key, as written in the file."""
    text: str
    """Key, error and remedy."""


def load_config(path: str | Path, model: type[Model]) -> Model:
    """The configuration in a YAML file, or a :class:`ConfigError` with one line per mistake."""
    return parse_config(read_yaml(path), model, str(path))


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from error


def read_yaml(path: str | Path) -> Any:
    """The value in a YAML file; an empty file is an empty configuration."""
    value = parse_yaml(read_text(path), str(path))
    return {} if value is None else value


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from error


def to_yaml(value: Any, width: int = 120) -> str:
    """The inverse of :func:`parse_yaml`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def parse_config(value: Any, model: type[Model], where: str | Callable[[Mistake], str]) -> Model:
    """The configuration in a parsed value. ``where`` names its source, or finds the source of a mistake."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        mistakes = [_explain(detail, model, value) for detail in error.errors()]
    sources = [where if isinstance(where, str) else where(mistake) for mistake in mistakes]
    raise ConfigError("\n".join(f"{source}: {mistake.text}" for source, mistake in zip(sources, mistakes, strict=True)))


def models_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The models in a type annotation, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(model for part in get_args(annotation) for model in models_in(part))


def tag_of(model: type[BaseModel]) -> str | None:
    """The ``type`` that chooses a model in a union, or None."""
    field = model.model_fields.get("type")
    return field.default if field is not None and isinstance(field.default, str) else None


def _explain(detail: ErrorDetails, model: type[Frozen], value: Any) -> Mistake:
    keys = _written_keys(detail["loc"], value)
    key_path = ".".join(keys) or "the whole file"
    context = detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        text = f"{key_path}: unknown key; {_suggestion(keys, model, value)}"
    elif detail["type"] == "missing":
        text = f"{key_path}: missing; it has no default"
    elif detail["type"] == "union_tag_invalid":
        known = [tag.strip("'") for tag in str(context["expected_tags"]).split(", ")]
        found = f"there is no {context['tag']!r}" if context["tag"] else "missing"
        text = f"{key_path}.type: {found}; use {nearest(context['tag'], known)}"
    elif detail["type"] == "value_error":
        text = f"{key_path}: {context['error']}"
    else:
        text = f"{key_path}: {detail['msg']}, but it is {detail['input']!r:.60}"
    return Mistake(tuple(keys), text)


def _written_keys(loc: tuple[str | int, ...], value: Any) -> list[str]:
    """The path of an error as in the file, without the names of union alternatives that pydantic adds."""
    keys = []
    for i, key in enumerate(loc):
        if isinstance(value, dict) and key not in value and (i < len(loc) - 1 or key == value.get("type")):
            continue
        keys.append(str(key))
        value = _inside(value, str(key))
    return keys


def _inside(value: Any, key: str) -> Any:
    """The value of a key, or of an index of a list; None where there is none."""
    if isinstance(value, list):
        return value[int(key)] if key.isdecimal() and int(key) < len(value) else None
    return value.get(key) if isinstance(value, dict) else None


def _suggestion(keys: list[str], model: type[BaseModel], value: Any) -> str:
    """The remedy for an unknown key: a similar key of its block, else one of that name in another block."""
    *block, key = keys
    for part in block:
        value = _inside(value, part)
    kind = value.get("type") if isinstance(value, dict) else None
    parent = "".join(f"{'0' if part.isdecimal() else part}." for part in block)
    known = list(_all_keys(model))
    siblings = [path.removeprefix(parent) for path, tag in known if path.startswith(parent) and tag in (None, kind)]
    siblings = [name for name in siblings if "." not in name]
    if difflib.get_close_matches(key, siblings):
        return f"use {nearest(key, siblings)}"
    types = [tag for path, tag in known if path == parent + key and tag]
    if types:
        return f"it belongs to type {' and '.join(types)}"
    names = [path.rpartition(".")[2] for path, _ in known]
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
    others = [
        f"{path!r} of type {tag}" if tag else repr(path)
        for (path, tag), name in zip(known, names, strict=True)
        if name in close
    ]
    if not others:
        return f"use {nearest(key, siblings)}" if siblings else "leave it out"
    return f"use {others[0]}" if len(others) == 1 else f"use one of {', '.join(others[:4])}"


def _all_keys(model: type[BaseModel], parent: str = "") -> Iterator[tuple[str, str | None]]:
    """Path of every key of a model and the models in it, with the ``type`` of its block."""
    for name, field in model.model_fields.items():
        if name == "type":
            continue  # a dozen blocks have it, and no other key is a misspelling of it
        yield f"{parent}{name}", tag_of(model)
        index = "0." if get_origin(field.annotation) is tuple else ""
        for inner in models_in(field.annotation):
            yield from _all_keys(inner, f"{parent}{name}.{index}")
