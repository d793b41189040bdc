"""The base of all configuration models, and the YAML reader that explains what is wrong with a file.

PyYAML follows YAML 1.1, where ``1e-6`` is a string; here it is a number, and a text ``1e-6`` is written with quotes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from slime_plugin.errors import ConfigError, nearest


class Frozen(BaseModel):
    """A model whose instances do not change and whose unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


Model = TypeVar("Model", bound=Frozen)

File = Annotated[Path, Field(strict=False)]
"""A path, relative to the folder a command is run in. YAML has strings, which a strict model would refuse."""


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"scheme {parts.scheme!r} is neither http nor https; write http://host:port/path")
    if parts.username or parts.password:
        raise ValueError("it has a password in it, which ends up in logs; name an environment variable as key_variable")
    return url


Url = Annotated[str, AfterValidator(_address)]
"""Of a server."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with the floats of YAML 1.2, in which a key that is given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        mapping = super().construct_mapping(node, deep)
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} is given twice", node.start_mark)
        return mapping


class _Dumper(yaml.SafeDumper):
    """What it writes, the loader reads back the same."""


def _list_node(dumper: _Dumper, items: list[Any]) -> yaml.Node:
    plain = not any(isinstance(item, dict | list) for item in items)  # these stay on one line
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=plain)


_Dumper.add_representer(list, _list_node)

for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
        list("-+.0123456789"),
    )


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong with a configuration."""

    keys: tuple[str, ...]
    """Where, as it is written in the file."""
    text: str
    """Where and what, with the remedy."""


def load_config(path: str | Path, model: type[Model]) -> Model:
    """The configuration in a YAML file, or a :class:`ConfigError` with one line per mistake."""
    return parse_config(read_yaml(path), model, str(path))


def read_yaml(path: str | Path) -> Any:
    """What is in a YAML file; one with nothing in it is an empty configuration."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from error
    value = parse_yaml(text, str(path))
    return {} if value is None else value


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from error


def to_yaml(value: Any, width: int = 120) -> str:
    """As :func:`parse_yaml` reads it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def parse_config(value: Any, model: type[Model], where: str | Callable[[Mistake], str]) -> Model:
    """The configuration in a parsed value. ``where`` is its place, or tells whose fault a mistake is."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        mistakes = [_explain(detail, model, value) for detail in error.errors()]
    places = [where if isinstance(where, str) else where(mistake) for mistake in mistakes]
    raise ConfigError("\n".join(f"{place}: {mistake.text}" for place, mistake in zip(places, mistakes, strict=True)))


def models_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The models that a value of that type may be or hold, in the order in which they are given."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(model for part in get_args(annotation) for model in models_in(part))


def tag_of(model: type[BaseModel]) -> str | None:
    """The ``type`` that chooses a model among others; None where nothing does."""
    field = model.model_fields.get("type")
    return field.default if field is not None and isinstance(field.default, str) else None


def _explain(detail: ErrorDetails, model: type[Frozen], value: Any) -> Mistake:
    keys = _written_keys(detail["loc"], value)
    place = ".".join(keys) or "the whole file"
    context = detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        text = f"{place}: unknown key; {_meant(keys, detail['loc'][:-1], model)}"
    elif detail["type"] == "missing":
        text = f"{place}: missing; it has no default"
    elif detail["type"] == "union_tag_invalid":
        known = [tag.strip("'") for tag in str(context["expected_tags"]).split(", ")]
        found = f"there is no {context['tag']!r}" if context["tag"] else "missing"
        text = f"{place}.type: {found}; use {nearest(context['tag'], known)}"
    elif detail["type"] == "value_error":
        text = f"{place}: {context['error']}"
    else:
        text = f"{place}: {detail['msg']}, but it is {detail['input']!r:.60}"
    return Mistake(tuple(keys), text)


def _written_keys(loc: tuple[str | int, ...], value: Any) -> list[str]:
    """The path to a mistake as it stands in the file: pydantic adds the names of the alternatives it tried."""
    keys = []
    for i, key in enumerate(loc):
        if isinstance(value, dict) and key not in value and (i < len(loc) - 1 or key == value.get("type")):
            continue
        keys.append(str(key))
        listed = isinstance(value, list) and isinstance(key, int)
        value = value[key] if listed else value.get(key) if isinstance(value, dict) else None
    return keys


def _meant(keys: Sequence[str], loc: Sequence[str | int], model: type[BaseModel]) -> str:
    """What to do about a key that is not there: its neighbours come first, then what has that name elsewhere."""
    key, place = keys[-1], ".".join("0" if part.isdecimal() else part for part in keys)
    siblings = _keys_at(loc, model)
    if difflib.get_close_matches(key, siblings):
        return f"use {nearest(key, siblings)}"
    everywhere = list(_all_places(model))
    types = [kind for path, kind in everywhere if path == place]
    if types:
        return f"it belongs to type {' and '.join(types)}"
    close = difflib.get_close_matches(key, [path.rpartition(".")[2] for path, _ in everywhere], n=1, cutoff=0.75)
    there = [
        f"{path!r} of type {kind}" if kind else repr(path)
        for path, kind in everywhere
        if path.rpartition(".")[2] in close
    ]
    if not there:
        return f"use {nearest(key, siblings)}" if siblings else "leave it out"
    return f"use {there[0]}" if len(there) == 1 else f"use one of {', '.join(there[:4])}"


def _keys_at(loc: Sequence[str | int], model: type[BaseModel]) -> list[str]:
    """The keys of the block there. Of models that may stand in one place, pydantic names the one it took."""
    models: tuple[type[BaseModel], ...] = (model,)
    for part in loc:
        fields = [found.model_fields[part] for found in models if part in found.model_fields]
        if fields:
            models = tuple(inner for field in fields for inner in models_in(field.annotation))
        elif isinstance(part, str):
            models = tuple(found for found in models if tag_of(found) == part)
    return [name for found in models for name in found.model_fields]


def _all_places(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Every key anywhere below a model as it is written, and the type of the block it is in, or an empty text."""
    for name, field in model.model_fields.items():
        if name == "type":
            continue  # a word that a dozen blocks have, and that no other is a misspelling of
        full = f"{path}.{name}" if path else name
        yield full, tag_of(model) or ""
        inside = f"{full}.0" if get_origin(field.annotation) is tuple else full
        for inner in models_in(field.annotation):
            yield from _all_places(inner, inside)
