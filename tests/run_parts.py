"""Parts of the folders that runs leave: logs word for word, metrics, records, checkpoints, evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from slime_plugin.cluster.arguments import plugin_yaml
from slime_plugin.config.overrides import load_cell
from slime_plugin.record import Edit, Meta, Record, RolloutReport, StoreWriter
from slime_plugin.run.folder import RunFolder
from tests.conftest import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TRAINER = "(MegatronTrainRayActor pid=4711, ip=10.0.0.5) "
MANAGER = "\x1b[36m(RolloutManager pid=4242)\x1b[0m "
ENGINE = "(SGLangEngine pid=5018) "
CUDA_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 3.05 GiB is free. Including non-PyTorch memory, this process has 76.05 GiB memory in use. Of the "
    "allocated memory 71.52 GiB is allocated by PyTorch, and 2.71 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
ACTOR_DIED = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: MegatronTrainRayActor\n\tactor_id: 5d2a0b1cf81f6f0e6d1c2e2b01000000\n\tpid: 4711\n"
    "\tip: 10.0.0.5\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
    "detail: Worker unexpectedly exits with a connection error code 2. End of file.\n"
)
SERVER_ARGS = (
    "[2026-11-19 06:04:41] server_args={'model_path': 'weights/v00001', 'tokenizer_mode': 'auto', 'api_key': None, "
    "'mem_fraction_static': 0.7, 'watchdog_timeout': 300, 'soft_watchdog_timeout': None, 'enable_lora': False}\n"
)
ENGINE_LOG = (
    "/python/sglang/srt/layers/quantization/awq/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ currently.\n"
    "[2026-11-19 06:04:38] Cuda graph is disabled because of using torch native attention backend\n"
    "[2026-11-19 06:04:41] Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit\n"
    f"{SERVER_ARGS}"
    "[2026-11-19 06:04:52] OpenAI Responses API (/v1/responses) disabled: OpenAIServingResponses init failed "
    "(ModuleNotFoundError: No module named 'openai_harmony')\n"
    "[2026-11-19 06:05:19] Decode batch, #running-req: 1, #token: 158, token usage: 0.00, cpu graph: False, gen "
    "throughput (token/s): 112.96, #queue-req: 0\n"
    '[2026-11-19 06:05:19] INFO:     127.0.0.1:60596 - "POST /generate HTTP/1.1" 200 OK\n'
    "[2026-11-19 06:05:20] Weight version changed. old_version='2' new_version='3' num_recorded=0\n"
    "/python/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked "
    "semaphore objects to clean up at shutdown\n"
)
RAYLET = (
    "[2026-11-19 06:13:20,117 I 812 812] (raylet) main.cc:226: Setting cluster ID\n"
    "[2026-11-19 07:06:57,018 W 812 812] (raylet) node_manager.cc:628: Failed to send exit request to worker : "
    "RpcError: RPC error: Socket closed rpc_code: 14. Killing it using SIGKILL instead. worker_id=b11881e8adb40b10\n"
)


def rollout(
    name: str,
    *,
    group: str = "q0",
    reward: float | None = 0.0,
    status: str = "completed",
    edited: bool = True,
    version: str | None = "0",
    certain: bool = False,
    **report: Any,
) -> Record:
    """20 tokens of prompt, 8 sampled, of which 4 are folded away, and 8 more. Or nothing is."""
    generated = np.zeros(36, dtype=bool)
    generated[20:] = True
    stop = report.pop("stop", "answer" if status == "completed" else "turns")
    return Record(
        tokens=[(7 * i) % 400 for i in range(36)],
        generated=generated.astype(int).tolist(),
        logprobs=[(0.0 if certain else -0.1 * (i % 5 + 1)) if flag else None for i, flag in enumerate(generated)],
        views=[[(0, 28)], [(0, 20), (24, 36)]] if edited else [[(0, 36)]],
        edits=[Edit("fold", "policy")] if edited else [],
        meta=Meta(
            id=name, harness="agentfold", group=group, reward=reward, status=status, weight_version=version
        ).with_report(RolloutReport(stop=stop, **report)),
    )


def rollouts(iteration: int, number: int = 16, **changes: Any) -> list[Record]:
    """Groups of two with different rewards, unless ``reward`` is given."""
    return [
        rollout(
            f"{iteration}-q{i // 2}-{i % 2}",
            **{"group": f"q{i // 2}", "reward": float(i % 2), "version": str(iteration), **changes},
        )
        for i in range(number)
    ]


def step(number: int, iteration: int | None = None, **changes: Any) -> dict[str, Any]:
    """A line of an update in float32 on a CPU."""
    return {
        "kind": "step",
        "iteration": number if iteration is None else iteration,
        "step": number,
        "loss": 0.01,
        "entropy": 0.5,
        "reference_kl": 1e-4 * number,
        "clipped": 0.0,
        "ratio": 1.0000001,
        "grad_norm": 0.6,
        "lr": 1e-3,
        "sdcc_off": None,
        "logdiff": 4e-7,
    } | changes


def iteration(number: int, **changes: Any) -> dict[str, Any]:
    places = {"start": {"tokens": 139, "logdiff": 5.2e-7}, "fold/near": {"tokens": 61, "logdiff": 3.3e-7}}
    return {
        "kind": "iteration",
        "iteration": number,
        "rollouts": 16,
        "statuses": {"completed": 16},
        "reward": 0.5,
        "reward_std": 0.5,
        "K": 1.0,
        "edits": {"fold": 16},
        "sampled": 256,
        "trained": 256,
        "logdiff": {"mean": 4e-7, "max": 1e-5},
        "places": places,
        "calls": 16,
        "call_errors": {},
        "tool_failures": 0.0,
        "seconds": {"generate": 6.5, "total": 10.6},
        "rollout_tokens_per_second": 26.4,
        "train_tokens_per_second": 246.7,
    } | changes


def start(run: Path, number: int = 0, *, gpus: Sequence[str] = (), **changes: Any) -> None:
    """The evidence of a start; ``end`` is how it ended."""
    path = run / "evidence" / f"start-{number:05d}.json"
    path.parent.mkdir(exist_ok=True)
    evidence = {"version": 1, "time": "2026-11-19T06:13:09+00:00", "gpus": list(gpus), "log_bytes": {}}
    path.write_text(json.dumps(evidence | changes), encoding="utf-8")


def local_run(
    path: Path,
    *overrides: str,
    done: int = 3,
    planned: int = 3,
    lines: Iterable[Mapping[str, Any]] | None = None,
    records: Mapping[int, Sequence[Record]] | None = None,
    logs: Mapping[str, str] | None = None,
) -> Path:
    """What ``memorywalker train`` leaves after ``done`` of ``planned`` iterations."""
    cell = load_cell(QUICKSTART, ("harness=agentfold", f"trainer.iterations={planned}", *overrides))
    folder = RunFolder(path)
    for part in (folder.logs, folder.checkpoints, path / "weights"):
        part.mkdir(parents=True)
    folder.settings.write_text(json.dumps({"version": 1, "cell": cell.to_json(), "replay": None}), encoding="utf-8")
    if lines is None:
        lines = [line for i in range(done) for line in (step(i), iteration(i))]
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    for number, found in (records if records is not None else {i: rollouts(i) for i in range(done)}).items():
        write_store(folder.rollouts(number), found)
    for name, text in {"engine.log": ENGINE_LOG, "rank-0.log": "", "rollout.log": "", **(logs or {})}.items():
        (folder.logs / name).write_text(text, encoding="utf-8")
    if done:
        shard = folder.checkpoints / f"{done:05d}"
        shard.mkdir()
        save_file({"weight": torch.zeros(64)}, shard / "rank-00000.safetensors")
        (shard / "rank-00000.json").write_text("{}")
        (shard / "state.json").write_text(json.dumps({"version": 1, "iteration": done}))
    return path


def write_store(path: Path, records: Iterable[Record]) -> None:
    with StoreWriter(path) as store:
        for record in records:
            store.append(record)


def printed_step(number: int, **changes: float) -> str:
    """A line of slime's, from the rank that logs: sums over tokens are per rollout."""
    metrics = {
        "loss": 0.0123,
        "rollout_logdiff": 0.011,
        "drift": 0.011,
        "policy": 0.0122,
        "entropy": 0.41,
        "reference_kl": 1e-5 * number,
        "clipped": 0.0,
        "ratio": 1.0001,
        "tokens": 2048.0,
        "logdiff": 22.5,
        "signed_logdiff": 0.3,
        "k3": 0.4,
        "multiplicative_error": 2071.0,
        "above/0.0001": 2000.0,
        "start/tokens": 1024.0,
        "fold/near/tokens": 512.0,
        "fold/far/tokens": 512.0,
        "start/logdiff": 11.2,
        "fold/near/logdiff": 5.7,
        "fold/far/logdiff": 5.6,
        "leaves": 0.0,
        "leaf_kl": 0.0,
        "grad_norm": 0.31,
        "lr-pg_0": 1e-06,
        "lr-pg_1": 1e-06,
        "global_batch_size": 8,
        "step": number,
    } | {name.replace("__", "/"): value for name, value in changes.items()}
    found = {f"train/{key}": value for key, value in metrics.items()}
    return f"{TRAINER}[2026-11-19 06:20:0{number % 10}] model.py:918 - step {number}: {found}\n"


def printed_iteration(number: int, **changes: Any) -> str:
    metrics = {"rollouts": 16.0, "statuses/completed": 16.0, "reward": 0.5, "reward_std": 0.5, "K": 1.0} | {
        "edits/fold": 16.0,
        "sampled": 32768.0,
        "trained": 32768.0,
        "calls": 16.0,
        "tool_failures": 0.0,
        **changes,
    }
    found = {f"rollout/memorywalker/{key}": value for key, value in metrics.items()}
    found |= {"rollout/response_len/mean": 2048.0, "rollout/truncated_ratio": 0.0, "perf/rollout_time": 61.5}
    times = {"perf/train_time": 40.1, "perf/actor_train_time": 30.2, "perf/actor_train_tok_per_s": 1085.0}
    at = "[2026-11-19 06:19:58]"
    return (
        f"{MANAGER}{at} rollout_metrics.py:268 - perf {number}: {found}\n"
        f"{TRAINER}{at} train_metric_utils.py:401 - perf {number}: {times | {'perf/step_time': 101.6}}\n"
        f"{TRAINER}{at} memory_utils.py:48 - [Rank 0] Memory-Usage after wake_up model: {{'gpu': '0', 'total_GB': "
        "79.11, 'free_GB': 20.0, 'used_GB': 59.11, 'host_total_GB': 2015.0, 'host_available_GB': 1800.5}\n"
    )


def job(
    path: Path,
    *overrides: str,
    done: int = 3,
    planned: int = 3,
    log: str = "",
    printed: str | None = None,
    logs: Mapping[str, str] | None = None,
    saved: int | None = None,
) -> Path:
    """What a job under slime leaves: ``log`` is the end of its driver's output, ``logs`` are those of Ray's workers."""
    cell = load_cell(QUICKSTART, ("harness=agentfold", f"trainer.iterations={planned}", "trainer.steps=1", *overrides))
    hosts = path / "logs" / "20261119-061300" / "node-1"
    hosts.mkdir(parents=True)
    (path / "plugin.yaml").write_text(plugin_yaml(cell), encoding="utf-8")
    if printed is None:
        printed = "".join(printed_iteration(i) + printed_step(i) for i in range(done))
    (path / "logs" / "driver.log").write_text(f"{SERVER_ARGS}{printed}{log}", encoding="utf-8")
    for name, text in (logs or {}).items():
        (hosts / name).write_text(text, encoding="utf-8")
    (hosts / "raylet.out").write_text(RAYLET, encoding="utf-8")
    for number in range(done):
        write_store(path / f"rollout-{number:05d}.records", rollouts(number, version=str(number + 1)))
    last = done - 1 if saved is None else saved
    if last >= 0:
        checkpoint = path / "checkpoints" / f"iter_{last:07d}"
        checkpoint.mkdir(parents=True)
        for name in ("common.pt", ".metadata", "__0_0.distcp"):
            (checkpoint / name).write_bytes(b"\x00" * 64)
        (path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(last))
    return path


NAN = math.nan
