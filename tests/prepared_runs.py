"""Runs that went wrong, with the symptom that comes first, and sound ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ROOT
from tests.run_parts import (
    ACTOR_DIED,
    CUDA_MEMORY,
    ENGINE,
    ENGINE_LOG,
    MANAGER,
    NAN,
    TRAINER,
    iteration,
    job,
    local_run,
    printed_iteration,
    printed_step,
    rollouts,
    start,
    step,
    write_store,
)

Prepare = Callable[[Path], Path]
TRACEBACK = "Traceback (most recent call last):\n"


def trainer_memory(run: Path) -> Path:
    log = (
        f'{TRACEBACK}  File "train.py", line 88, in train\n    ray.get(actor_model.async_train(rollout_id, data))\n'
        "ray.exceptions.RayTaskError(OutOfMemoryError): \x1b[36mray::MegatronTrainRayActor.train()\x1b[39m (pid=4711, "
        f'ip=10.0.0.5)\n  File "model.py", line 700, in train_one_step\n{CUDA_MEMORY}\n{ACTOR_DIED}'
    )
    other = (
        f"[rank3]: {TRACEBACK}RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by "
        "peer [10.0.0.5]:27214\n"
    )
    return job(run, done=1, log=log, logs={"MegatronTrainRayActor-4713.err": other})


def _engine_memory(run: Path) -> Path:
    log = (
        f"{ENGINE}[2026-11-19 06:14:02 TP0] Scheduler hit an exception: {TRACEBACK}"
        f"{ENGINE}RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
        f"mem_fraction_static=0.3\n{ENGINE}[2026-11-19 06:14:03] Received sigquit from a child process. It usually "
        f"means the child failed.\n{ACTOR_DIED}"
    )
    return job(run, done=0, log=log)


def _host_memory(run: Path) -> Path:
    log = (
        f"{TRACEBACK}ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.0.0.5, ID: 8d1f) was 478.95GB used / 503.28GB limit (0.951657)\n" + ACTOR_DIED
    )
    return job(run, done=2, log=log)


def _nccl_timeout(run: Path) -> Path:
    line = (
        "[rank3]:[E1119 06:33:09.481 ProcessGroupNCCL.cpp:683] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=118, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600051 milliseconds "
        "before timing out.\n"
    )
    return job(run, done=2, log=TRAINER + line + ACTOR_DIED, logs={"MegatronTrainRayActor-4713.err": line})


def _engine_gone(run: Path) -> Path:
    log = (
        f"{ENGINE}[2026-11-19 06:30:11] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
        f"{MANAGER}[2026-11-19 06:30:42] health_monitor.py:153 - Health check failed for rollout engine 1 (ray timeout "
        "or error). Killing actor. Exception: The actor died unexpectedly before finishing this task.\n"
    )
    return job(run, done=2, log=log)


def _missing_key(run: Path) -> Path:
    log = (
        "Error: tools.0.backend: the environment variable DASHSCOPE_API_KEY is not set; it has to hold the service's "
        "key\n"
    )
    return job(run, done=0, log=log)


def _shared_memory(run: Path) -> Path:
    line = f"{TRACEBACK}RuntimeError: unable to open shared memory object </torch_4711_2> in read-write mode\n"
    return job(run, done=0, log=ACTOR_DIED, logs={"RolloutManager-4242.err": line})


def _missing_package(run: Path) -> Path:
    return job(run, done=0, log=f"{TRAINER}ModuleNotFoundError: No module named 'transformer_engine'\n{ACTOR_DIED}")


def _nan_of_a_job(run: Path) -> Path:
    printed = printed_step(0) + printed_step(1, grad_norm=NAN, loss=NAN) + printed_step(2, grad_norm=NAN, loss=NAN)
    return job(run, printed=printed)


def logdiff_after_folds(run: Path) -> Path:
    far = {"logdiff": 800.0, "fold__near__logdiff": 420.0, "fold__far__logdiff": 369.0}
    return job(run, printed="".join(printed_iteration(i) + printed_step(i, **far) for i in range(3)))


def _checkpoint_of_a_job(run: Path) -> Path:
    job(run, done=2, planned=9)
    (run / "checkpoints/iter_0000001/__0_0.distcp").write_bytes(b"")
    return run


def _sdcc_off_in_a_job(run: Path) -> Path:
    job(run, "method=sdcc")
    states: list[dict[str, object]] = [{"iteration": i, "steps": 3, "why_off": None, "diverged": 0} for i in range(2)]
    states.append(
        {**states[0], "iteration": 2, "why_off": "mean KL per leaf 14.2 where 10 is the limit in 3 steps in a row"}
    )
    (run / "sdcc.jsonl").write_text("".join(f"{json.dumps(state)}\n" for state in states) + '{"iterat')
    return run


def _unknown_error(run: Path) -> Path:
    log = f'{TRACEBACK}  File "rollout.py", line 453, in generate\nAssertionError: Got 14 samples, expected 16\n'
    return job(run, done=1, log=log)


def _disk_full(run: Path) -> Path:
    local_run(run, done=1)
    (run / "checkpoints/00002.part").mkdir()
    error = (
        "MemoryWalkerError: runs/a/checkpoints/00002.part: cannot be written: Error while serializing: I/O error: No "
        "space left on device (os error 28); free some space or make the folder writable, and continue with --resume"
    )
    start(run, end={"how": "failed", "error": error})
    return run


def _engine_killed(run: Path) -> Path:
    local_run(run, done=1)
    error = "ServerError: the engine (process 5918) has exited; see runs/a/logs/engine.log, and continue with --resume"
    start(run, end={"how": "failed", "error": error})
    return run


def _equal_rewards(run: Path) -> Path:
    lines = [line for i in range(3) for line in (step(i, grad_norm=0.0), iteration(i, reward=0.0, reward_std=0.0))]
    return local_run(run, lines=lines, records={i: rollouts(i, reward=0.0) for i in range(3)})


def no_edits(run: Path) -> Path:
    lines = [line for i in range(3) for line in (step(i), iteration(i, K=0.0, edits={}))]
    records = {i: rollouts(i, edited=False) for i in range(3)}
    return local_run(run, "harness.threshold=3000", lines=lines, records=records)


def truncated(run: Path) -> Path:
    return local_run(run, records={i: rollouts(i, status="truncated", stop="turns") for i in range(3)})


def _failed_rollouts(run: Path) -> Path:
    error = (
        "the engine at http://10.0.0.9:30000 did not answer a turn of 0-q0-1 in 9 attempts; the last one: "
        "ServerDisconnectedError. See its log; engine.retries and engine.timeout set how long to wait for it"
    )
    bad = rollouts(1, status="failed", stop="engine", reward=None, error=error)
    return local_run(run, records={0: rollouts(0), 1: bad})


def _tool_failures(run: Path) -> Path:
    local_run(run, done=1)
    store = run / "rollout-00001.attempt-1.records"
    write_store(store, rollouts(1, calls=4, call_errors=2, error_kinds={"key": 2}))
    error = (
        "MemoryWalkerError: iteration 1: 32 of 64 tool calls failed for no fault of the policy (key 32): 50%, over "
        "rollout.max_tool_failures 0.3; the service refuses the API key: see its account, then resume; its rollouts "
        f"are in {store}"
    )
    start(run, end={"how": "failed", "error": error})
    return run


def _killed(run: Path) -> Path:
    local_run(run, done=2, planned=50)
    start(run)
    return run


def _killed_job(run: Path) -> Path:
    return job(run, done=2, planned=50)


def _checkpoint(run: Path) -> Path:
    local_run(run, done=2, planned=9)
    shard = run / "checkpoints/00002/rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    return run


def _logdiff(run: Path) -> Path:
    places = {"start": {"tokens": 139, "logdiff": 0.41}, "fold/near": {"tokens": 61, "logdiff": 0.39}}
    other = {"logdiff": {"mean": 0.4, "max": 3.1}, "places": places}
    local_run(run, lines=[line for i in range(3) for line in (step(i, logdiff=0.4), iteration(i, **other))])
    start(run, end={"how": "finished"})
    return run


def _stale_weights(run: Path) -> Path:
    return local_run(run, records={i: rollouts(i, version="0") for i in range(3)})


def _reference(run: Path) -> Path:
    return local_run(run, lines=[line for i in range(3) for line in (step(i, reference_kl=0.7), iteration(i))])


def _ratio(run: Path) -> Path:
    return local_run(run, lines=[line for i in range(3) for line in (step(i, ratio=1.4), iteration(i))])


def _collapse(run: Path) -> Path:
    lines = []
    for i in range(20):
        lines += [step(i, entropy=0.6 * 0.8**i), iteration(i, reward=0.8 - 0.03 * i)]
    return local_run(run, done=20, planned=20, lines=lines)


def _greedy(run: Path) -> Path:
    return local_run(run, records={i: rollouts(i, certain=True) for i in range(3)})


def _weights_that_are_nan(run: Path) -> Path:
    """What a learning rate of 1e30 leaves: the engine answers with null for every log-probability."""
    error = (
        "the engine at http://127.0.0.1:34623 answered a turn of 1-q0-0 with no ids and log-probabilities (float() "
        "argument must be a string or a real number, not 'NoneType'); that cannot be recorded. See its log, and check "
        "that its version is the one in requirements.sglang"
    )
    bad = rollouts(1, status="failed", stop="engine", reward=None, error=error)
    lines = [step(0), iteration(0), step(1, 0, grad_norm=None)]
    log = f"2026-11-19 06:50:49,769 WARNING rollout 1-q0-0 failed: {error}\n"
    local_run(run, done=1, lines=lines, records={0: rollouts(0), 1: bad}, logs={"rollout.log": log})
    last = f"MemoryWalkerError: all 16 rollouts were aborted or failed; the first is failed: {error}"
    start(run, end={"how": "failed", "error": last, "is_bug": False})
    return run


def _verification_failed(run: Path) -> Path:
    local_run(run)
    found = {"path": "runs/verify-run/verify.json", "time": "now", "ok": False, "verdict": "9 passed; 1 failed: rope"}
    start(run, end={"how": "finished"}, verification=found)
    return run


BROKEN: dict[str, tuple[Prepare, str, str]] = {
    "trainer memory": (trainer_memory, "GPU memory", "lower trainer.batch_tokens"),
    "engine memory": (_engine_memory, "engine memory", "cluster.engine_memory"),
    "host memory": (_host_memory, "host memory", "rollout.concurrency"),
    "NCCL timeout": (_nccl_timeout, "NCCL timeout", "NCCL_DEBUG=INFO"),
    "engine gone": (_engine_gone, "engine gone", "SGLangEngine-*.err"),
    "missing key": (_missing_key, "missing key", "export the variable"),
    "shared memory": (_shared_memory, "shared memory", "--ipc=host"),
    "missing package": (_missing_package, "missing package", "memorywalker doctor on that host"),
    "not a number": (_nan_of_a_job, "not a number", "lower trainer.lr"),
    "weights that are NaN": (_weights_that_are_nan, "not a number", "lower trainer.lr"),
    "logdiff after folds": (logdiff_after_folds, "logdiff", "has to edit through Context"),
    "checkpoint of a job": (_checkpoint_of_a_job, "checkpoint cut off", "latest_checkpointed_iteration.txt"),
    "SDCC off": (_sdcc_off_in_a_job, "SDCC off", "method.warmup"),
    "unknown error": (_unknown_error, "an error", "--bundle"),
    "disk full": (_disk_full, "disk full", "free some space"),
    "engine killed": (_engine_killed, "engine gone", "engine.log"),
    "verification failed": (_verification_failed, "verification failed", "verify.html"),
    "equal rewards": (_equal_rewards, "equal rewards", "memorywalker record show"),
    "no edits": (no_edits, "no edits", "lower harness.threshold"),
    "truncated": (truncated, "truncated", "raise rollout.turns"),
    "failed rollouts": (_failed_rollouts, "failed rollouts", "engine.timeout"),
    "tool failures": (_tool_failures, "tools failed", "sampled again"),
    "killed": (_killed, "ended early", "--resume"),
    "killed job": (_killed_job, "ended early", "the same launch command"),
    "checkpoint": (_checkpoint, "checkpoint cut off", "remove "),
    "logdiff": (_logdiff, "logdiff", "memorywalker score"),
    "stale weights": (_stale_weights, "weight versions", "engine's log"),
    "reference": (_reference, "reference KL", "the same weights"),
    "ratio": (_ratio, "ratio", "slime-args"),
    "collapse": (_collapse, "collapse", "objective.kl"),
    "greedy": (_greedy, "log-probabilities of 0", "rollout.temperature=1"),
}
"""How a run is prepared, its first symptom, and a part of the remedy."""


def _fixture(run: Path) -> Path:
    shutil.copytree(ROOT / "tests/fixtures/v0_6_0/train", run)
    return run


def _resumed(run: Path) -> Path:
    """The engine of the first start was out of memory; the second is going on."""
    crash = f"{ENGINE_LOG}{CUDA_MEMORY}\n[2026-11-19 06:14:03] Received sigquit from a child process.\n"
    local_run(run, done=2, planned=9, logs={"engine.log": crash + ENGINE_LOG})
    start(run, 0, end={"how": "failed", "error": "ServerError: the engine (process 5918) has exited; see engine.log"})
    start(run, 1, log_bytes={"engine.log": len(crash)}, end={"how": "interrupted"})
    return run


def _resumed_to_its_end(run: Path) -> Path:
    """Of a version that left no evidence."""
    return local_run(run, logs={"engine.log": f"{ENGINE_LOG}{CUDA_MEMORY}\n{ENGINE_LOG}"})


def _naive_compressed(run: Path) -> Path:
    other = {"logdiff": {"mean": 0.62, "max": 9.1}, "places": {"fold/near": {"tokens": 61, "logdiff": 1.9}}}
    lines = [line for i in range(3) for line in (step(i, logdiff=0.62), iteration(i, **other))]
    return local_run(run, "method=naive_compressed", lines=lines)


def _small(run: Path) -> Path:
    """By chance, all rollouts fail alike, and none is long enough for an edit."""
    records = {0: rollouts(0, 4, reward=0.0, edited=False, status="truncated", stop="turns")}
    return local_run(run, done=1, planned=1, records=records, lines=[step(0, grad_norm=0.0), iteration(0, K=0.0)])


def sound_job(run: Path) -> Path:
    return job(run, logs={"SGLangEngine-5018.err": ENGINE_LOG, "MegatronTrainRayActor-4711.err": printed_step(0)})


def _replay(run: Path) -> Path:
    other = {"logdiff": {"mean": 5.3, "max": 11.0}}
    local_run(run, lines=[line for i in range(3) for line in (step(i), iteration(i, **other))])
    settings = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(settings | {"replay": "runs/other"}))
    return run


def _control(run: Path) -> Path:
    """Search-R1 edits nothing, by design."""
    records = {i: rollouts(i, edited=False) for i in range(3)}
    return local_run(run, "harness=search_r1", records=records)


SOUND: dict[str, Prepare] = {
    "version 0.6": _fixture,
    "resumed": _resumed,
    "resumed to its end": _resumed_to_its_end,
    "naive_compressed": _naive_compressed,
    "small": _small,
    "job": sound_job,
    "replay": _replay,
    "control": _control,
}
