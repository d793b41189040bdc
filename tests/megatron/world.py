"""Gloo processes that run one function together, each as one rank of a world."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

# Imports torch and megatron-core once; every world is then forked from a process in which no thread was started.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.megatron.jobs"])


def run_world(ranks: int, function: Callable[..., Result], *arguments: Any) -> list[Result]:
    """What the function returned on each rank. An error on any rank is raised here, with its traceback."""
    with TemporaryDirectory() as folder:
        workers = [
            _processes.Process(target=_rank, args=(rank, ranks, Path(folder), function, arguments), daemon=True)
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=300)
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        running = [worker for worker in workers if worker.is_alive()]
        for worker in running:
            worker.kill()
        if errors or running:
            raise RuntimeError("\n".join(errors) or f"{len(running)} of {ranks} ranks did not end in 5 minutes")
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(function(*arguments)))
        dist.barrier()
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
