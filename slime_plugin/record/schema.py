"""A record: the tape, and the views of it under which the policy sampled.

The contract, in one sentence: **a token generated in layer k was sampled under exactly the prefix that view k has
before it.** A layer is a maximal run of turns without an edit, and view k is the live context at the end of layer
k, so a token belongs to the layer whose view is the first to hold it. Everything a trainer needs follows from that
sentence.

The paper's running example: a prompt ``s``, tokens ``y1 .. y12`` and the answer ``y13``, where y5 is evicted after
y7, y8 after y10 and y11 after y12. With ``s`` at tape position 0 and ``yi`` at position i, the views are ::

    view 0   s y1 y2 y3 y4 y5 y6 y7                            [0, 8)
    view 1   s y1 y2 y3 y4    y6 y7 y8 y9 y10                  [0, 5) [6, 11)
    view 2   s y1 y2 y3 y4    y6 y7    y9 y10 y11 y12          [0, 5) [6, 8) [9, 13)
    view 3   s y1 y2 y3 y4    y6 y7    y9 y10     y12 y13      [0, 5) [6, 8) [9, 11) [12, 14)

y9 first stands in view 1, hence its live prefix is ``s y1 y2 y3 y4 y6 y7 y8``. A position may come back later and
in another place: views are lists of spans in context order, so an evicted, retrieved and restored span is no
special case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from slime_plugin.errors import Defect, RecordError, printable
from slime_plugin.record.arrays import BoolArray, FloatArray, IntArray, View, span_positions
from slime_plugin.record.checks import (
    UNTRAINED,
    edit_defects,
    history_defects,
    logprob_defects,
    untrained_defects,
    weight_defects,
)
from slime_plugin.record.meta import Edit, Json, Meta
from slime_plugin.record.parts import as_edits, as_extra, as_flags, as_logprobs, as_meta, as_tokens, as_views

FIELDS = ("version", "tokens", "generated", "logprobs", "views", "edits", "meta")
"""The fields of a record in its interchange form."""

_NO_META = Meta()


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Record:
    """One rollout. An instance is always valid: whatever breaks the contract raises :class:`RecordError` here.

    >>> record = Record(
    ...     tokens=[7, 8, 9, 5],
    ...     generated=[0, 1, 0, 1],
    ...     logprobs=[None, -0.5, None, -0.25],
    ...     views=[[(0, 2)], [(0, 1), (2, 4)]],
    ...     edits=[Edit("pop", "policy")],
    ... )
    >>> record
    Record(id=None, 4 tokens, 2 generated, 2 views)
    >>> record.view_positions(1).tolist()
    [0, 2, 3]
    """

    tokens: IntArray
    """[L] every token that was ever in a live context, once, in order of first appearance: the tape, ``H_full``."""
    generated: BoolArray
    """[L] the policy sampled it."""
    logprobs: FloatArray
    """[L] logged by the rollout engine at decode time; NaN where not generated."""
    views: tuple[View, ...]
    """K+1 live contexts, one per layer; the last is the compressed walk ``H_comp``."""
    edits: tuple[Edit, ...]
    """K edits, one between each view and the next."""
    meta: Meta
    extra: Mapping[str, Json]
    """Further top-level fields of the interchange form, carried along unread."""

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
        """Takes lists or arrays. The three sequences over the tape are ``Any`` because they are checked here."""
        found: list[Defect] = []

        def keep(name: str, part: Any) -> bool:
            """Take a part, or note why it is refused."""
            if isinstance(part, Defect | list):
                found.extend([part] if isinstance(part, Defect) else part)
                return False
            object.__setattr__(self, name, part)
            return True

        has_meta = keep("meta", as_meta(meta))
        keep("extra", as_extra(extra, FIELDS))
        has_edits = keep("edits", as_edits(edits))
        if keep("tokens", as_tokens(tokens)) or _length(tokens):  # or nothing can be said of what lies along the tape
            length = _length(tokens)
            has_generated = keep("generated", as_flags(generated, length))
            has_logprobs = keep("logprobs", as_logprobs(logprobs, length))
            has_views = keep("views", as_views(views, length))
            if has_generated and has_logprobs:
                found.extend(logprob_defects(self.generated, self.logprobs))
            if has_views and has_edits:
                found.extend(edit_defects(self.views, self.edits))
            if has_views and has_generated:
                found.extend(history_defects(self.generated, self.views))
            if has_meta:
                found.extend(weight_defects(self.meta, length))
        if has_meta:
            found.extend(untrained_defects(self.meta))
        if found:
            raise RecordError(record_label(meta), found)

    @property
    def label(self) -> str:
        """How messages name this record."""
        return record_label(self.meta)

    @property
    def untrained(self) -> Mapping[str, int]:
        """Tokens that were sampled and that no method can train, by cause: they are not on the tape, or not as sampled
        ones. A rollout that was cut off in the middle of a turn nobody waited for has some."""
        causes: Mapping[str, int] = self.meta.extra.get(UNTRAINED, {})
        return causes

    @property
    def sampled(self) -> int:
        """All tokens that the policy sampled in this rollout."""
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
        """A copy that went through a process boundary is checked and protected like any other record."""
        parts = (self.tokens, self.generated, self.logprobs, self.views, self.edits, self.meta, self.extra)
        return type(self), parts

    __hash__ = None  # type: ignore[assignment]  # arrays inside: comparable, not hashable

    def __repr__(self) -> str:
        generated = int(self.generated.sum())
        return f"Record(id={self.meta.id!r}, {len(self)} tokens, {generated} generated, {len(self.views)} views)"


def _length(tokens: Any) -> int:
    """How long the tape is meant to be, also where its tokens are refused; 0 if that cannot be said."""
    return len(tokens) if isinstance(tokens, list | tuple) or np.ndim(tokens) == 1 else 0


def record_label(meta: object) -> str:
    """``record 17-3 (agentfold)``, from as much of the meta data as is there."""
    fields = meta.to_json() if isinstance(meta, Meta) else meta if isinstance(meta, Mapping) else {}
    name, harness = fields.get("id"), fields.get("harness")
    label = "record without id" if name is None else f"record {printable(name, 80)}"
    return label if harness is None else f"{label} ({printable(harness, 40)})"
