"""Edits and metadata of a record. Both keep unknown keys under ``extra`` and write them back unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from slime_plugin.errors import Defect, nearest
from slime_plugin.record.rollout_report import Json as Json
from slime_plugin.record.rollout_report import RolloutReport

KINDS = ("pop", "fold", "offload", "retrieve", "restore", "compact", "prune", "unknown", "switch")
"""``unknown``: a rewrite of the context whose cause could not be recovered. ``switch``: another conversation of the
rollout continues, such as that of a subagent; nothing was edited."""

OWN_KIND = re.compile(r"[a-z][a-z0-9_]*:[a-z][a-z0-9_]*")
"""The kind of a user's editor, such as ``context_folding:branch``. The colon distinguishes it from a misspelling."""

Status = Literal["completed", "truncated", "aborted", "failed"]
"""Done; ended by a limit; stopped from outside; an error."""
STATUSES: tuple[Status, ...] = get_args(Status)
"""A record may have another status; credit assignment refuses it, because aborted and failed rollouts leave the group's
baseline and a misspelt status would not."""

EXCLUDED: frozenset[str] = frozenset({"aborted", "failed"})
"""Statuses of rollouts that are neither in the baseline of their group, nor trained, nor in a mean of rewards."""

LARGEST_REWARD = 1e18
"""The square of a larger reward overflows float32, so its group could not be normalised."""


@dataclass(frozen=True, slots=True)
class Edit:
    """The edit between view k and view k+1. Evicted and restored positions follow from the two views."""

    kind: str = "unknown"
    author: str | None = None
    """Who decided: "policy", "harness", or a name that the harness gives."""
    extra: Mapping[str, Json] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Json]:
        return {"kind": self.kind, "author": self.author, **self.extra}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Edit:
        known, extra = _split(value, ("kind", "author"))
        return cls(**known, extra=extra)

    def defects(self, where: str) -> Iterator[Defect]:
        """Check values from a file, which may have other types than declared."""
        kind: Any = self.kind
        author: Any = self.author
        if kind not in KINDS and not (isinstance(kind, str) and OWN_KIND.fullmatch(kind)):
            own = "or name one of your own as editor:kind"
            yield Defect(f"{where}.kind", f"{kind!r:.40} is not a kind of edit; use {nearest(kind, KINDS)}, {own}")
        if not isinstance(author, str | None):
            yield Defect(f"{where}.author", f"{author!r:.40} is not a name; use a string or leave it out")
        yield from extra_defects(where, self.extra, ("kind", "author"))


@dataclass(frozen=True)
class Meta:
    """Where a record comes from and how its rollout ended. Absent values are None, never a default number."""

    id: str | int | None = None
    """Unique within a run."""
    harness: str | None = None
    group: str | int | None = None
    """The prompt; the baseline is taken over all rollouts of a group."""
    reward: float | None = None
    status: str = "completed"
    weight_version: str | int | None = None
    extra: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """All other keys: those of :attr:`report`, and a user's own."""

    @property
    def excluded(self) -> bool:
        return self.status in EXCLUDED

    @property
    def not_trained(self) -> str | None:
        """Why no token of the rollout is trained; None for one that is."""
        return self.status if self.excluded else "removed" if self.report.removed else None

    @cached_property
    def report(self) -> RolloutReport:
        return RolloutReport.read(self.extra)

    def with_report(self, report: RolloutReport) -> Meta:
        """The same metadata with what the report says; what it leaves out stays as it is."""
        return replace(self, extra={**self.extra, **report.to_json()})

    def to_json(self) -> dict[str, Json]:
        known = {key: getattr(self, key) for key in _META_KEYS}
        return {key: value for key, value in known.items() if value is not None} | dict(self.extra)

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Meta:
        known, extra = _split(value, _META_KEYS)
        return cls(**known, extra=extra)

    def defects(self) -> Iterator[Defect]:
        """Check values from a file, which may have other types than declared."""
        fields: dict[str, Any] = {key: getattr(self, key) for key in _META_KEYS}
        for key in ("id", "group", "weight_version"):
            if isinstance(fields[key], bool) or not isinstance(fields[key], str | int | None):
                yield Defect(f"meta.{key}", f"{fields[key]!r:.40} is neither a string nor a whole number")
        harness, reward, status = fields["harness"], fields["reward"], fields["status"]
        if not isinstance(harness, str | None):
            yield Defect("meta.harness", f"{harness!r:.40} is not a name; use a string or leave it out")
        if isinstance(reward, bool) or not isinstance(reward, float | int | None):
            yield Defect("meta.reward", f"{reward!r:.40} is not a number; leave it out if there is no reward")
        elif reward is not None and not -LARGEST_REWARD <= reward <= LARGEST_REWARD:  # NaN fails this too
            yield Defect("meta.reward", f"not a finite number within {LARGEST_REWARD:g}; leave it out if there is none")
        if not isinstance(status, str) or not status:
            yield Defect("meta.status", f"{status!r:.40} is not a word; use one of {', '.join(STATUSES)}")
        yield from extra_defects("meta", self.extra, _META_KEYS)


_META_KEYS = ("id", "harness", "group", "reward", "status", "weight_version")


def extra_defects(where: str, extra: Mapping[str, Json], taken: tuple[str, ...]) -> Iterator[Defect]:
    """Check that further keys are strings that are not taken, with values that JSON can represent."""
    if not extra:
        return
    keys: list[Any] = list(extra)
    for key in keys:
        if not isinstance(key, str) or key in taken:
            yield Defect(
                f"{where}.extra", f"{key!r:.40} cannot be a further key; use a string that is not {', '.join(taken)}"
            )
            return
    try:
        json.dumps(dict(extra), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        yield Defect(f"{where}.extra", f"cannot be written as JSON ({error}); use plain, finite values")


def _split(value: Mapping[str, Json], keys: tuple[str, ...]) -> tuple[dict[str, Json], dict[str, Json]]:
    known = {key: value[key] for key in keys if key in value}
    return known, {key: value[key] for key in value if key not in keys}
