"""The user's own code, named by import path: ``type: package.module:Name``, with its settings beside it.

>>> load_object("math:sqroot", "tools[0].type")
Traceback (most recent call last):
    ...
slime_plugin.errors.ConfigError: tools[0].type: 'math' has no 'sqroot'; use 'sqrt'
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from pydantic import ConfigDict, Field

from slime_plugin.config.frozen import Frozen, parse_config
from slime_plugin.errors import ConfigError, nearest

CUSTOM = "package.module:Name"
"""Tag of the alternative that an import path chooses; messages show it among the types there are."""


class Custom(Frozen):
    """Code by import path. Every further key is a setting of that code, and checked by its own ``Settings`` model."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """``package.module:Name``; packages in the current folder are found too."""

    @property
    def settings(self) -> dict[str, Any]:
        """All keys but ``type``."""
        return dict(self.model_extra or {})


def type_of(value: Any) -> str:
    """Discriminates unions in which a ``type`` with a colon is an import path."""
    kind = value.get("type", "") if isinstance(value, dict) else getattr(value, "type", "")
    return CUSTOM if isinstance(kind, str) and ":" in kind else str(kind)


def load_object(path: str, where: str) -> Any:
    """What ``package.module:Name`` names. An error inside that module is the user's to see, and is not touched."""
    module_name, colon, name = path.partition(":")
    if not (colon and name and module_name):
        raise ConfigError(f"{where}: {path!r} is not an import path; write it as {CUSTOM}")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # users keep their code beside their configuration, not in an installed package
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise  # the module is there, and something it imports is not
        raise ConfigError(
            f"{where}: there is no module {missing!r} for {path!r}; "
            "it has to be installed, or lie in the folder that the command is run in"
        ) from None
    try:
        return getattr(module, name)
    except AttributeError:
        public = sorted(word for word in vars(module) if not word.startswith("_"))
        raise ConfigError(f"{where}: {module_name!r} has no {name!r}; use {nearest(name, public)}") from None


def load_custom(custom: Custom, where: str) -> Any:
    """The code that is meant. A class is called, with its ``Settings`` if it has that model; all else is left as is."""
    loaded = load_object(custom.type, f"{where}.type")
    model = getattr(loaded, "Settings", None) if isinstance(loaded, type) else None
    if model is None:
        if custom.settings:
            raise ConfigError(
                f"{where}: {custom.type} takes no settings, but {', '.join(custom.settings)} is given; "
                "make it a class with a model named Settings"
            )
        return loaded() if isinstance(loaded, type) else loaded
    if not (isinstance(model, type) and issubclass(model, Frozen)):
        raise ConfigError(f"{where}: {custom.type}.Settings has to derive from slime_plugin.config.frozen.Frozen")
    return loaded(parse_config(custom.settings, model, where))
