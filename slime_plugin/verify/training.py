"""A small run of ``memorywalker train``: two iterations with a real engine, killed after the first and resumed.

What has to hold is known without computing anything again: before the first update of an iteration old and new policy
are the same, before the first of all the reference is too; steps are numbered without a gap or a repetition, the lines
before the kill stay as they were, and the learning rate goes on where it was.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import to_yaml
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.local.checkpoint import checkpoints
from slime_plugin.machine import GB, disk_needed
from slime_plugin.needs import rollout_problems
from slime_plugin.rollout.server.server_process import tail_errors
from slime_plugin.rollout.server.sglang_flags import gpus
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.processes import terminate_leftovers
from slime_plugin.slime.refusals import training_problems
from slime_plugin.verify.measurement import Measurement, SkippedError, worst
from slime_plugin.verify.settings import Limits, Verification

COMMAND = (sys.executable, "-c", "from slime_plugin.cli.main import main; main()", "train")
ITERATIONS, STEPS, ROLLOUTS, WARMUP = 2, 2, 2, 3
"""``WARMUP`` is longer than an iteration, so that the learning rate of every step is another one."""
TURNS, TURN_TOKENS = 4, 256
"""At most."""
KL = 0.001
"""Coefficient of the reference KL, for a cell that has none."""
TIMEOUT_S = 1800.0
POLL_S = 0.05
_RATIO = "the passes before and in an update differ: look for dropout, or for layers that behave otherwise in training"
_REFERENCE = "the reference is not the model that the run began with; report it with the JSON output"
_RESUME = "a resumed run does not continue where it was; report it with the JSON output, and do not resume jobs here"


def check(verification: Verification) -> Iterator[Measurement]:
    cell = small_run(verification.cell)
    problem = next((problem for found in (rollout_problems, training_problems) for problem in found(cell)), None)
    if problem is not None:
        raise SkippedError(f"the cell cannot be trained on this machine: {problem}")
    needed = cell.trainer.ranks + 1
    if verification.device == "cuda" and gpus() < needed:
        raise SkippedError(f"ranks and an engine need {needed} GPUs of their own, and this machine has {gpus()}")
    scratch = Path(gettempdir())
    free, most = shutil.disk_usage(scratch).free, disk_needed(cell)
    if free < most:
        raise SkippedError(
            f"checkpoints of the run take up to {most / GB:,.0f} GB, and {scratch} has {free / GB:,.0f} GB free; set "
            "TMPDIR to a larger disk"
        )
    with TemporaryDirectory(prefix="memorywalker-") as path:
        folder = RunFolder(Path(path) / "run")
        try:
            before = _killed_and_resumed(cell, folder, Path(path))
        finally:
            terminate_leftovers(folder.processes)
        lines = list(folder.read_metrics())
    steps = [line for line in lines if line["kind"] == "step"]
    yield from findings(steps, cell, verification.limits)
    kept = sum(line in lines for line in before)
    yield Measurement.at_least("lines of metrics kept, of those before the kill", kept, len(before), _RESUME)


def findings(steps: Sequence[Mapping[str, Any]], cell: Cell, limits: Limits) -> Iterator[Measurement]:
    """Yield what the lines of all update steps say."""
    first = [step for step in steps if step["step"] % STEPS == 0]
    ratio = worst(abs(step["ratio"] - 1) for step in first)
    yield Measurement.at_most("|ratio - 1| at the first step of an iteration", ratio, limits.ratio, _RATIO)
    yield Measurement.at_most(
        "reference KL at step 0", steps[0]["reference_kl"], limits.reference_kl, _REFERENCE, "nats"
    )
    numbers, expected = [step["step"] for step in steps], list(range(ITERATIONS * STEPS))
    right = numbers == expected
    yield Measurement(
        "steps", right, ", ".join(map(str, numbers)), ", ".join(map(str, expected)), "" if right else _RESUME
    )
    wrong = max(abs(step["lr"] - cell.trainer.lr * min(1.0, step["step"] / WARMUP)) for step in steps)
    yield Measurement.at_most("learning rate: error relative to its end", wrong / cell.trainer.lr, 1e-6, _RESUME)


def small_run(cell: Cell) -> Cell:
    """Return the cell with as little to do as shows whether it trains and resumes."""
    rollout = {
        "samples": ROLLOUTS,
        "turns": min(cell.rollout.turns, TURNS),
        "turn_tokens": min(cell.rollout.turn_tokens, TURN_TOKENS),
    }
    sizes = {"iterations": ITERATIONS, "steps": STEPS, "prompts": STEPS, "lr_warmup": WARMUP}
    trainer = {**sizes, "save_every": 1, "keep": 1, "dp": 1}
    return cell.model_copy(
        update={
            "rollout": cell.rollout.model_copy(update=rollout),
            "trainer": cell.trainer.model_copy(update=trainer),
            "objective": cell.objective.model_copy(update={"kl": cell.objective.kl or KL}),
            "tracking": cell.tracking.model_copy(update={"tensorboard": False, "wandb": None}),
        }
    )


def _killed_and_resumed(cell: Cell, folder: RunFolder, scratch: Path) -> list[dict[str, Any]]:
    """Run the cell, kill it after the first checkpoint, resume it; return the lines of metrics before the kill."""
    config = scratch / "cell.yaml"
    config.write_text(to_yaml(cell.to_json()), encoding="utf-8")
    process = _start(config, folder, scratch / "first.log")
    try:
        _until_checkpoint(process, folder, scratch / "first.log")
    finally:
        _kill(process)
    before = [line for line in folder.read_metrics() if line["iteration"] == 0]
    process = _start(config, folder, scratch / "resumed.log", "--resume")
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MemoryWalkerError(
            f"the resumed run does not end within {TIMEOUT_S:.0f} s; run the cell by itself"
        ) from None
    finally:
        _kill(process)
    if process.returncode:
        raise _ended(process, scratch / "resumed.log")
    return before


def _start(config: Path, folder: RunFolder, log: Path, *options: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        command = [*COMMAND, str(config), "--out", str(folder.path), *options]
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def _until_checkpoint(process: subprocess.Popen[bytes], folder: RunFolder, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not checkpoints(folder):
        if process.poll() is not None:
            raise _ended(process, log)
        if time.monotonic() > deadline:
            raise MemoryWalkerError(f"no checkpoint within {TIMEOUT_S:.0f} s; run the cell by itself to see why")
        time.sleep(POLL_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a run as a machine would; what it has started ends with it, or when it is resumed."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ended(process: subprocess.Popen[bytes], log: Path) -> MemoryWalkerError:
    return MemoryWalkerError(
        f"memorywalker train ended with {process.returncode}: {' '.join(tail_errors(log))}; run the cell by itself"
    )
