"""Where the host waits for the device: operations whose result it needs before it can go on, and the time that costs.

While the host waits it launches nothing, so that a GPU runs dry soon afterwards. Operations are counted on any device:
on a CPU nothing waits, but the same code would on a GPU. Times are those of torch's profiler, and of GPUs only.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

WAITING_OPS = (
    *("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"),
    *("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount"),
)
"""Names in ``torch.ops.aten``: their result, or its size, depends on values on the device."""
_SPOKEN = {"_local_scalar_dense": "item", "_unique2": "unique", "_to_copy": "copy"}
"""What one writes to get these."""
WAITING_CALLS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    *("cudaMemcpy", "cudaMemcpyAsync", "cuStreamSynchronize", "cuCtxSynchronize"),
)
"""Of the CUDA runtime; copies of either kind."""
_TORCH = Path(torch.__file__).parent
_FOLDERS = (Path(__file__).parents[1], _TORCH.parent)
"""That lines are shown without: this package, and the others."""


class WaitCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Counts, while it is entered, operations that make the host wait, by name and by the line that asks for them.

    Where there are GPUs, only those on them; the rest of the time the host waits for nobody but itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if any(isinstance(x, Tensor) for x in args) and _waits(name, args, kwargs, result):
            self.places[f"{_SPOKEN.get(name, name)} in {_caller()}"] += 1
        return result


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    source = next(x for x in args if isinstance(x, Tensor))
    if torch.cuda.is_available():
        if name in ("_to_copy", "copy_") and isinstance(result, Tensor):
            origin = args[1] if name == "copy_" else source
            return isinstance(origin, Tensor) and origin.is_cuda and not result.is_cuda
        if not source.is_cuda:
            return False
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):  # by a mask
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in WAITING_OPS


def _caller() -> str:
    """Return the innermost line that is not torch's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and Path(frame.f_code.co_filename).is_relative_to(_TORCH):
        frame = frame.f_back
    if frame is None:
        return "torch"
    path = Path(frame.f_code.co_filename)
    folder = next((folder for folder in _FOLDERS if path.is_relative_to(folder)), path.parent)
    return f"{path.relative_to(folder)}:{frame.f_lineno}"


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Of one call, as the profiler saw it. Profiling makes the host slower, so that idle times are upper bounds."""

    seconds: float
    idle: float
    """Seconds in which the GPU computed and copied nothing, between the first thing it did and the last."""
    lost: float
    """The part of that in which the host had waited for the GPU, and launched the next thing only then. That it waits
    at the end, or with work left in the queue, costs nothing."""
    calls: int
    """Of ``WAITING_CALLS``."""


def profiled(action: Callable[[], object]) -> DeviceTimes | None:
    """Profile a call on the GPU of this rank; None if the profiler saw nothing of the GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        action()
        torch.cuda.synchronize()
    events = [
        (event.name, event.device_type.name != "CPU", event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if not event.is_user_annotation  # a region of the host, which covers the gaps between kernels
    ]
    return device_times(events) if any(on_device for _, on_device, _, _ in events) else None


def device_times(events: Iterable[tuple[str, bool, float, float]]) -> DeviceTimes:
    """Add up events: the name of each, whether it is the device's, its start and its end in microseconds."""
    events = list(events)
    waited = sorted(stop for name, on_device, _, stop in events if not on_device and name in WAITING_CALLS)
    spans = sorted((start, stop) for _, on_device, start, stop in events if on_device)
    idle = lost = 0.0
    until = spans[0][0] if spans else 0.0
    for start, stop in spans:
        if start > until:
            idle += start - until
            over = bisect_left(waited, until)  # the first wait that was over once the GPU had nothing left
            lost += start - until if over < len(waited) and waited[over] <= start else 0.0
        until = max(until, stop)
    seconds = max((stop for *_, stop in events), default=0.0) - min((start for *_, start, _ in events), default=0.0)
    return DeviceTimes(seconds / 1e6, idle / 1e6, lost / 1e6, len(waited))
