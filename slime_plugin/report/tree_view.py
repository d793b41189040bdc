"""Rollouts as data for the tree view of a run's page.

Every rollout of a run is listed. Trees are embedded up to a budget: of compared rollouts first, then of the last
iterations. A tree is the staircase of live contexts and, for each method, which tokens it trains, which of them off
context, and their logdiff. Positions are spans of the tape.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_plugin.config.method import MethodSettings
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.methods import METHODS, Layout, lay_out
from slime_plugin.record import Record, read_entries
from slime_plugin.record.arrays import IntArray, equal_spans, true_spans
from slime_plugin.report.run_data import Run
from slime_plugin.report.staircase import Staircase, TokenRole
from slime_plugin.run.folder import RunFolder
from slime_plugin.tree import Trajectory, count, off_context

BUDGET_BYTES = 20_000_000
"""Bytes of embedded trees, over all runs of a page."""

Deltas = dict[tuple[int, str], tuple[IntArray, NDArray[np.float64]]]
"""By iteration and id of a record: its trained tokens [n] and the trainer's log-probabilities [n]."""


@dataclass(slots=True)
class Rollouts:
    """What the page embeds."""

    rows: list[list[Any]] = field(default_factory=list)
    """Per rollout: run, iteration, key, reward, status, edits, sampled tokens, and the index of its tree or -1."""
    trees: list[str] = field(default_factory=list)
    """JSON each."""
    vocabularies: list[dict[str, str]] = field(default_factory=list)
    """Per run: the text of every token id in its trees; empty without a tokenizer."""
    damaged: list[str] = field(default_factory=list)
    """Files with records that cannot be read."""

    def to_json(self) -> str:
        head = json.dumps({"rows": self.rows, "vocabularies": self.vocabularies}, separators=(",", ":"))
        return f'{head[:-1]},"trees":[{",".join(self.trees)}]}}'


def embed_rollouts(runs: Sequence[Run], budget: int = BUDGET_BYTES) -> Rollouts:
    """All rollouts of the runs, in order of run and iteration; ``budget`` is shared evenly between the runs."""
    result = Rollouts()
    bytes_per_token = 1.0  # of the last tree: skip what is unlikely to fit
    for index, run in enumerate(runs):
        methods = _methods(run)
        compared = _read_deltas(run.folder, methods)
        left = budget * (index + 1) // len(runs) - sum(map(len, result.trees))
        used: set[int] = set()
        rows = []
        for iteration in _order(run):
            store = run.folder.rollouts(iteration)
            for number, entry in enumerate(read_entries([store])):
                if entry.record is None:
                    if str(store) not in result.damaged:
                        result.damaged.append(str(store))
                    continue
                record = entry.record
                key = str(record.meta.id) if record.meta.id is not None else f"{iteration}:{number}"
                tree = -1
                if bytes_per_token * len(record) < left:
                    text = _tree(record, index, iteration, key, methods, compared)
                    bytes_per_token = len(text) / len(record)
                    if len(text) <= left:
                        left, tree = left - len(text), len(result.trees)
                        result.trees.append(text)
                        used.update(np.unique(record.tokens).tolist())
                sizes = (len(record.edits), int(record.generated.sum()))
                rows.append([index, iteration, key, record.meta.reward, record.meta.status, *sizes, tree])
        result.rows += sorted(rows, key=lambda row: row[1])  # stable: rollouts of an iteration stay in order
        result.vocabularies.append(_vocabulary(run, used))
    return result


def _order(run: Run) -> list[int]:
    """Compared iterations first, then the last ones: the rest of the budget goes to what the policy does now."""
    stored = run.folder.iterations()
    compared = [i for i in (run.comparison or {}).get("iterations", []) if i in stored]
    return compared + [i for i in reversed(stored) if i not in compared]


def _methods(run: Run) -> dict[str, MethodSettings]:
    """All methods, the one that the run was trained with as it was there, if its code can be imported here."""
    trained = run.trained_method
    return METHODS if trained is None else METHODS | {trained.type: trained}


def _tree(
    record: Record,
    run: int,
    iteration: int,
    key: str,
    methods: Mapping[str, MethodSettings],
    compared: dict[str, Deltas],
) -> str:
    trajectory = Trajectory.of(record)
    staircase = Staircase.of(trajectory)
    counts = count(trajectory)
    sampled = np.flatnonzero(record.generated)
    value = {
        "run": run,
        "iteration": iteration,
        "key": key,
        "meta": staircase.facts,
        "counts": {name: getattr(counts, name) for name in ("K", "D", "L", "C", "R", "branch_tokens", "trie_tokens")},
        "tokens": record.tokens.tolist(),
        "generated": true_spans(record.generated),
        "logprobs": _short(record.logprobs[sampled]),
        "layers": [
            {
                "roles": _role_runs(staircase.roles[k]),
                "view": [list(span) for span in record.views[k]],
                "description": staircase.describe(k),
                "edit": str(staircase.steps[k]) if k < len(staircase.steps) else None,
            }
            for k in range(trajectory.layers)
        ],
        "methods": {
            name: _under(trajectory, method, compared.get(name, {}).get((iteration, key)))
            for name, method in methods.items()
        },
    }
    if "pieces" in record.extra:
        value["pieces"] = list(staircase.pieces)
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _under(
    trajectory: Trajectory, method: MethodSettings, scored: tuple[IntArray, NDArray[np.float64]] | None
) -> dict[str, Any]:
    """How a method trains a rollout; ``delta`` has a number per trained token in tape order."""
    cause = trajectory.record.meta.not_trained
    layout = lay_out(trajectory, method) if cause is None else Layout.all_lost(method.type, trajectory.record, cause)
    trained = np.zeros(len(trajectory.record), dtype=np.bool_)
    off = np.zeros_like(trained)
    for row in layout.rows:
        trained[row.tape[row.loss_mask]] = True
        if layout.off_context:
            off[off_context(trajectory, row.tape)] = True
    value: dict[str, Any] = {
        "trained": true_spans(trained),
        "off": true_spans(off & trained),
        "lost": dict(layout.lost),
        "tokens": layout.tokens,
        "teacher_tokens": layout.teacher_tokens,
    }
    if scored is not None:
        tape, logprobs = scored
        if not np.array_equal(tape, np.flatnonzero(trained)):
            raise MemoryWalkerError(
                f"comparison/{method.type}.npz: {tape.size} scored tokens of {trajectory.record.label}, which has "
                f"{int(trained.sum())} to train, or others; run memorywalker compare again"
            )
        value["delta"] = _short(logprobs - trajectory.record.logprobs[tape])
    return value


def _read_deltas(folder: RunFolder, methods: Iterable[str]) -> dict[str, Deltas]:
    """Per method what ``comparison/METHOD.npz`` holds, record by record."""
    paths = {name: folder.comparison_arrays / f"{name}.npz" for name in methods}
    return {name: dict(_deltas(path)) for name, path in paths.items() if path.exists()}


def _deltas(path: Path) -> Iterator[tuple[tuple[int, str], tuple[IntArray, NDArray[np.float64]]]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            whose, tape, logprobs = (file[key] for key in ("record", "tape", "logprob"))
            ids, iterations = file["ids"], file["iteration"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise MemoryWalkerError(
            f"{path}: cannot be read ({type(error).__name__}); run memorywalker compare again"
        ) from error
    order = np.lexsort((tape, whose))
    edges = np.searchsorted(whose[order], np.arange(len(ids) + 1))
    for i, (name, iteration) in enumerate(zip(ids.tolist(), iterations.tolist(), strict=True)):
        mine = order[edges[i] : edges[i + 1]]
        yield (int(iteration), str(name)), (tape[mine], logprobs[mine].astype(np.float64))


def _vocabulary(run: Run, used: set[int]) -> dict[str, str]:
    """The text of some token ids; none if there is no tokenizer, or no package that reads it."""
    folders = [run.folder.weights(version) for version in reversed(run.folder.versions())]
    if run.settings.get("model"):
        folders.append(Path(run.settings["model"]))
    file = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
    if file is None or not used:
        return {}
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return {}
    tokenizer = Tokenizer.from_file(str(file))
    pieces = {}
    for token in sorted(used):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # A piece of a character has no text of its own; the tokenizer's name for it is still more than a number.
        pieces[str(token)] = text if text and "\ufffd" not in text else tokenizer.id_to_token(token) or f"#{token}"
    return pieces


def _role_runs(roles: NDArray[np.uint8]) -> list[int]:
    """Start, length and role of every stretch of equal role, one after the other; what is absent is left out."""
    runs = [(start, stop - start, int(roles[start])) for start, stop in equal_spans(roles)]
    return [number for run in runs if run[2] != TokenRole.ABSENT for number in run]


def _short(values: NDArray[np.floating[Any]]) -> list[float | None]:
    """Four significant digits, which is more than a colour shows."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.tolist()]
