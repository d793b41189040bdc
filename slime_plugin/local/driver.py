"""The loop of a run: rollouts, updates, weights into the engine, metrics, checkpoints. Whatever it begins, it ends.

A checkpoint holds what the next iteration begins with, so a run that was stopped anywhere goes on from the last one:
rollouts that were recorded since then are trained on as they are, by weights that are the same again, and lines of
metrics since then are written anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from slime_plugin.config.cell import Cell
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.local import checkpoint, settings
from slime_plugin.local.processes import Ledger, Process, end_left_over
from slime_plugin.local.telling import iteration_line, step_lines
from slime_plugin.report.folder import RunFolder
from slime_plugin.report.sinks import Metrics, truncate_metrics
from slime_plugin.seam.args import KEY, carry

OBJECT_STORE = 512 * 2**20
"""Bytes of Ray's object store: a batch of rollouts is a few megabytes."""
POLL = 0.2
"""Seconds between two looks at how far an actor is."""
BREATH = 1.0
"""Seconds in which several requests to stop are one: a terminal and whoever watches it may both ask."""


class Watch(Protocol):
    """Whoever wants to see how far a run is."""

    def stage(self, what: str) -> None:
        """Something slow has begun."""

    def rollouts(self, iteration: int, done: int, total: int) -> None: ...

    def line(self, line: dict[str, Any]) -> None:
        """A line of metrics."""


def train(
    cell: Cell, folder: RunFolder, watch: Watch, *, resume: bool = False, recorded: RunFolder | None = None
) -> None:
    """Run a cell in a folder; with ``recorded`` on the rollouts of another run, without an engine."""
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(_Interrupts())
        stack.enter_context(settings.opened(folder, cell, resume=resume, recorded=recorded))
        end_left_over(folder.processes)
        begin = max(checkpoint.checkpoints(folder), default=0)
        truncate_metrics(folder, begin)
        if begin >= cell.trainer.iterations:
            watch.stage(f"done already: {begin} iterations")
            return
        metrics = stack.enter_context(Metrics(folder, cell.tracking, carry(cell)))
        actors = stack.enter_context(_started(cell, folder, begin, recorded, watch, interrupts))
        for iteration in range(begin, cell.trainer.iterations):
            for line in actors.iterate(iteration, watch):
                metrics.write(line)
                watch.line(line)


@contextlib.contextmanager
def _started(
    cell: Cell, folder: RunFolder, begin: int, recorded: RunFolder | None, watch: Watch, interrupts: _Interrupts
) -> Iterator[_Actors]:
    """The actors of a run, ready for iteration ``begin``; afterwards nothing of them is left."""
    import ray

    watch.stage("starting Ray")
    ledger = Ledger(folder.processes)
    os.environ.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # it listens on loopback only
            "OMP_WAIT_POLICY": "passive",  # or threads of one rank spin while another computes
            "HF_HUB_OFFLINE": "1",
        }
    )
    actors = None
    try:
        ledger.update()
        ray.init(
            address="local",
            num_cpus=cell.trainer.ranks + 2,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(ledger.scratch),
        )
        interrupts.take()  # Ray has just put a handler of its own in place
        ledger.update()
        actors = _Actors(cell, folder, recorded, ledger.scratch)
        actors.start(begin, watch)
        ledger.update()
        yield actors
    except ray.exceptions.RayError as error:
        raise _as_told(error, None if actors is None else actors.gone(), folder) from None
    except SystemExit:
        raise KeyboardInterrupt from None  # what Ray's own handler makes of a request to terminate
    finally:
        interrupts.ignore()  # cleaning up takes some seconds
        ledger.look()  # what Ray started can be found only as long as Ray runs
        ray.shutdown()
        interrupts.ignore()  # Ray may have put its handlers back
        ledger.end()


class _Actors:
    """The rollout actor and the training ranks."""

    def __init__(self, cell: Cell, folder: RunFolder, recorded: RunFolder | None, scratch: Path) -> None:
        """``scratch`` is where the ranks find each other: a file needs no port that another may take meanwhile."""
        import ray
        import torch

        from slime_plugin.local.rank import RankActor
        from slime_plugin.local.rollout import RolloutActor

        actor: Any = ray.remote  # its types know functions only
        self._ray = ray
        self._cell, self._folder, self._recorded, self._scratch = cell, folder, recorded, scratch
        settings = vars(slime_args(cell))
        gpus = {"num_gpus": 1} if torch.cuda.is_available() else {}
        other = None if recorded is None else str(recorded.path.resolve())
        self._rollouts = actor(num_cpus=1, **({} if other else gpus))(RolloutActor).remote(
            settings, str(folder.path.resolve()), other, str((folder.logs / "rollout.log").resolve())
        )
        remote = actor(num_cpus=1, **gpus)(RankActor)
        logs = [folder.logs / f"rank-{rank}.log" for rank in range(cell.trainer.ranks)]
        self._ranks = [remote.remote(settings, rank, str(log.resolve())) for rank, log in enumerate(logs)]
        self._replicas: list[int] = []
        self._processes: list[tuple[Process, Path]] = []

    def gone(self) -> str | None:
        """Which of them has ended, and where to read more. Whoever worked with it may notice a moment too early."""
        until = time.monotonic() + BREATH
        while self._processes and time.monotonic() < until:
            for process, log in self._processes:
                if not process.alive:
                    return f"{log.stem} (process {process.pid}) is gone; see {log}"
            time.sleep(POLL)
        return None

    def start(self, begin: int, watch: Watch) -> None:
        """Load models, on both sides at once, with the weights that iteration ``begin`` is sampled by."""
        cell, folder = self._cell, self._folder
        assert cell.model is not None
        first = folder.weights(0)
        if not first.is_symlink():
            with checkpoint.writing(first):
                first.symlink_to(cell.model.resolve(), target_is_directory=True)
        ranks = f"{cell.trainer.ranks} training rank{'s' * (cell.trainer.ranks > 1)}"
        watch.stage(f"starting {ranks}{' and the engine' * (self._recorded is None)}")
        pids = self._all([actor.pid.remote() for actor in (self._rollouts, *self._ranks)])
        names = ["rollout", *(f"rank-{rank}" for rank in range(len(self._ranks)))]
        self._processes = [
            (process, folder.logs / f"{name}.log")
            for pid, name in zip(pids, names, strict=True)
            if (process := Process.of(pid)) is not None
        ]
        meeting, world = str(self._scratch / "ranks"), cell.trainer.ranks
        starting = [rank.start.remote(meeting, world) for rank in self._ranks]
        if self._recorded is None and not begin:
            starting.append(self._rollouts.start_engine.remote(str(first.resolve()), 0))
        self._replicas = self._all(starting)[:world]
        if begin:
            watch.stage(f"loading the checkpoint of iteration {begin}")
            shards = folder.checkpoints / f"{begin:05d}"
            self._all([rank.load.remote(str(shards.resolve())) for rank in self._ranks])
            self._export(begin)
            if self._recorded is None:
                self._all([self._rollouts.start_engine.remote(str(folder.weights(begin).resolve()), begin)])

    def iterate(self, iteration: int, watch: Watch) -> Iterator[dict[str, Any]]:
        """One iteration; the lines of metrics that it gives, once it is whole.

        They have to be written before the next step is taken: then it becomes a checkpoint, and is never done again.
        """
        begun = time.perf_counter()
        boxes, told = self._generate(iteration, watch)
        watch.stage(f"iteration {iteration}: training")
        results = self._all(
            [
                rank.train.remote(iteration, boxes[replica])
                for rank, replica in zip(self._ranks, self._replicas, strict=True)
            ]
        )
        seconds = dict(told.pop("seconds"))
        for name in ("reference", "old", "train", "transfer"):
            seconds[name] = max(result["seconds"][name] for result in results)
        for name, work in (("export", self._export), ("update", self._update), ("save", self._save)):
            before = time.perf_counter()
            work(iteration + 1)
            seconds[name] = time.perf_counter() - before
        seconds["total"] = time.perf_counter() - begun
        yield from step_lines(iteration, self._cell.trainer.steps, results[0]["steps"])
        yield iteration_line(iteration, told, [r["drift"] for r in results if r["tells"]], seconds)
        self._finish(iteration + 1)

    def _generate(self, iteration: int, watch: Watch) -> tuple[list[Any], dict[str, Any]]:
        generated = self._rollouts.generate.remote(iteration)
        while not self._ray.wait([generated], timeout=POLL)[0]:
            watch.rollouts(iteration, *self._ray.get(self._rollouts.progress.remote()))
        result: tuple[list[Any], dict[str, Any]] = self._ray.get(generated)
        watch.rollouts(iteration, *self._ray.get(self._rollouts.progress.remote()))
        return result

    def _export(self, version: int) -> None:
        """The weights as a Hugging Face checkpoint. It is whole once it has its ``config.json``, which comes last."""
        assert self._cell.model is not None
        target = self._folder.weights(version)
        with checkpoint.writing(target):
            if target.exists():
                (target / "config.json").unlink(missing_ok=True)
                shutil.rmtree(target)
        self._all([rank.export.remote(str(target.resolve())) for rank in self._ranks])
        beside = [path for path in self._cell.model.iterdir() if path.is_file() and not _is_weights(path)]
        with checkpoint.writing(target):
            for path in sorted(beside, key=lambda path: path.name == "config.json"):
                shutil.copyfile(path, target / path.name)

    def _update(self, version: int) -> None:
        if self._recorded is None:
            self._all([self._rollouts.update.remote(str(self._folder.weights(version).resolve()), version)])

    def _is_saved(self, iteration: int) -> bool:
        trainer = self._cell.trainer
        return iteration % trainer.save_every == 0 or iteration == trainer.iterations

    def _save(self, iteration: int) -> None:
        if self._is_saved(iteration):
            draft = checkpoint.draft_of(self._folder, iteration)
            self._all([rank.save.remote(str(draft.resolve())) for rank in self._ranks])

    def _finish(self, iteration: int) -> None:
        folder = self._folder
        if self._is_saved(iteration):
            checkpoint.finish(folder, iteration, {"version": 1, "iteration": iteration}, self._cell.trainer.keep)
        checkpoint.drop_weights(folder, [*checkpoint.checkpoints(folder), iteration])

    def _all(self, references: Sequence[Any]) -> list[Any]:
        """What all of them give. The first error counts: the others may wait for whoever raised it forever."""
        waiting = list(references)
        while waiting:
            (ready,), waiting = self._ray.wait(waiting, num_returns=1)
            self._ray.get(ready)
        results: list[Any] = self._ray.get(list(references))
        return results


def slime_args(cell: Cell) -> Namespace:
    """The arguments that hooks are given: slime's names for what is in the cell, and the cell."""
    trainer = cell.trainer
    return Namespace(
        **{KEY: carry(cell)},
        rollout_batch_size=trainer.prompts,
        n_samples_per_prompt=cell.rollout.samples,
        num_rollout=trainer.iterations,
        num_steps_per_rollout=trainer.steps,
        global_batch_size=trainer.prompts * cell.rollout.samples // trainer.steps,
        sglang_router_ip=None,
        sglang_router_port=None,
    )


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith(".index.json")


def _as_told(error: Exception, gone: str | None, folder: RunFolder) -> Exception:
    """What Ray raised, as a line that says what happened and what to do."""
    import ray

    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    if isinstance(cause, MemoryWalkerError):
        return cause
    if gone is not None:
        return MemoryWalkerError(f"{gone}, and go on with --resume")
    if cause is not None:
        return error  # a mistake of ours, with its traceback
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = lines[-1] if lines else type(error).__name__
    return MemoryWalkerError(f"a process of the run is gone ({why}); see {folder.logs}, and go on with --resume")


class _Interrupts:
    """Interrupt, termination and the end of the terminal are the same to a run, unless one was to be ignored anyway."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._last = -BREATH

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():  # others are not interrupted
            found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
            self._before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
        self.take()
        return self

    def take(self) -> None:
        """From now on they interrupt."""
        self._all(self._interrupt)

    def ignore(self) -> None:
        self._all(signal.SIG_IGN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _all(self, handler: Any) -> None:
        for number in self._before:
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: Any) -> None:
        since, self._last = time.monotonic() - self._last, time.monotonic()
        if since > BREATH:
            raise KeyboardInterrupt
