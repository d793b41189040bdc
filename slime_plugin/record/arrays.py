"""From what a caller or a file hands over to the record's arrays, exactly or not at all.

Each converter takes a list or a numpy array and returns the array, or the defects that name the first bad entry.
Nothing is rounded, wrapped or guessed: ``True`` is not token 1, ``3.0`` is not token 3, and an id that does not fit
is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_plugin.errors import Defect

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]

LARGEST_ID = 2**31 - 1
"""Tokens and positions are int32: the largest vocabularies in use have 2**18 entries."""


def as_tokens(value: object) -> IntArray | Defect:
    """Token ids as int32.

    >>> as_tokens([5, 2.5])
    Defect(field='tokens[1]', message='float 2.5 is not a token id; ids are whole numbers from 0 to 2147483647')
    """
    remedy = f"ids are whole numbers from 0 to {LARGEST_ID}"
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            return Defect("tokens", f"array of {value.dtype} with shape {value.shape}; {remedy}, in one dimension")
    elif isinstance(value, (list, tuple)):
        bad = _first_of_other_type(value, {int})
        if bad is not None:
            return Defect(f"tokens[{bad}]", f"{_described(value[bad])} is not a token id; {remedy}")
    else:
        return Defect("tokens", f"{_described(value)} is not a list; {remedy}")
    if len(value) == 0:
        return Defect("tokens", "the tape has 0 tokens; a rollout has at least its prompt")
    if not _within(value, 0, LARGEST_ID):
        bad = next(i for i, token in enumerate(value) if not 0 <= token <= LARGEST_ID)
        return Defect(f"tokens[{bad}]", f"id {_clipped(value[bad])} is out of range; {remedy}")
    return read_only(np.array(value, dtype=np.int32))


def as_flags(value: object, length: int) -> BoolArray | Defect:
    """Flags "sampled by the policy": 0, 1 or booleans, one per tape position."""
    remedy = "use 1 for a token the policy sampled, 0 for any other"
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "biu":
            return Defect("generated", f"array of {value.dtype} with shape {value.shape}; {remedy}")
    elif isinstance(value, (list, tuple)):
        bad = _first_of_other_type(value, {int, bool})
        if bad is not None:
            return Defect(f"generated[{bad}]", f"{_described(value[bad])} is not a flag; {remedy}")
    else:
        return Defect("generated", f"{_described(value)} is not a list; {remedy}")
    if len(value) != length or length == 0:
        return Defect("generated", f"{len(value)} flags for {length} tokens; every tape position needs exactly one")
    if not _within(value, 0, 1):
        bad = next(i for i, flag in enumerate(value) if flag not in (0, 1))
        return Defect(f"generated[{bad}]", f"{_clipped(value[bad])} is neither 0 nor 1; {remedy}")
    return read_only(np.array(value, dtype=np.bool_))


def as_logprobs(value: object, length: int) -> FloatArray | Defect:
    """Log-probabilities as float32, NaN where there is none (``null`` in JSON). Absent is not zero."""
    remedy = "give the log-probability logged at decode time, or null for a token that was not sampled"
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind != "f":
            return Defect("logprobs", f"array of {value.dtype} with shape {value.shape}; {remedy}")
    elif isinstance(value, (list, tuple)):
        bad = _first_of_other_type(value, {float, int, type(None)})
        if bad is not None:
            return Defect(f"logprobs[{bad}]", f"{_described(value[bad])} is not a log-probability; {remedy}")
        if int in set(map(type, value)):  # a whole number may be too large even for a float64
            bad = next((i for i, x in enumerate(value) if type(x) is int and abs(x) > 2**53), None)
            if bad is not None:
                return Defect(f"logprobs[{bad}]", f"{_clipped(value[bad])} is not a log-probability; {remedy}")
    else:
        return Defect("logprobs", f"{_described(value)} is not a list; {remedy}")
    if len(value) != length:
        return Defect("logprobs", f"{len(value)} entries for {length} tokens; {remedy}")
    wide = np.array(value, dtype=np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    overflow = np.flatnonzero(np.isinf(narrow))
    if overflow.size:
        bad = int(overflow[0])
        return Defect(f"logprobs[{bad}]", f"{wide[bad]:g} is not finite in float32; {remedy}")
    return read_only(narrow)


def to_json_floats(array: FloatArray) -> list[float | None]:
    """float32 as Python floats that print with the fewest digits that read back as the same float32; NaN as None.

    >>> to_json_floats(np.array([-0.1, np.nan], dtype=np.float32))
    [-0.1, None]
    """
    return [None if text == "nan" else float(text) for text in array.astype(np.str_).tolist()]


def _first_of_other_type(values: Sequence[Any], allowed: set[type]) -> int | None:
    if set(map(type, values)) <= allowed:
        return None
    return next(i for i, value in enumerate(values) if type(value) not in allowed)


def _within(values: Any, low: int, high: int) -> bool:
    if isinstance(values, np.ndarray):
        return bool(values.min() >= low and values.max() <= high)
    return bool(min(values) >= low and max(values) <= high)


def _described(value: object) -> str:
    return "null" if value is None else f"{type(value).__name__} {_clipped(value)}"


def _clipped(value: object, width: int = 40) -> str:
    if isinstance(value, int) and abs(value) >= 10**width:  # repr of a huge int may itself be refused by Python
        return f"a number with about {int(value.bit_length() * 0.30103)} digits"
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """The same array, protected against change: derived arrays share memory."""
    array.flags.writeable = False
    return array
