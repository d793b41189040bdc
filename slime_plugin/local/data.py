"""Which questions are asked in which iteration: a function of the seed, so that a run needs no other memory of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slime_plugin.bridge.messages import Question
from slime_plugin.errors import ConfigError
from slime_plugin.local.sample import Sample


def questions_of(questions: Sequence[Question], prompts: int, iteration: int, seed: int, path: Path) -> list[Question]:
    """Every question once per epoch, each epoch in an order of its own; what is left over at its end is not asked."""
    per_epoch = len(questions) // prompts
    if not per_epoch:
        raise ConfigError(
            f"trainer.prompts is {prompts}, but {path} has {len(questions)} questions; ask fewer per iteration"
        )
    epoch, batch = divmod(iteration, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(questions))
    return [questions[i] for i in order[batch * prompts : (batch + 1) * prompts].tolist()]


def samples_of(questions: Sequence[Question], samples: int, iteration: int) -> list[Sample]:
    """The rollouts of an iteration, group by group. Their names and numbers are unique in the run."""
    begin = iteration * len(questions) * samples
    return [
        Sample(
            group_index=group,
            index=begin + group * samples + k,
            prompt=question.text,
            label=list(question.answers),
            metadata={"id": question.id, "rollout_name": f"{iteration}-{question.id}-{k}"},
        )
        for group, question in enumerate(questions)
        for k in range(samples)
    ]
