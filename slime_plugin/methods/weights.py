"""What sampled tokens count in training, as their record says."""

from __future__ import annotations

import numpy as np

from slime_plugin.record import Record
from slime_plugin.record.arrays import FloatArray, read_only
from slime_plugin.record.checks import WEIGHTS


def token_weights(record: Record) -> FloatArray:
    """[L] the factor of everything a tape token contributes to the loss; 1 where ``meta.weights`` does not say.

    The number of trained tokens that a rollout is averaged over stays the same: a token of weight 0 is still counted.
    A record with spans that cannot be meant does not exist, so nothing is checked here.

    >>> halved = {"weights": [[1, 2, 0.5]]}
    >>> token_weights(Record([7, 8, 9], [0, 1, 1], [None, -0.5, -0.25], [[(0, 3)]], meta=halved)).tolist()
    [1.0, 0.5, 1.0]
    """
    weights = np.ones(len(record), dtype=np.float32)
    for start, stop, weight in record.meta.extra.get(WEIGHTS, ()):
        weights[start:stop] = weight
    return read_only(weights)
