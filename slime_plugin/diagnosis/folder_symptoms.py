"""Symptoms from the folder itself: files that cannot be read, checkpoints that are cut off, a run that just ended."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from slime_plugin.diagnosis.run_contents import RunContents
from slime_plugin.diagnosis.symptom import CAUSE, CONSEQUENCE, SIGN, Symptom
from slime_plugin.slime.retention import latest_checkpoint

LARGEST_HEADER_BYTES = 100 << 20
"""Of a safetensors file, as its own reader has it."""
_REMOVE = "remove {path}, so that the checkpoint before it is taken"


def unreadable_files(run: RunContents) -> Iterator[Symptom]:
    for problem in run.problems[:5]:
        yield Symptom(
            "unreadable file",
            "warning",
            problem,
            "the machine stopped while it was written, or the disk is not sound",
            "the run can be continued without a line of metrics, and not without its configuration",
            problem.partition(": ")[0],
            CONSEQUENCE,
        )


def verification(run: RunContents) -> Iterator[Symptom]:
    """What ``launch/verify.sh`` had found before the last start."""
    found = (run.starts[-1] if run.starts else {}).get("verification")
    if isinstance(found, dict) and found.get("ok") is False:
        yield Symptom(
            "verification failed",
            "warning",
            f"{found.get('path')} of {found.get('time')}: {found.get('verdict')}",
            "the run was started on machines, or with settings, of which a check had failed",
            "look at verify.html beside it, which says what to do, and verify again",
            run.error_place,
            CAUSE,
        )


def checkpoints(run: RunContents) -> Iterator[Symptom]:
    folder = run.folder.checkpoints
    if run.kind == "job":
        yield from _megatron_checkpoints(run, folder)
        return
    complete = sorted(path for path in folder.glob("*") if path.name.isdecimal())
    for path in complete[-1:]:
        for problem in _cut_off(path):
            yield _incomplete(problem, str(path.relative_to(run.folder.path)), _REMOVE.format(path=path))
    drafts = [path.name for path in folder.glob("*.part")]
    if drafts and not run.is_running:
        yield Symptom(
            "checkpoint draft",
            "info",
            f"checkpoints/{drafts[0]} was being written when the run ended",
            "the run was killed, or the disk was full",
            f"{run.resume}; the draft is removed then",
            f"checkpoints/{drafts[0]}",
            CONSEQUENCE,
        )


def ended_early(run: RunContents) -> Iterator[Symptom]:
    """A run that is not over, does not run, and has left no error."""
    planned = run.planned
    if run.is_done or run.is_running or planned is None or run.error is not None:
        return
    interrupted = (run.end or {}).get("how") == "interrupted"
    known = run.end is not None or bool(run.starts)
    yield Symptom(
        "interrupted" if interrupted else "ended early",
        "info" if interrupted else "warning",
        f"{run.done} of {planned} iterations are trained, and no process of the run is left",
        "it was stopped by a signal (Ctrl-C, kill, Slurm)"
        if interrupted
        else "it was killed: no error was written down, as when the kernel is out of memory, a session or a node ends"
        if known
        else "it was stopped or killed; if no other symptom is shown, there was no error",
        run.resume,
        run.error_place if run.starts else "",
        CONSEQUENCE,
    )


def still_running(run: RunContents) -> Iterator[Symptom]:
    if run.is_running:
        yield Symptom(
            "running",
            "info",
            f"the run is going: {run.done} of {run.planned} iterations are trained",
            "a process holds processes.lock",
            "nothing to do",
            "processes.lock",
            SIGN,
        )


def _megatron_checkpoints(run: RunContents, folder: Path) -> Iterator[Symptom]:
    latest = latest_checkpoint(folder)
    if latest is None:
        return
    path = folder / f"iter_{latest:07d}"
    empty = [file for file in path.glob("*") if file.is_file() and not file.stat().st_size] if path.is_dir() else []
    if not path.is_dir():
        problem = f"latest_checkpointed_iteration.txt names iteration {latest}, and there is no {path.name}"
    elif empty:
        problem = f"{path.name}/{empty[0].name} is empty"
    elif not (path / "common.pt").exists() and not (path / ".metadata").exists():
        problem = f"{path.name} has neither common.pt nor .metadata"
    else:
        return
    remedy = "write the number of a complete checkpoint into latest_checkpointed_iteration.txt, then start again"
    yield _incomplete(problem, f"checkpoints/{path.name}", remedy)


def _incomplete(problem: str, where: str, remedy: str) -> Symptom:
    cause = "the disk was full, the machine stopped before it was written, or it was copied in part"
    return Symptom("checkpoint cut off", "error", problem, cause, remedy, where, CAUSE)


def _cut_off(checkpoint: Path) -> Iterator[str]:
    """Yield which shards of a checkpoint are shorter than their headers say."""
    if not (checkpoint / "state.json").exists():
        yield f"{checkpoint.name} has no state.json"
    shards = sorted(checkpoint.glob("rank-*.safetensors"))
    if not shards:
        yield f"{checkpoint.name} has no shard"
    for shard in shards:
        try:
            needed, size = _needed_bytes(shard), shard.stat().st_size
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            yield f"{checkpoint.name}/{shard.name} has no valid header ({type(error).__name__})"
            continue
        if size < needed:
            yield f"{checkpoint.name}/{shard.name} has {size:,} of {needed:,} bytes"


def _needed_bytes(shard: Path) -> int:
    """The size of a safetensors file: a length, a header in JSON, and the tensors that it lists."""
    with shard.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > LARGEST_HEADER_BYTES:
            raise ValueError
        header = json.loads(file.read(length))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return 8 + int(length) + max(ends, default=0)
