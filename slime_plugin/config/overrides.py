"""Settings on the command line: ``method=sdcc trainer.tp=2 tools.0.top_k=5``, over those of a file.

Values are YAML. A word alone for a block that has a ``type`` chooses that type: ``harness=tc_rag``. The file's settings
of the block stay if the type is what it was, and go if it changes, because they belong to another type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import Mistake, models_in, parse_config, parse_yaml, read_yaml, tag_of
from slime_plugin.errors import ConfigError

WHERE = "command line"


def load_cell(path: str | Path, overrides: Sequence[str] = (), further: Sequence[str | Path] = ()) -> Cell:
    """The cell in a YAML file, with some of its settings given anew: by further files, and then one by one."""
    value = read_yaml(path)
    for other in further:
        value = merged(value, read_yaml(other))
    where = " with ".join(map(str, (path, *further)))
    return parse_cell(value, overrides, where)


def merged(value: Any, other: Any) -> Any:
    """Settings of two files, where those of the other count; a block of another type takes the place of the first.

    >>> merged({"trainer": {"tp": 2, "pp": 1}, "method": {"type": "sdcc", "weight": 0.2}},
    ...        {"trainer": {"tp": 4}, "method": {"type": "mask4d"}})
    {'trainer': {'tp': 4, 'pp': 1}, 'method': {'type': 'mask4d'}}
    """
    if not isinstance(value, dict) or not isinstance(other, dict):
        return other
    if "type" in other and other["type"] != value.get("type"):
        return other
    return {**value, **{key: merged(value.get(key), item) for key, item in other.items()}}


def parse_cell(value: Any, overrides: Sequence[str], where: str) -> Cell:
    """The cell in a parsed value, with some of its settings given anew. Of two for one key the later one counts."""
    parsed = sorted((_parse(text) for text in overrides), key=lambda override: override.depth)
    if not isinstance(value, dict) or not parsed:
        return parse_config(value, Cell, where)
    try:
        value = _copied(value)
    except RecursionError:
        raise ConfigError(f"{where}: a block is inside itself; write it out") from None
    effective = [override for override in parsed if _apply(override, value)]
    return parse_config(value, Cell, lambda mistake: _place(mistake, effective, where))


@dataclass(frozen=True, slots=True)
class _Override:
    text: str
    keys: tuple[str, ...]
    value: Any

    @property
    def depth(self) -> int:
        """Blocks and their types come before what is in them, in whatever order they are given."""
        return len(self.keys) - (self.keys[-1] == "type")

    def refuse(self, reason: str) -> ConfigError:
        return ConfigError(f"{WHERE}: {self.text:.80}: {reason}")


def _parse(text: str) -> _Override:
    path, equals, written = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals:
        raise ConfigError(f"{WHERE}: {text!r:.80} has no '='; settings are key=value, such as trainer.tp=2")
    if not all(keys):
        raise ConfigError(f"{WHERE}: {text!r:.80} has an empty key; settings are key=value, such as trainer.tp=2")
    if not written.strip():
        raise ConfigError(
            f"{WHERE}: {text:.80} has no value; {path}=null sets none, {path}='\"\"' an empty text, with both quotes"
        )
    return _Override(text, keys, parse_yaml(written, f"{WHERE}: {text:.80}"))


def _copied(value: Any) -> Any:
    """Without anything that stands in two places: a YAML alias is one object, and an override is for one of them."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _apply(override: _Override, value: dict[str, Any]) -> bool:
    """Put the setting into the value; false if it is there already."""
    *path, last = override.keys
    block: Any = value
    models: tuple[type[BaseModel], ...] = (Cell,)
    for depth, name in enumerate(path):
        key, field = _key(override, depth, block), _field(block, name, models)
        if isinstance(block, dict):
            models = () if field is None else models_in(field.annotation)
            if block.get(key) is None:
                block[key] = _opened(field)
        block = block[key]
    key = _key(override, len(path), block)
    if isinstance(block, dict) and last == "type" and any(map(tag_of, models)):
        return _choose(block, override.value)
    field = _field(block, last, models)
    if isinstance(override.value, str) and _has_types(block, field, models):
        there = block[key] if isinstance(block, list) else block.setdefault(key, {})
        if not isinstance(there, dict):
            there = block[key] = {}
        return _choose(there, override.value)
    block[key] = override.value
    return True


def _key(override: _Override, depth: int, block: Any) -> Any:
    """What the key at that depth is to the block it is looked up in."""
    key, place = override.keys[depth], ".".join(override.keys[:depth])
    if isinstance(block, dict):
        return key
    if not isinstance(block, list):
        raise override.refuse(f"{place} is {block!r:.40}, which has no {key!r} in it")
    if not (key.isascii() and key.isdecimal() and int(key) < len(block)):
        valid = f"use a number from 0 to {len(block) - 1}" if block else f"set all of it: {place}=[...]"
        raise override.refuse(f"{place} has {len(block)} entries, and none is {key!r}; {valid}")
    return int(key)


def _field(block: Any, name: str, models: Sequence[type[BaseModel]]) -> FieldInfo | None:
    """What a block's key is declared as, by the model that its type chooses; None in lists and where nothing is."""
    if not isinstance(block, dict):
        return None
    chosen = [model for model in models if tag_of(model) in (None, block.get("type"))]
    return next((model.model_fields[name] for model in chosen if name in model.model_fields), None)


def _has_types(block: Any, field: FieldInfo | None, models: Sequence[type[BaseModel]]) -> bool:
    """Whether what is set is a block of which a ``type`` says what it is."""
    if isinstance(block, list):
        return any(map(tag_of, models))
    if field is None or get_origin(field.annotation) is tuple:
        return False
    return any(map(tag_of, models_in(field.annotation)))


def _choose(block: dict[str, Any], kind: Any) -> bool:
    if block.get("type") == kind:
        return False
    block.clear()
    block["type"] = kind
    return True


def _opened(field: FieldInfo | None) -> Any:
    """A block that the file does not have, before something in it is set: what decides about the rest is its type."""
    default = field.default if field is not None else None
    if isinstance(default, BaseModel):
        kind = tag_of(type(default))
        return {} if kind is None else {"type": kind}
    return list(default) if isinstance(default, tuple) else {}


def _place(mistake: Mistake, overrides: Sequence[_Override], where: str) -> str:
    """Whose fault a mistake is: that of the last setting that was made there, or around it, or of the file."""
    for override in reversed(overrides):
        common = min(len(override.keys), len(mistake.keys))
        if common and override.keys[:common] == mistake.keys[:common]:
            inside = len(override.keys) > len(mistake.keys) and override.keys != (*mistake.keys, "type")
            return f"{WHERE}: {override.text:.80}" if inside else WHERE
    return where
