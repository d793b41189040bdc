"""The record: a tape of tokens, and the views of it under which the policy sampled.

**A token sampled in layer k was conditioned on exactly the tokens that precede it in view k.** A layer is a maximal
run of turns without an edit, and view k is the live context at the end of layer k, so a token belongs to the layer
whose view is the first to hold it. Everything a trainer needs follows from that sentence.

The paper's running example: a prompt ``s``, tokens ``y1 .. y12`` and the answer ``y13``, where y5 is evicted after
y7, y8 after y10 and y11 after y12. With ``s`` at tape position 0 and ``yi`` at position i, the views are ::

    view 0   s y1 y2 y3 y4 y5 y6 y7                            [0, 8)
    view 1   s y1 y2 y3 y4    y6 y7 y8 y9 y10                  [0, 5) [6, 11)
    view 2   s y1 y2 y3 y4    y6 y7    y9 y10 y11 y12          [0, 5) [6, 8) [9, 13)
    view 3   s y1 y2 y3 y4    y6 y7    y9 y10     y12 y13      [0, 5) [6, 8) [9, 11) [12, 14)

y9 is first in view 1, hence its live prefix is ``s y1 y2 y3 y4 y6 y7 y8``. A position may come back later and in
another place, since views are lists of spans in context order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from slime_plugin.errors import Defect, RecordError, printable
from slime_plugin.record.arrays import BoolArray, FloatArray, IntArray, View, span_positions
from slime_plugin.record.checks import (
    edit_defects,
    history_defects,
    logprob_defects,
    untrained_defects,
    weight_defects,
)
from slime_plugin.record.meta import Edit, Meta
from slime_plugin.record.parts import as_edits, as_extra, as_flags, as_logprobs, as_meta, as_tokens, as_views
from slime_plugin.record.rollout_report import Json

FIELDS = ("version", "tokens", "generated", "logprobs", "views", "edits", "meta")
"""The fields of a record in its interchange form."""

_NO_META = Meta()


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Record:
    """One rollout. Always valid: the constructor raises :class:`RecordError` for what breaks the contract.

    >>> record = Record(
    ...     tokens=[7, 8, 9, 5],
    ...     generated=[0, 1, 0, 1],
    ...     logprobs=[None, -0.5, None, -0.25],
    ...     views=[[(0, 2)], [(0, 1), (2, 4)]],
    ...     edits=[Edit("pop", "policy")],
    ... )
    >>> record
    Record(id=None, 4 tokens, 2 sampled, 2 views)
    >>> record.view_positions(1).tolist()
    [0, 2, 3]
    """

    tokens: IntArray
    """[L] every token that was ever in a live context, once, in order of first appearance: the tape, ``H_full``."""
    generated: BoolArray
    """[L] the policy sampled it."""
    logprobs: FloatArray
    """[L] logged by the rollout engine at decode time; NaN where not sampled."""
    views: tuple[View, ...]
    """K+1 live contexts, one per layer; the last is the final context, ``H_comp``."""
    edits: tuple[Edit, ...]
    """K edits, one between each view and the next."""
    meta: Meta
    extra: Mapping[str, Json]
    """Further top-level fields of the interchange form, kept unread."""

    def __init__(
        self,
        tokens: Any,
        generated: Any,
        logprobs: Any,
        views: Sequence[Sequence[Sequence[int]]],
        edits: Sequence[Edit | Mapping[str, Json]] = (),
        meta: Meta | Mapping[str, Json] = _NO_META,
        extra: Mapping[str, Json] = MappingProxyType({}),
    ) -> None:
        """Accepts lists or arrays. The three sequences over the tape are ``Any`` because they are checked here."""
        # Through the instance's dictionary because the dataclass is frozen.
        vars(self).update(_parse(tokens, generated, logprobs, views, edits, meta, extra))

    def with_meta(self, meta: Meta) -> Record:
        """The same rollout with other metadata. Only the metadata is checked; arrays are shared."""
        found = [*meta.defects(), *weight_defects(meta, len(self)), *untrained_defects(meta)]
        if found:
            raise RecordError(record_label(meta), found)
        copy = object.__new__(Record)
        vars(copy).update(vars(self), meta=meta)
        return copy

    @property
    def label(self) -> str:
        """Name of the record in messages."""
        return record_label(self.meta)

    @property
    def untrained(self) -> Mapping[str, int]:
        """Sampled tokens that no method can train because they are not on the tape as sampled, by cause."""
        return self.meta.report.untrained

    @property
    def sampled(self) -> int:
        """Number of all tokens that the policy sampled, on the tape or not."""
        return int(self.generated.sum()) + sum(self.untrained.values())

    def view_positions(self, k: int) -> IntArray:
        """Tape positions of view k, in context order."""
        return span_positions(self.views[k])

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        return (
            np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.generated, other.generated)
            and np.array_equal(self.logprobs, other.logprobs, equal_nan=True)
            and (self.views, self.edits, self.meta, self.extra) == (other.views, other.edits, other.meta, other.extra)
        )

    def __reduce__(self) -> tuple[type[Record], tuple[Any, ...]]:
        """Unpickled records are checked and read-only like any other."""
        return Record, tuple(getattr(self, field.name) for field in fields(self))

    __hash__ = None  # type: ignore[assignment]  # arrays inside: comparable, not hashable

    def __repr__(self) -> str:
        sampled = int(self.generated.sum())
        return f"Record(id={self.meta.id!r}, {len(self)} tokens, {sampled} sampled, {len(self.views)} views)"


def _parse(tokens: Any, generated: Any, logprobs: Any, views: Any, edits: Any, meta: Any, extra: Any) -> dict[str, Any]:
    """The fields of a record, or a :class:`RecordError` with the defects of all of them."""
    results: dict[str, Any] = {
        "tokens": as_tokens(tokens),
        "edits": as_edits(edits),
        "meta": as_meta(meta),
        "extra": as_extra(extra, FIELDS),
    }
    # The intended length, even if the tokens are refused. Fields along the tape cannot be checked without it.
    length = len(tokens) if isinstance(tokens, list | tuple) or np.ndim(tokens) == 1 else 0
    if length:
        results["generated"] = as_flags(generated, length)
        results["logprobs"] = as_logprobs(logprobs, length)
        results["views"] = as_views(views, length)
    parts: dict[str, Any] = {}
    found: list[Defect] = []
    for name, result in results.items():
        if isinstance(result, Defect):
            found.append(result)
        elif isinstance(result, list):
            found.extend(result)
        else:
            parts[name] = result
    for check, names in _JOINT_CHECKS:
        if all(name in parts for name in names):
            found.extend(check(*(parts[name] for name in names)))
    if length and "meta" in parts:
        found.extend(weight_defects(parts["meta"], length))
    if found:
        raise RecordError(record_label(meta), found)
    return parts


_JOINT_CHECKS: tuple[tuple[Callable[..., Iterable[Defect]], tuple[str, ...]], ...] = (
    (logprob_defects, ("generated", "logprobs")),
    (edit_defects, ("views", "edits")),
    (history_defects, ("generated", "views")),
    (untrained_defects, ("meta",)),
)
"""Checks of fields that are valid on their own, and which fields each needs."""


def record_label(meta: object) -> str:
    """``record 17-3 (agentfold)``, from whatever metadata there is."""
    known = meta.to_json() if isinstance(meta, Meta) else meta if isinstance(meta, Mapping) else {}
    name, harness = known.get("id"), known.get("harness")
    label = "record without id" if name is None else f"record {printable(name, 80)}"
    return label if harness is None else f"{label} ({printable(harness, 40)})"
