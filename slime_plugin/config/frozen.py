"""The base of all configuration models, and the YAML reader that explains what is wrong with a file.

PyYAML follows YAML 1.1, where ``1e-6`` is a string; here it is a number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar
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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def load_config(path: str | Path, model: type[Model]) -> Model:
    """The configuration in a YAML file, or a :class:`ConfigError` with one line per mistake."""
    try:
        value = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    return parse_config({} if value is None else value, model, str(path))


def parse_config(value: Any, model: type[Model], where: str) -> Model:
    """The configuration in a parsed value."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        lines = [f"{where}: {_explain(detail, model, value)}" for detail in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _explain(detail: ErrorDetails, model: type[Frozen], value: Any) -> str:
    keys = _written_keys(detail["loc"], value)
    place = ".".join(keys) or "the whole file"
    context = detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        return f"{place}: unknown key; use {nearest(keys[-1], sorted(_all_keys(model) - {keys[-1]}))}"
    if detail["type"] == "missing":
        return f"{place}: missing; it has no default"
    if detail["type"] == "union_tag_invalid":
        known = [tag.strip("'") for tag in str(context["expected_tags"]).split(", ")]
        found = f"there is no {context['tag']!r}" if context["tag"] else "missing"
        return f"{place}.type: {found}; use {nearest(context['tag'], known)}"
    if detail["type"] == "value_error":
        return f"{place}: {context['error']}"
    return f"{place}: {detail['msg']}, but it is {detail['input']!r:.60}"


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


def _all_keys(model: type[BaseModel]) -> set[str]:
    """Every key anywhere below a model: where a key was misspelt, its neighbours are what was meant."""
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return {key for part in parts for key in part.get("properties", {})}
