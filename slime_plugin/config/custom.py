"""Code of the user's own, by import path: ``type: package.module:Name``, with its settings beside it.

Editors, drivers and methods are subclasses (:func:`load_class`), tools and rewards any callable (:func:`load_custom`),
metrics plain functions (:func:`load_object`).

>>> load_object("math:sqroot", "tools[0].type")
Traceback (most recent call last):
    ...
slime_plugin.errors.ConfigError: tools[0].type: 'math' has no 'sqroot'; use 'sqrt'
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from slime_plugin.config.frozen import Frozen, models_in, parse_config, tag_of
from slime_plugin.errors import ConfigError, nearest

Base = TypeVar("Base")

CUSTOM = "package.module:Name"
"""Stands for an import path where error messages list the types of a block."""


class NoSettings(Frozen):
    """``Settings`` of code without settings."""


class Custom(Frozen):
    """Code by import path. All other keys are its settings, checked by the ``Settings`` model of that code."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """``package.module:Name``; the current folder is searched too."""

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def type_of(value: Any) -> str:
    """The discriminator of a union in which an import path chooses :class:`Custom`."""
    kind = value.get("type", "") if isinstance(value, dict) else getattr(value, "type", "")
    return CUSTOM if isinstance(kind, str) and ":" in kind else str(kind)


class _ByType:
    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = {tag_of(model) or CUSTOM: handler.generate_schema(model) for model in models_in(union)}
        return core_schema.tagged_union_schema(models, type_of)


BY_TYPE = _ByType()
"""Annotates a union of models, of which ``type`` chooses one: ``Annotated[TcRag | CustomHarness, BY_TYPE]``."""


def built_in(package: str, constant: str, names: Iterable[str]) -> dict[str, Any]:
    """What the modules of a package define as ``constant``, by the name of the module, which is a ``type``."""
    return {name: getattr(importlib.import_module(f"{package}.{name}"), constant) for name in names}


def load_object(path: str, where: str) -> Any:
    """Import ``package.module:Name``. Errors raised by that module itself are not caught."""
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError(f"{where}: {path!r} is not an import path; write it as {CUSTOM}")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # users keep their code beside their configuration, not in an installed package
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and something that it imports does not
        raise ConfigError(
            f"{where}: there is no module {error.name!r} for {path!r}; "
            "it has to be installed, or be in the folder that the command is run in"
        ) from None
    if not hasattr(module, name):
        public = sorted(word for word in vars(module) if not word.startswith("_"))
        raise ConfigError(f"{where}: {module_name!r} has no {name!r}; use {nearest(name, public)}")
    return getattr(module, name)


def load_class(custom: Custom, base: type[Base], where: str, settings: type[Frozen] = Frozen) -> tuple[type[Base], Any]:
    """A subclass of ``base`` and its checked settings, for which its ``Settings`` model derives from ``settings``."""
    loaded = load_object(custom.type, f"{where}.type")
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        package = base.__module__.rpartition(".")[0]  # which exports it
        raise ConfigError(f"{where}.type: {custom.type} is not a subclass of {package}.{base.__name__}")
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        raise ConfigError(f"{where}.type: {custom.type} does not define {', '.join(missing)}; name a class that does")
    return loaded, _parse_settings(custom, loaded, where, settings)


def load_custom(custom: Custom, where: str) -> Any:
    """An instance of a class, made with its settings if it has a ``Settings`` model; any other object as it is."""
    loaded = load_object(custom.type, f"{where}.type")
    if isinstance(loaded, type) and hasattr(loaded, "Settings"):
        return loaded(_parse_settings(custom, loaded, where, Frozen))
    if custom.settings:
        raise ConfigError(
            f"{where}: {custom.type} takes no settings, but {', '.join(custom.settings)} is given; "
            "make it a class with a model named Settings"
        )
    return loaded() if isinstance(loaded, type) else loaded


def _parse_settings(custom: Custom, loaded: Any, where: str, base: type[Frozen]) -> Frozen:
    model = loaded.Settings
    if not (isinstance(model, type) and issubclass(model, base)):
        raise ConfigError(f"{where}: {custom.type}.Settings has to derive from {base.__module__}.{base.__name__}")
    return parse_config(custom.settings, model, where)
