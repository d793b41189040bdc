"""slime's sample, and the samples of an iteration: a function of the seed, so a run stores nothing for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from slime_plugin.errors import ConfigError
from slime_plugin.record import Record
from slime_plugin.rollout.messages import Question
from slime_plugin.slime.samples import put_record


@dataclass
class Sample:
    """The fields of slime's sample that a plugin uses, with slime's names."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    """Number of the rollout, over the whole run."""
    prompt: Any = ""
    label: Any = None
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    reward: Any = None
    remove_sample: bool = False
    """Set by a user's filter: not to be trained."""
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


def recorded_samples(records: Sequence[Record], first: int = 0) -> list[Sample]:
    """Return samples that hold these records, numbered from ``first`` on."""
    samples = [Sample(index=first + i) for i in range(len(records))]
    for sample, record in zip(samples, records, strict=True):
        put_record(sample, record)
    return samples


def questions_of(questions: Sequence[Question], prompts: int, iteration: int, seed: int, path: Path) -> list[Question]:
    """Return the questions of an iteration: each once per epoch, in an order per epoch; the remainder is skipped."""
    per_epoch = len(questions) // prompts
    if not per_epoch:
        raise ConfigError(
            f"trainer.prompts is {prompts}, but {path} has {len(questions)} questions; lower trainer.prompts"
        )
    epoch, batch = divmod(iteration, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(questions))
    return [questions[i] for i in order[batch * prompts : (batch + 1) * prompts].tolist()]


def samples_of(questions: Sequence[Question], samples: int, iteration: int) -> list[Sample]:
    """Return the samples of an iteration, group by group. Their names and numbers are unique in the run."""
    first = iteration * len(questions) * samples
    return [
        Sample(
            group_index=group,
            index=first + group * samples + k,
            prompt=question.text,
            label=list(question.answers),
            metadata={"id": question.id, "rollout_name": f"{iteration}-{question.id}-{k}"},
        )
        for group, question in enumerate(questions)
        for k in range(samples)
    ]
