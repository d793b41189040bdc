"""A second set of weights beside the trained ones: the reference model, or a moving average."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


class Snapshot:
    """The weights of some models at the time it is made."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        self.weights = [parameter.detach().clone() for parameter in self._parameters]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The models compute with these weights inside the context."""
        current = [parameter.data for parameter in self._parameters]
        try:
            for parameter, weight in zip(self._parameters, self.weights, strict=True):
                parameter.data = weight
            yield
        finally:
            for parameter, data in zip(self._parameters, current, strict=True):
                parameter.data = data


class MovingAverage(Snapshot):
    """Exponential moving average of the trained weights."""

    def __init__(self, models: Sequence[torch.nn.Module], decay: float) -> None:
        super().__init__(models)
        self.decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Call after each update step."""
        for average, parameter in zip(self.weights, self._parameters, strict=True):
            average.lerp_(parameter, 1.0 - self.decay)
