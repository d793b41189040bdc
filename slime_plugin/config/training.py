"""What cannot be trained, refused before any work."""

from __future__ import annotations

from collections.abc import Iterator

from slime_plugin.config.architecture import Architecture
from slime_plugin.config.cell import Cell
from slime_plugin.config.method import Mask4d, Sdcc
from slime_plugin.config.rollout import Rollout
from slime_plugin.errors import ConfigError


def check_training(cell: Cell) -> None:
    """Raises :class:`ConfigError` with a line for each reason why a cell cannot be trained; it may be sampled still."""
    problems = list(training_problems(cell))
    if problems:
        raise ConfigError("\n".join(problems))


def training_problems(cell: Cell) -> Iterator[str]:
    """Each with its key, both numbers and the remedy."""
    yield from _missing(cell)
    architecture = None
    if cell.model is not None and cell.model.is_dir():
        try:
            architecture = Architecture.read(cell.model)
        except ConfigError as error:
            yield f"model: {error}"
    yield from settings_problems(cell, architecture)


def settings_problems(cell: Cell, architecture: Architecture | None) -> Iterator[str]:
    """Those that are the same on every machine."""
    yield from _uneven_steps(cell)
    if isinstance(cell.method, Mask4d) and cell.method.packing == "union":
        yield "method.packing: union is a diagnostic for score and is not exact; use packing trie"
    yield from _off_policy(cell.rollout)
    if architecture is not None:
        yield from _unfit_model(cell, architecture)


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors next to a number that is none.

    >>> nearest_divisors(64, 7), nearest_divisors(6, 9)
    ([4, 8], [6])
    """
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below, above = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
    return [*below[-1:], *above[:1]]


def _missing(cell: Cell) -> Iterator[str]:
    if cell.model is None:
        yield "model: missing; name the folder of a Hugging Face checkpoint with its tokenizer"
    elif not cell.model.is_dir():
        yield f"model: there is no folder {cell.model}; paths count from the folder that the command is run in"
    if cell.rollout.questions is None:
        yield "rollout.questions: missing; name a file of JSON lines with question and answers"
    elif not cell.rollout.questions.is_file():
        yield f"rollout.questions: there is no file {cell.rollout.questions}"


def _unfit_model(cell: Cell, architecture: Architecture) -> Iterator[str]:
    try:
        architecture.check_split(cell.trainer.parallel)
    except ConfigError as error:
        yield f"trainer: {error}"
    if isinstance(cell.method, Sdcc) and (cell.method.top_k or 0) > architecture.vocabulary:
        yield (
            f"method.top_k: {cell.method.top_k} of a vocabulary of {architecture.vocabulary}; "
            "leave it out to compare the whole vocabulary"
        )


def _uneven_steps(cell: Cell) -> Iterator[str]:
    prompts, samples, steps = cell.trainer.prompts, cell.rollout.samples, cell.trainer.steps
    rollouts = prompts * samples
    if rollouts % steps:
        valid = " or ".join(map(str, nearest_divisors(rollouts, steps)))
        yield (
            f"trainer.steps: {rollouts} rollouts (trainer.prompts {prompts} x rollout.samples {samples}) cannot be "
            f"dealt out evenly to {steps} steps; use {valid}"
        )
    if samples == 1:
        yield "rollout.samples: 1 rollout per question is its own baseline, so all advantages are 0; use at least 2"


def _off_policy(rollout: Rollout) -> Iterator[str]:
    """Tokens have to be drawn from the distribution that the trainer computes."""
    if rollout.temperature != 1:
        yield (
            f"rollout.temperature: {rollout.temperature:g}: the engine samples from, and logs, the distribution at "
            "that temperature, and the trainer computes the one at 1, so every ratio would be off; use temperature 1"
        )
    if rollout.top_p < 1:
        yield (
            f"rollout.top_p: {rollout.top_p:g}: tokens come from a part of the distribution while log-probabilities "
            "are those of all of it, so that training is off-policy; use top_p 1"
        )
    if rollout.top_k is not None:
        yield (
            f"rollout.top_k: {rollout.top_k}: tokens come from a part of the distribution while log-probabilities "
            "are those of all of it, so that training is off-policy; use top_k null"
        )
