"""Settings on the command line: ``method=sdcc trainer.tp=2 tools.0.top_k=5``, over those of a file.

Values are YAML. A word alone for a block with a ``type`` chooses that type: ``harness=tc_rag``. If the type changes,
the file's settings of the block are dropped, because they belong to another type.
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
    """The cell in a YAML file, with settings replaced by further files and then by overrides."""
    value = read_yaml(path)
    for other in further:
        value = merged(value, read_yaml(other))
    return parse_cell(value, overrides, " with ".join(map(str, (path, *further))))


def merged(value: Any, other: Any) -> Any:
    """The settings of two files, the second taking precedence; a block of another type replaces the first one.

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
    """The cell in a parsed value, with overrides applied. Of two overrides of one key the later one wins."""
    parsed = sorted((_parse(text) for text in overrides), key=lambda override: override.depth)
    if not isinstance(value, dict) or not parsed:
        return parse_config(value, Cell, where)
    try:
        value = _copied(value)
    except RecursionError:
        raise ConfigError(f"{where}: a block is inside itself; write it out") from None
    effective = [override for override in parsed if _apply(override, value)]
    return parse_config(value, Cell, lambda mistake: _source(mistake, effective, where))


@dataclass(frozen=True, slots=True)
class _Override:
    text: str
    keys: tuple[str, ...]
    value: Any

    @property
    def depth(self) -> int:
        """Order of application: a block and its type before the keys in it, whatever the order on the command line."""
        return len(self.keys) - (self.keys[-1] == "type")

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"{WHERE}: {self.text:.80}: {reason}")


def _parse(text: str) -> _Override:
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        wrong = "an empty key" if equals else "no '='"
        raise ConfigError(f"{WHERE}: {text!r:.80} has {wrong}; settings are key=value, such as trainer.tp=2")
    if not value.strip():
        raise ConfigError(
            f"{WHERE}: {text:.80} has no value; {path}=null sets none, {path}='\"\"' an empty text, with both quotes"
        )
    return _Override(text, keys, parse_yaml(value, f"{WHERE}: {text:.80}"))


def _copied(value: Any) -> Any:
    """A copy without shared parts: a YAML alias is one object in two places, and an override changes only one."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _apply(override: _Override, value: dict[str, Any]) -> bool:
    """Set the value; False if that changes nothing."""
    block: Any = value
    models: tuple[type[BaseModel], ...] = (Cell,)
    *path, last = override.keys
    for depth, name in enumerate(path):
        key, field = _key(override, depth, block), _field(block, name, models)
        if isinstance(block, dict):
            models = () if field is None else models_in(field.annotation)
            if block.get(key) is None:
                block[key] = _default_block(field)
        block = block[key]
    key, field = _key(override, len(path), block), _field(block, last, models)
    if isinstance(block, dict) and last == "type" and any(map(tag_of, models)):
        return _choose_type(block, override.value)
    if isinstance(block, dict):  # the models of the value; in a list they are those of its items
        is_block = field is not None and get_origin(field.annotation) is not tuple
        models = models_in(field.annotation) if field is not None and is_block else ()
    if isinstance(override.value, str) and any(map(tag_of, models)):
        current = block.get(key) if isinstance(block, dict) else block[key]
        block[key] = current if isinstance(current, dict) else {}
        return _choose_type(block[key], override.value)
    block[key] = override.value
    return True


def _key(override: _Override, depth: int, block: Any) -> Any:
    """The key of an override at that depth: a name in a block, an index in a list."""
    key, key_path = override.keys[depth], ".".join(override.keys[:depth])
    if isinstance(block, dict):
        return key
    if not isinstance(block, list):
        raise override.error(f"{key_path} is {block!r:.40}, which has no {key!r} in it")
    if not (key.isascii() and key.isdecimal() and int(key) < len(block)):
        valid = f"use a number from 0 to {len(block) - 1}" if block else f"set all of it: {key_path}=[...]"
        raise override.error(f"{key_path} has {len(block)} entries, and none is {key!r}; {valid}")
    return int(key)


def _field(block: Any, name: str, models: Sequence[type[BaseModel]]) -> FieldInfo | None:
    """The declaration of a key in the model that the block's type chooses, if there is one."""
    if not isinstance(block, dict):
        return None
    chosen = [model for model in models if tag_of(model) in (None, block.get("type"))]
    return next((model.model_fields[name] for model in chosen if name in model.model_fields), None)


def _choose_type(block: dict[str, Any], kind: Any) -> bool:
    if block.get("type") == kind:
        return False
    block.clear()
    block["type"] = kind
    return True


def _default_block(field: FieldInfo | None) -> Any:
    """A block that the file does not have: its default type, which decides about its keys, and nothing else."""
    default = field.default if field is not None else None
    if isinstance(default, tuple):
        return list(default)
    kind = tag_of(type(default)) if isinstance(default, BaseModel) else None
    return {} if kind is None else {"type": kind}


def _source(mistake: Mistake, overrides: Sequence[_Override], where: str) -> str:
    """The last override at the key of a mistake, or around it; otherwise the file."""
    for override in reversed(overrides):
        common = min(len(override.keys), len(mistake.keys))
        if common and override.keys[:common] == mistake.keys[:common]:
            inside = len(override.keys) > len(mistake.keys) and override.keys != (*mistake.keys, "type")
            return f"{WHERE}: {override.text:.80}" if inside else WHERE
    return where
