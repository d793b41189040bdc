"""Arguments and options that commands share: records, methods, models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from slime_plugin.cli.output import with_progress
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import load_config, parse_config
from slime_plugin.config.method import PACKINGS, MethodSettings
from slime_plugin.errors import MemoryWalkerError, nearest, printable
from slime_plugin.methods import METHODS, method_of
from slime_plugin.record import Entry, Record, read_entries

Command = Callable[..., Any]


class RecordPath(click.Path):
    """A file, a folder or ``-``. Not empty: an unset shell variable would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, allow_dash=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


ALL_METHODS = ",".join(METHODS)


def method_name(name: str) -> str:
    """The type of ``--method``: a method, or the import path of a custom method."""
    if name not in METHODS and ":" not in name:
        raise click.BadParameter(f"there is no method {name!r:.40}; use {nearest(name, list(METHODS))}")
    return name


def method_names(text: str) -> tuple[MethodSettings, ...]:
    """The type of ``--methods A,B``: methods, in the order in which they are compared."""
    names = dict.fromkeys(method_name(name.strip()) for name in text.split(","))
    own = [named_method({"type": name}) for name in names if name not in METHODS]
    return (*(method for name, method in METHODS.items() if name in names), *own)


FILES = click.argument("files", nargs=-1, required=True, type=RecordPath(), metavar="FILE...")
FILE = click.argument("file", type=RecordPath())
RECORD = click.option(
    "--record", "wanted", metavar="ID|NUMBER", help="Which record, if the file holds several; -1 is the last."
)


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combine options into one decorator; ``--help`` lists them in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


METHOD = _options(
    click.option(
        "--method",
        "name",
        type=method_name,
        metavar="NAME",
        help=f"How to lay records out: {', '.join(METHODS)}, or package.module:Name.",
    ),
    click.option("--packing", type=click.Choice(PACKINGS), help="How mask4d packs branches.  [default: trie]"),
    click.option("--budget", type=click.IntRange(min=1), help="Maximum tokens per row; mask4d splits a larger trie."),
    click.option(
        "--config", type=click.Path(path_type=Path), help="Take the method from a configuration file instead."
    ),
)
"""Options that choose a method, see :func:`chosen_method`."""
_COUNT = click.IntRange(min=1)
MODEL = _options(
    click.option(
        "--model",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        required=True,
        metavar="HF_DIR",
        help="Folder of a Hugging Face Qwen3 checkpoint.",
    ),
    click.option("--tp", type=_COUNT, default=1, show_default=True, help="Tensor-parallel ranks."),
    click.option("--pp", type=_COUNT, default=1, show_default=True, help="Pipeline stages."),
    click.option("--cp", type=_COUNT, default=1, show_default=True, help="Context-parallel ranks."),
    click.option("--sp", is_flag=True, help="Sequence parallelism, within the tensor-parallel ranks."),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "float64", "bfloat16"]),
        help="Data type to compute in.  [default: float32 on a CPU, bfloat16 on a GPU]",
    ),
    click.option("--batch-tokens", type=_COUNT, default=8192, show_default=True, help="Tokens per micro-batch."),
)
"""Options that choose a model, its parallelism and its precision."""


def check_installed(extra: str, *packages: str) -> None:
    """Raise an error with the pip command if a package is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MemoryWalkerError(f"this command needs {package}: pip install 'memorywalker[{extra}]'")


def choose_record(path: Path, wanted: str | None) -> Record:
    """Return the record with that id or number; without either, the only one."""
    names: list[str] = []
    matches: list[Entry] = []
    damaged: list[Entry] = []
    for entry in with_progress(read_entries([path]), "records read"):
        if entry.record is None:
            damaged.append(entry)
            continue
        name = entry.record.meta.id
        names.append(printable(entry.number if name is None else name))
        if wanted is not None and str(name) == wanted:
            return entry.record
        if wanted in (None, str(entry.number)):
            matches = [*matches, entry][:8]
        elif wanted == "-1":
            matches = [entry]
    if len(matches) == 1 and matches[0].record is not None:
        return matches[0].record
    raise MemoryWalkerError(_no_choice(path, wanted, names, matches, damaged))


def _no_choice(path: Path, wanted: str | None, names: list[str], matches: list[Entry], damaged: list[Entry]) -> str:
    """The error message if no record or several match."""
    hit = [entry for entry in damaged if str(entry.number) == wanted]
    if hit or not names:
        return "\n".join(line for entry in hit or damaged for line in entry.problems) or f"{path}: holds no record"
    known = f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''} (memorywalker record list shows all)"
    if wanted is None:
        return f"{path}: holds {len(names)} records; choose one with --record: {known}"
    if matches:
        found_in = ", ".join(entry.where for entry in matches)
        return f"{path}: record {wanted} is in several files: {found_in}; name the file, or use an id: {known}"
    return f"{path}: no record {wanted!r:.40} among {len(names)}: {known}"


def all_valid_records(files: Iterable[Path]) -> tuple[list[Record], bool]:
    """Return all valid records, at least one, and whether others were damaged; their defects are printed."""
    problems: list[str] = []
    records = list(valid_records(files, problems))
    echo_errors(problems)
    if not records:
        raise MemoryWalkerError("there is no valid record")
    return records, bool(problems)


def echo_errors(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(f"Error: {line}", err=True)


def valid_records(files: Iterable[Path], problems: list[str]) -> Iterator[Record]:
    """Yield the valid records; append the defects of the others to ``problems``."""
    for entry in with_progress(read_entries(files), "records read"):
        problems.extend(entry.problems)
        if entry.record is not None:
            yield entry.record


def chosen_method(name: str | None, packing: str | None, budget: int | None, config: Path | None) -> MethodSettings:
    """Return the method that the options of :func:`METHOD` choose."""
    if (name is None) == (config is None):
        raise click.UsageError("give either --method or --config")
    if config is not None:
        if packing or budget:
            raise click.UsageError("--packing and --budget belong to --method; set them in the configuration instead")
        return load_config(config, Cell).method
    given = {key: value for key, value in (("packing", packing), ("budget", budget)) if value is not None}
    foreign = set(given) - set(method_of(named_method({"type": name})).Settings.model_fields)
    if foreign:
        keys = " and ".join(f"--{key}" for key in given if key in foreign)
        raise click.UsageError(f"{keys}: not a setting of {name}; leave it out")
    return named_method({"type": name, **given})


def named_method(settings: dict[str, Any]) -> MethodSettings:
    """Return the method with these settings; it can be laid out by."""
    method = parse_config({"method": settings}, Cell, "command line").method
    method_of(method)  # or its code cannot be imported, or its settings are wrong
    return method
