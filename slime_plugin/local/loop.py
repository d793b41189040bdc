"""The loop of a run: rollouts, updates, weights into the engine, metrics, checkpoints. It stops whatever it starts.

A checkpoint holds what the next iteration begins with, so an interrupted run resumes from the last one: rollouts that
were recorded since then are trained on again, by the same weights, and metrics since then are written again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from slime_plugin.config.cell import Cell
from slime_plugin.diagnosis.health import write_health
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.local import checkpoint
from slime_plugin.local.actors import IterationRollouts, TrainResult
from slime_plugin.local.metric_lines import iteration_line, step_lines
from slime_plugin.run import settings
from slime_plugin.run.evidence import recorded_start
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.metrics import Metrics, truncate_metrics
from slime_plugin.run.processes import ProcessRegistry, is_alive, terminate_leftovers
from slime_plugin.run.signals import Interrupt, StopSignals
from slime_plugin.slime.args import args_of

OBJECT_STORE_BYTES = 512 * 2**20
"""Ray's object store; a batch of rollouts is a few megabytes."""
POLL_S = 0.2
"""Between two queries of an actor's progress."""


class Progress(Protocol):
    """Receives the progress of a run."""

    def stage(self, what: str) -> None:
        """Called when something slow starts."""

    def rollouts(self, iteration: int, done: int, total: int) -> None: ...

    def line(self, line: dict[str, Any]) -> None:
        """Called with each line of metrics."""


def train(
    cell: Cell, folder: RunFolder, progress: Progress, *, resume: bool = False, recorded: RunFolder | None = None
) -> None:
    """Train a cell in a folder; with ``recorded`` on the rollouts of another run, without an engine."""
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(StopSignals(Interrupt()))
        stack.enter_context(settings.opened(folder, cell, resume=resume, recorded=recorded))
        stack.enter_context(recorded_start(folder.path, cell.to_json()))
        terminate_leftovers(folder.processes)
        begin = max(checkpoint.checkpoints(folder), default=0)
        truncate_metrics(folder, begin)
        if begin >= cell.trainer.iterations:
            progress.stage(f"nothing to do: all {begin} iterations are trained")
            return
        metrics = stack.enter_context(Metrics(folder, cell.tracking, cell.to_json()))
        actors = stack.enter_context(_started(cell, folder, begin, recorded, progress, interrupts))
        for iteration in range(begin, cell.trainer.iterations):
            for line in actors.iterate(iteration, progress):
                metrics.write(line)
                progress.line(line)
            write_health(folder, iteration, actors.pids)


@contextlib.contextmanager
def _started(
    cell: Cell, folder: RunFolder, begin: int, recorded: RunFolder | None, progress: Progress, interrupts: StopSignals
) -> Iterator[_Actors]:
    """Start the actors of a run, ready for iteration ``begin``; end every process of theirs afterwards."""
    import ray

    progress.stage("starting Ray")
    registry = ProcessRegistry(folder.processes)
    os.environ.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # it listens on loopback only
            "OMP_WAIT_POLICY": "passive",  # otherwise threads of one rank spin while another computes
            "HF_HUB_OFFLINE": "1",
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",  # Ray shows each rank its own GPU, and no other
        }
    )
    actors = None
    try:
        registry.update()
        ray.init(
            address="local",
            num_cpus=cell.trainer.ranks + 2,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(registry.scratch),
        )
        interrupts.handle()  # Ray has just installed a handler of its own
        registry.update()
        actors = _Actors(cell, folder, recorded, registry.scratch)
        actors.start(begin, progress)
        registry.update()
        yield actors
    except ray.exceptions.RayError as error:
        raise _readable_error(error, None if actors is None else actors.ended_process(), folder) from None
    except SystemExit:
        raise KeyboardInterrupt from None  # Ray's own handler exits on SIGTERM
    finally:
        interrupts.ignore()  # cleaning up takes some seconds
        registry.scan()  # what Ray started can be found only as long as Ray runs
        ray.shutdown()
        interrupts.ignore()  # Ray may have restored its handlers
        registry.end()


class _Actors:
    """The rollout actor and the training ranks."""

    def __init__(self, cell: Cell, folder: RunFolder, recorded: RunFolder | None, scratch: Path) -> None:
        """``scratch`` gets the file of the ranks' rendezvous: unlike a port, no other process can take it."""
        import ray
        import torch

        from slime_plugin.local.rank import RankActor
        from slime_plugin.local.rollout_actor import RolloutActor

        actor: Any = ray.remote  # typed for functions only
        self._ray = ray
        self._cell, self._folder, self._recorded, self._scratch = cell, folder, recorded, scratch
        settings = vars(args_of(cell))
        gpus = {"num_gpus": 1} if torch.cuda.is_available() else {}
        here = RunFolder(folder.path.resolve())  # actors have another working directory
        replayed = None if recorded is None else RunFolder(recorded.path.resolve())
        self._rollouts = actor(num_cpus=1, **({} if replayed else gpus))(RolloutActor).remote(
            settings, here, replayed, here.logs / "rollout.log"
        )
        remote = actor(num_cpus=1, **gpus)(RankActor)
        logs = [here.logs / f"rank-{rank}.log" for rank in range(cell.trainer.ranks)]
        self._ranks = [remote.remote(settings, rank, log) for rank, log in enumerate(logs)]
        self._replicas: list[int] = []
        self._processes: list[tuple[psutil.Process, Path]] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._processes]

    def ended_process(self) -> str | None:
        """Describe the process that has ended. Others may notice its end before the operating system shows it."""
        deadline = time.monotonic() + 1.0
        while self._processes and time.monotonic() < deadline:
            for process, log in self._processes:
                if not is_alive(process):
                    return f"{log.stem} (process {process.pid}) has exited; see {log}"
            time.sleep(POLL_S)
        return None

    def start(self, begin: int, progress: Progress) -> None:
        """Load the weights that iteration ``begin`` is sampled by into the ranks and the engine."""
        cell, folder = self._cell, self._folder
        first = folder.weights(0)
        if not first.is_symlink():
            with checkpoint.writing(first):
                first.symlink_to(cell.require_model().resolve(), target_is_directory=True)
        ranks = f"{cell.trainer.ranks} training rank{'s' * (cell.trainer.ranks > 1)}"
        progress.stage(f"starting {ranks}{' and the engine' * (self._recorded is None)}")
        pids = self._all([actor.pid.remote() for actor in (self._rollouts, *self._ranks)])
        names = ["rollout", *(f"rank-{rank}" for rank in range(len(self._ranks)))]
        self._processes = [
            (psutil.Process(pid), folder.logs / f"{name}.log")
            for pid, name in zip(pids, names, strict=True)
            if psutil.pid_exists(pid)
        ]
        rendezvous, world = self._scratch / "ranks", cell.trainer.ranks
        starting = [rank.start.remote(rendezvous, world) for rank in self._ranks]
        if self._recorded is None and not begin:
            starting.append(self._rollouts.start_engine.remote(first.resolve(), 0))
        self._replicas = self._all(starting)[:world]
        if begin:
            progress.stage(f"loading the checkpoint of iteration {begin}")
            shards = folder.checkpoints / f"{begin:05d}"
            self._all([rank.load.remote(shards.resolve()) for rank in self._ranks])
            self._export(begin)
            if self._recorded is None:
                self._all([self._rollouts.start_engine.remote(folder.weights(begin).resolve(), begin)])

    def iterate(self, iteration: int, progress: Progress) -> Iterator[dict[str, Any]]:
        """Run an iteration and yield its lines of metrics.

        The caller has to write them before it asks for more: then the iteration becomes a checkpoint, and is never
        repeated.
        """
        started = time.perf_counter()
        rollouts = self._generate(iteration, progress)
        progress.stage(f"iteration {iteration}: training")
        # In a list, or Ray would fetch the part before the call, where the transfer cannot be timed.
        parts = [[rollouts.parts[replica]] for replica in self._replicas]
        results: list[TrainResult] = self._all(
            [rank.train_part.remote(iteration, part) for rank, part in zip(self._ranks, parts, strict=True)]
        )
        seconds = dict(rollouts.seconds)
        for name in ("reference", "old", "train", "transfer"):
            seconds[name] = max(result.seconds[name] for result in results)
        for name, work in (("export", self._export), ("update", self._update_engine), ("save", self._save)):
            phase_started = time.perf_counter()
            work(iteration + 1)
            seconds[name] = time.perf_counter() - phase_started
        seconds["total"] = time.perf_counter() - started
        yield from step_lines(iteration, self._cell.trainer.steps, results[0].steps)
        yield iteration_line(
            iteration, rollouts.metrics, [r.logdiff for r in results if r.logdiff is not None], seconds
        )
        self._finish(iteration + 1)

    def _generate(self, iteration: int, progress: Progress) -> IterationRollouts:
        generated = self._rollouts.generate.remote(iteration)
        while not self._ray.wait([generated], timeout=POLL_S)[0]:
            progress.rollouts(iteration, *self._ray.get(self._rollouts.progress.remote()))
        result: IterationRollouts = self._ray.get(generated)
        progress.rollouts(iteration, *self._ray.get(self._rollouts.progress.remote()))
        return result

    def _export(self, version: int) -> None:
        """Write the weights as a Hugging Face checkpoint. Its ``config.json`` comes last and marks it as complete."""
        target = self._folder.weights(version)
        with checkpoint.writing(target):
            if target.exists():
                (target / "config.json").unlink(missing_ok=True)
                shutil.rmtree(target)
        self._all([rank.export.remote(target.resolve()) for rank in self._ranks])
        others = [path for path in self._cell.require_model().iterdir() if path.is_file() and not _is_weights(path)]
        with checkpoint.writing(target):
            for path in sorted(others, key=lambda path: path.name == "config.json"):
                shutil.copyfile(path, target / path.name)

    def _update_engine(self, version: int) -> None:
        if self._recorded is None:
            self._all([self._rollouts.update.remote(self._folder.weights(version).resolve(), version)])

    def _is_saved(self, iteration: int) -> bool:
        trainer = self._cell.trainer
        return iteration % trainer.save_every == 0 or iteration == trainer.iterations

    def _save(self, iteration: int) -> None:
        if self._is_saved(iteration):
            draft = checkpoint.draft_of(self._folder, iteration)
            self._all([rank.save.remote(draft.resolve()) for rank in self._ranks])

    def _finish(self, iteration: int) -> None:
        folder = self._folder
        if self._is_saved(iteration):
            checkpoint.finish(folder, iteration, {"version": 1, "iteration": iteration}, self._cell.trainer.keep)
        checkpoint.drop_weights(folder, [*checkpoint.checkpoints(folder), iteration])

    def _all(self, references: Sequence[Any]) -> list[Any]:
        """Return all results. Raise the first error at once: the other actors may wait for the failed one forever."""
        waiting = list(references)
        while waiting:
            (ready,), waiting = self._ray.wait(waiting, num_returns=1)
            self._ray.get(ready)
        results: list[Any] = self._ray.get(list(references))
        return results


def _is_weights(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith(".index.json")


def _readable_error(error: Exception, ended: str | None, folder: RunFolder) -> Exception:
    """Turn an error of Ray into a line that says what happened and what to do."""
    import ray

    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    if isinstance(cause, MemoryWalkerError):
        return cause
    if ended is not None:
        return MemoryWalkerError(f"{ended}, and continue with --resume")
    if cause is not None:
        return error  # a bug, with its traceback
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = lines[-1] if lines else type(error).__name__
    return MemoryWalkerError(f"a process of the run has exited ({why}); see {folder.logs}, and continue with --resume")
