"""The terms of the loss, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from slime_plugin.config.objective import Objective
from slime_plugin.train.loss import Targets, policy_loss


@pytest.mark.parametrize("log_ratio", [0.0, 0.5, -3.0, 2.6, -10.9, 2.7, -11.1, 50.0, -50.0, 1000.0, -1000.0])
def test_the_reference_kl_is_bounded(log_ratio: float) -> None:
    """By 10 nats, behind which a token has no gradient; it is never NaN."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    one = torch.ones(1)
    targets = Targets(0 * one, one, logprobs.detach(), logprobs.detach() + log_ratio)
    loss, sums = policy_loss(logprobs, 0 * one, targets, Objective(kl=0.5))
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    exact = math.inf if log_ratio > 700 else math.expm1(log_ratio) - log_ratio
    assert logprobs.grad is not None
    assert sums["reference_kl"].item() == pytest.approx(min(exact, 10.0), rel=1e-5, abs=1e-6)
    slope = 0.0 if exact > 10 else -math.expm1(log_ratio)  # of exp(x) - 1 - x with x = reference - policy
    assert logprobs.grad.item() == pytest.approx(0.5 * slope, rel=1e-4, abs=1e-6)
