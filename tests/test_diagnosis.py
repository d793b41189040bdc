"""``memorywalker doctor RUN``: prepared runs that went wrong are recognised, and sound ones raise no alarm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_plugin.diagnosis import Diagnosis, diagnose
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.processes import locked
from tests.broken_runs import (
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
    rollout,
    rollouts,
    start,
    step,
    write_store,
)
from tests.conftest import ROOT

Prepare = Callable[[Path], Path]
TRACEBACK = "Traceback (most recent call last):\n"


def _trainer_memory(run: Path) -> Path:
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


def _logdiff_after_folds(run: Path) -> Path:
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


def _no_edits(run: Path) -> Path:
    lines = [line for i in range(3) for line in (step(i), iteration(i, K=0.0, edits={}))]
    records = {i: rollouts(i, edited=False) for i in range(3)}
    return local_run(run, "harness.threshold=3000", lines=lines, records=records)


def _truncated(run: Path) -> Path:
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


BROKEN: dict[str, tuple[Prepare, str, str]] = {
    "trainer memory": (_trainer_memory, "GPU memory", "lower trainer.batch_tokens"),
    "engine memory": (_engine_memory, "engine memory", "cluster.engine_memory"),
    "host memory": (_host_memory, "host memory", "rollout.concurrency"),
    "NCCL timeout": (_nccl_timeout, "NCCL timeout", "NCCL_DEBUG=INFO"),
    "engine gone": (_engine_gone, "engine gone", "SGLangEngine-*.err"),
    "missing key": (_missing_key, "missing key", "export the variable"),
    "shared memory": (_shared_memory, "shared memory", "--ipc=host"),
    "missing package": (_missing_package, "missing package", "memorywalker doctor on that host"),
    "not a number": (_nan_of_a_job, "not a number", "lower trainer.lr"),
    "logdiff after folds": (_logdiff_after_folds, "logdiff", "has to edit through Context"),
    "checkpoint of a job": (_checkpoint_of_a_job, "checkpoint cut off", "latest_checkpointed_iteration.txt"),
    "SDCC off": (_sdcc_off_in_a_job, "SDCC off", "method.warmup"),
    "unknown error": (_unknown_error, "an error", "--bundle"),
    "disk full": (_disk_full, "disk full", "free some space"),
    "engine killed": (_engine_killed, "engine gone", "engine.log"),
    "equal rewards": (_equal_rewards, "equal rewards", "memorywalker record show"),
    "no edits": (_no_edits, "no edits", "lower harness.threshold"),
    "truncated": (_truncated, "truncated", "raise rollout.turns"),
    "failed rollouts": (_failed_rollouts, "failed rollouts", "engine.timeout"),
    "tool failures": (_tool_failures, "tools failed", "sampled again"),
    "killed": (_killed, "ended early", "--resume"),
    "checkpoint": (_checkpoint, "checkpoint cut off", "remove "),
    "logdiff": (_logdiff, "logdiff", "memorywalker score"),
    "stale weights": (_stale_weights, "weight versions", "engine's log"),
    "reference": (_reference, "reference KL", "the same weights"),
    "ratio": (_ratio, "ratio", "slime-args"),
    "collapse": (_collapse, "collapse", "objective.kl"),
    "greedy": (_greedy, "log-probabilities of 0", "rollout.temperature=1"),
}
"""How a run is prepared, its first symptom, and a part of the remedy."""


@pytest.mark.parametrize("name", BROKEN)
def test_broken_runs_are_recognised(name: str, tmp_path: Path) -> None:
    prepare, symptom, remedy = BROKEN[name]
    found = diagnose(prepare(tmp_path / "run"))
    assert not found.ok
    first = found.symptoms[0]
    assert first.name == symptom, [(each.name, each.seen) for each in found.symptoms]
    assert remedy in first.remedy
    assert first.cause


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


def _sound_job(run: Path) -> Path:
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
    "job": _sound_job,
    "replay": _replay,
    "control": _control,
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_runs_raise_no_alarm(name: str, tmp_path: Path) -> None:
    found = diagnose(SOUND[name](tmp_path / "run"))
    assert found.ok, [(each.name, each.seen) for each in found.symptoms]


def by_name(found: Diagnosis) -> dict[str, str]:
    return {symptom.name: symptom.seen for symptom in found.symptoms}


def test_a_running_run_has_not_ended(tmp_path: Path) -> None:
    run = local_run(tmp_path / "run", done=1, planned=9)
    with locked(run):
        found = diagnose(run)
    assert found.ok
    assert by_name(found) == {"running": "the run is going: 1 of 9 iterations are trained"}
    assert [symptom.name for symptom in diagnose(run).symptoms] == ["ended early"]


def test_numbers_and_places(tmp_path: Path) -> None:
    found = diagnose(_no_edits(tmp_path / "edits"))
    assert "harness.threshold is 3000 tokens, and the longest context has 36" in found.symptoms[0].cause
    found = diagnose(_truncated(tmp_path / "truncated"))
    assert found.symptoms[0].seen == "32 of 32 rollouts are truncated, 32 of them by the limit on turns (12)"
    found = diagnose(_logdiff_after_folds(tmp_path / "logdiff"))
    assert "mean |logdiff| is 0.391 nats" in found.symptoms[0].seen
    assert "fold/near 0.82, fold/far 0.721, start 0.0109" in found.symptoms[0].seen
    found = diagnose(_trainer_memory(tmp_path / "memory"))
    name, _, line = found.symptoms[0].where.partition(":")
    text = (found.run.folder.path / name).read_text().splitlines()[int(line) - 1]
    assert text == CUDA_MEMORY
    assert [symptom.name for symptom in found.symptoms] == ["GPU memory", "rank gone", "process gone", "ended early"]


def test_the_health_of_a_job_is_that_of_a_local_run(tmp_path: Path) -> None:
    of_job = diagnose(_sound_job(tmp_path / "job")).health
    of_run = diagnose(local_run(tmp_path / "run")).health
    first, other = of_job["iterations"][0], of_run["iterations"][0]
    assert list(first) == list(other)
    assert len(of_job["iterations"]) == len(of_run["iterations"]) == 3
    assert (first["ratio"], first["reference_kl"], first["grad_norm"]) == (1.0001, 0.0, 0.31)
    assert first["logdiff"]["mean"] == pytest.approx(22.5 / 2048)
    assert first["places"]["fold/far"] == {"tokens": 512.0, "logdiff": pytest.approx(5.6 / 512)}
    assert (first["reward"], first["edits"], first["tool_failures"]) == (0.5, {"fold": 16.0}, 0.0)
    assert first["rollout_tokens_per_second"] == pytest.approx(32768 / 61.5)
    assert (first["train_tokens_per_second"], first["seconds"]) == (1085.0, 101.6)
    assert of_job["memory"]["gpu_used_bytes"] == int(59.11 * 2**30)
    assert other["logdiff"]["mean"] == 4e-7


def test_a_repeated_iteration_counts_once(tmp_path: Path) -> None:
    """A job that resumed has printed it twice; the second one was trained."""
    printed = printed_step(0) + printed_step(1, grad_norm=NAN) + printed_step(1) + printed_step(2)
    found = diagnose(job(tmp_path / "run", printed=printed))
    assert found.ok
    assert [line["step"] for line in found.run.steps] == [0, 1, 2]


def test_retried_rollouts_count_once(tmp_path: Path) -> None:
    """Those that failed with the engine are sampled again when the run is resumed, into the same store."""
    failed = rollouts(0, status="failed", stop="engine", reward=None, error="the engine has gone")
    again = [
        rollout(f"{record.meta.id}~1", group=str(record.meta.group), reward=i % 2) for i, record in enumerate(failed)
    ]
    assert diagnose(local_run(tmp_path / "run", done=1, planned=1, records={0: [*failed, *again]})).ok


def _half_metrics(run: Path) -> None:
    text = RunFolder(run).metrics.read_text()
    RunFolder(run).metrics.write_text(text[:200] + '\n[1]\n{"kind": "step"}\n' + text + '{"kind": "st')


def _half_settings(run: Path) -> None:
    (run / "run.json").write_text((run / "run.json").read_text()[:300])


def _half_store(run: Path) -> None:
    path = run / "rollout-00002.records"
    path.write_bytes(path.read_bytes()[:-40])


def _bytes_everywhere(run: Path) -> None:
    noise = bytes(range(256)) * 64
    for name in (
        "logs/engine.log",
        "rollout-00001.records",
        "metrics.jsonl",
        "evidence/start-00000.json",
        "sdcc.jsonl",
    ):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(noise)


def _folders_for_files(run: Path) -> None:
    for name in ("logs/rank-1.log", "evidence/start-00000.json", "rollout-00009.records", "checkpoints/00009"):
        (run / name).mkdir(parents=True)


@pytest.mark.parametrize("damage", [_half_metrics, _half_settings, _half_store, _bytes_everywhere, _folders_for_files])
def test_damaged_files_are_symptoms(damage: Callable[[Path], None], tmp_path: Path) -> None:
    run = local_run(tmp_path / "run")
    damage(run)
    found = diagnose(run)
    assert by_name(found).keys() & {"unreadable file", "damaged records", "checkpoint cut off"}


def test_a_damaged_job(tmp_path: Path) -> None:
    run = job(tmp_path / "run")
    (run / "plugin.yaml").write_bytes(b"\xff\xfe: [")
    (run / "logs/driver.log").write_bytes(bytes(range(256)) + b"step 3: {'train/loss': \n perf 99: {'rollout/\n")
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_bytes(b"\x00")
    assert "unreadable file" in by_name(diagnose(run))


def test_long_logs_are_read_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_plugin.diagnosis.log_text.HEAD_BYTES", 2000)
    monkeypatch.setattr("slime_plugin.diagnosis.log_text.TAIL_BYTES", 4000)
    filler = "[2026-11-19 06:05:19] Decode batch\n" * 2000
    text = f"ModuleNotFoundError: No module named 'a'\n{filler}OSError: [Errno 24] Too many open files\n"
    run = job(tmp_path / "run", done=0, logs={"RolloutManager-4242.err": f"{text}"})
    where = {symptom.name: symptom.where for symptom in diagnose(run).symptoms}
    assert where["missing package"] == "logs/20261119-061300/node-1/RolloutManager-4242.err:1"
    name, _, byte = where["open files"].partition(" at byte ")
    assert (run / name).read_bytes()[int(byte) :].startswith(b"OSError: [Errno 24]")
