"""Runs a function on the ranks of a world on this machine, a process each, and returns their results.

For scoring, comparing and tests. ``memorywalker train`` starts its ranks with Ray, a cluster's are started by slime.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slime_plugin.errors import ConfigError, MemoryWalkerError

EXIT_S = 5.0
"""For a rank that has closed its pipe to exit."""
Result = TypeVar("Result")
OnProgress = Callable[[int], None]
"""Called with the number of further units of work that are done."""


def run_ranks(
    ranks: int, function: Callable[..., Result], *arguments: Any, on_progress: OnProgress = lambda done: None
) -> list[Result]:
    """Return what ``function(on_progress, ...)`` returns on each rank, called with torch.distributed initialised.

    Progress is that of rank 0. An error on any rank ends the others and is raised here.
    """
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise ConfigError(f"{ranks} ranks need as many GPUs, this machine has {torch.cuda.device_count()}")
    processes = _start_method(function.__module__)
    with TemporaryDirectory(prefix="memorywalker-") as folder:
        workers: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            with _deferred_interrupts():  # an interrupted rank would print a traceback while it starts
                for rank in range(ranks):
                    ours, theirs = processes.Pipe(duplex=False)
                    work = (theirs, folder, rank, ranks, function, arguments)
                    started = processes.Process(target=_rank, args=work, daemon=True)
                    started.start()
                    workers.append(started)
                    theirs.close()
                    pipes.append(ours)
            return _collect(pipes, workers, on_progress)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join()


def _start_method(module: str) -> SpawnContext | ForkServerContext:
    """Fork CPU ranks from a server that has imported the module once; CUDA does not survive a fork."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([module])
    if threading.current_thread() is threading.main_thread():
        # Server and ranks inherit this: only this process handles an interrupt, by ending them.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, handler)
    return processes


@contextlib.contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """Raise an interrupt at the end of the block."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    caught: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        raise KeyboardInterrupt


def _ended(rank: int, worker: BaseProcess) -> MemoryWalkerError:
    worker.join(EXIT_S)
    name = f"rank {rank}"
    if worker.exitcode == -signal.SIGABRT:
        return MemoryWalkerError(
            f"{name} aborted; a collective timed out or the GPU failed: see what it printed above, or NCCL_DEBUG=INFO"
        )
    if worker.exitcode in (None, -signal.SIGKILL):
        return MemoryWalkerError(f"{name} was killed; is there enough memory?")
    return MemoryWalkerError(f"{name} exited with {worker.exitcode}; see what it printed above")


def _collect(pipes: list[Connection], workers: list[BaseProcess], on_progress: OnProgress) -> list[Any]:
    results: dict[int, Any] = {}
    errors: list[Exception] = []
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        # The first error is often that a rank lost its connection to the one that failed: wait briefly for that one.
        ready = wait(list(waiting), timeout=1.0 if errors else None)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                what, content = pickle.loads(pipe.recv_bytes())
            except EOFError:
                what, content = "error", _ended(rank, workers[rank])
            if what == "progress":
                if rank == 0:
                    on_progress(content)
                continue
            del waiting[pipe]
            if what == "error":
                errors.append(content)
            else:
                results[rank] = content
    if errors:
        raise next((error for error in errors if isinstance(error, MemoryWalkerError)), errors[0])
    return [results[rank] for rank in range(len(pipes))]


def join_world(store: str | Path, rank: int, ranks: int, *, device: int) -> None:
    """Initialise torch.distributed in this process; the ranks meet in a file on this machine."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)


def _rank(
    pipe: Connection,
    folder: str,
    rank: int,
    ranks: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    try:
        join_world(f"{folder}/store", rank, ranks, device=rank)
        result = function(lambda done: _send(pipe, "progress", done), *arguments)
        dist.barrier()  # no rank may end while another is in a collective
        _send(pipe, "result", result)
    except BrokenPipeError:
        pass  # the parent process has ended
    except MemoryWalkerError as error:
        _send(pipe, "error", error)
    except BaseException:  # noqa: BLE001  # raised by the parent
        _send(pipe, "error", RuntimeError(f"rank {rank} of {ranks}:\n{traceback.format_exc()}"))


def _send(pipe: Connection, what: str, content: Any) -> None:
    """Send by value: torch's reducers would share memory of a process that is about to end."""
    pipe.send_bytes(pickle.dumps((what, content)))
