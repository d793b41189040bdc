"""Pages from Jinja2 templates. Every value is escaped unless it is marked as markup."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from slime_plugin.report.staircase import SHOWN


def read_part(name: str) -> Markup:
    """Return a style sheet or a script of this package, to be inserted into a page unescaped."""
    return Markup(files(__package__).joinpath("templates", name).read_text(encoding="utf-8"))


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(str(__package__)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(roles=SHOWN, read_part=read_part)
    return environment
