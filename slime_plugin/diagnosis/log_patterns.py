"""What the programs of a run log when something goes wrong, with the most likely cause and a remedy.

The texts are those of PyTorch, NCCL, gloo, Ray, SGLang, Megatron, slime and this package. To add one: a row here, and a
prepared folder in ``tests/prepared_runs.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slime_plugin.diagnosis.symptom import CAUSE, CONSEQUENCE, SIGN, Severity

ENGINE = r"(?i)sglang|\bengine"
"""The file or the line is of an engine."""
HARMLESS = re.compile(r"Ignore import error|\(ModuleNotFoundError|/v1/responses\) disabled")
"""What programs log about optional parts of theirs, whatever else is in the line."""
RESUME = "then resume"


@dataclass(frozen=True, slots=True)
class LogPattern:
    """A line matches if it holds one of the ``needles``, and the expressions where there are some."""

    name: str
    needles: tuple[str, ...]
    cause: str
    remedy: str
    severity: Severity = "error"
    rank: int = CAUSE
    regex: str = ""
    """Something that the line also has."""
    source: str = ""
    """Something that the name of the log, or the line, also has."""

    def matches(self, log: str, line: str) -> bool:
        if not any(needle in line for needle in self.needles):
            return False
        return _has(self.regex, line) and _has(self.source, f"{log} {line}")


LOG_PATTERNS = (
    LogPattern(
        "engine memory",
        ("CUDA out of memory", "CUDA error: out of memory", "Please try to increase --mem-fraction-static"),
        "the engine has too little GPU memory: cluster.engine_memory leaves too little for its weights and KV cache, "
        "or the trainer of a colocated job has not freed enough",
        f"change cluster.engine_memory (higher if the KV cache does not fit, lower if an allocation beside it fails), "
        f"or lower rollout.context_tokens; memorywalker plan CONFIG computes both, {RESUME}",
        source=ENGINE,
    ),
    LogPattern(
        "GPU memory",
        ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "torch.OutOfMemoryError"),
        "a training rank needs more GPU memory than there is, mostly for the activations of a long row",
        f"lower trainer.batch_tokens, set trainer.recompute, raise trainer.tp or trainer.cp, or give mask4d a "
        f"method.budget; memorywalker plan CONFIG computes the memory, {RESUME}",
    ),
    LogPattern(
        "host memory",
        (
            "due to the node running low on memory",
            "Memory on the node (IP",
            "DefaultCPUAllocator: can't allocate memory",
            "Cannot allocate memory",
            "oom_kill",
            "oom-kill",
            "Out of memory: Killed process",
            "std::bad_alloc",
            "ArrayMemoryError",
        ),
        "the machine, or the container, ran out of memory",
        f"lower rollout.concurrency, harness.processes or trainer.batch_tokens, or use a machine with more, {RESUME}",
    ),
    LogPattern(
        "shared memory",
        ("unable to open shared memory object", "Bus error", "ObjectStoreFullError", "unable to mmap"),
        "/dev/shm is too small for Ray's object store or NCCL",
        f"docker run --ipc=host, or --shm-size=16g, {RESUME}",
    ),
    LogPattern(
        "disk full",
        (
            "No space left on device",
            "Disk quota exceeded",
            "OutOfDiskError",
            "Object creation will fail if spilling is required",
            "object creation will fail if spilling is required",
        ),
        "the disk of the run folder, or of Ray's temporary folder, is full",
        f"free some space, lower trainer.keep, or set TMPDIR to a larger disk, {RESUME}; complete checkpoints and "
        "records are intact",
    ),
    LogPattern(
        "missing key",
        ("is not set; it has to hold the service's key", "api_key not configured", "No API key configured"),
        "the key of a service is not in the environment of the process that needs it",
        "export the variable where the job is started (docs/cluster.md: key_variable and PASS_ENV), and check it with "
        "memorywalker doctor CONFIG",
    ),
    LogPattern(
        "tools failed in an evaluation",
        ("says little about the policy",),
        "a tool did not work while the policy was evaluated, so that the evaluation is too low",
        "do what the line says, and evaluate again (launch/eval.sh)",
        severity="warning",
    ),
    LogPattern(
        "tools failed",
        ("tool calls failed for no fault of the policy",),
        "a tool does not work: its key is refused, its service is down or limits the rate, or its calls time out",
        f"do what the line says, {RESUME}: the iteration is sampled again",
    ),
    LogPattern(
        "all rollouts failed",
        ("rollouts were aborted or failed; the first is",),
        "no rollout of an iteration could be trained: the engine, the agent's program or a tool fails every time",
        f"see the error that the line ends with, and memorywalker record list RUN, {RESUME}",
        rank=SIGN,
    ),
    LogPattern(
        "no log-probabilities",
        ("no ids and log-probabilities", "tokens and log-probabilities of"),
        "the engine's answers hold no log-probability per sampled token, or not a number: weights that are not finite, "
        "another server, a proxy that changes answers, or another version of SGLang",
        "look at loss and grad_norm of the last steps; use the version in requirements.sglang, started by this package",
        rank=SIGN,
    ),
    LogPattern(
        "weights not taken",
        ("did not take the weights in", "refuses the weights in"),
        "the engine cannot be reached at engine.url, or cannot read the run's folder",
        "start it with memorywalker engine, check engine.url, and give it the folder under the same path",
    ),
    LogPattern(
        "context longer than the engine's",
        ("If that is too long for it, lower rollout.context_tokens", "fewer than --context-length"),
        "rollout.context_tokens is more than the engine can hold",
        "lower rollout.context_tokens, or give the engine more memory (cluster.engine_memory)",
        severity="warning",
    ),
    LogPattern(
        "checkpoint unreadable",
        (
            "to resume from the checkpoint before it",
            "PytorchStreamReader failed",
            "Error while deserializing header",
            "is not a distributed checkpoint",
        ),
        "a checkpoint is incomplete: the disk was full or the machine stopped while it was written",
        "remove that checkpoint, so that the one before it is taken; under slime write its number into "
        f"checkpoints/latest_checkpointed_iteration.txt, {RESUME}",
    ),
    LogPattern(
        "not a number",
        ("found NaN in local", "found Inf in local", "Unexpected result nan", "Unexpected result inf"),
        "the loss or a gradient became infinite or NaN",
        "lower trainer.lr or trainer.clip_grad, and look at logdiff and ratio in the steps before; resume from a "
        "checkpoint before them",
    ),
    LogPattern(
        "GPU fault",
        (
            "device-side assert triggered",
            "an illegal memory access was encountered",
            "uncorrectable ECC error",
            "NVRM: Xid",
            "CUDA error: unspecified launch failure",
        ),
        "a kernel failed, or the GPU is defective",
        "if it is always the same host, leave it out; else run with CUDA_LAUNCH_BLOCKING=1 to see the kernel",
    ),
    LogPattern(
        "CUDA does not fit",
        ("no kernel image is available", "CUDA driver version is insufficient", "undefined symbol"),
        "PyTorch, or a package built against it, was made for another GPU, driver or version of PyTorch",
        "use the image of docker/slime.Dockerfile, or rebuild that package; memorywalker doctor shows the versions",
    ),
    LogPattern(
        "missing package",
        ("ModuleNotFoundError: No module named",),
        "a package is not installed on the host that logged it, or another Python is used there",
        "memorywalker doctor on that host; for slime and Megatron-LM set SLIME_DIR and MEGATRON_DIR",
    ),
    LogPattern(
        "versions differ between hosts",
        ("Version mismatch: The cluster was started with",),
        "a host has another version of Python or Ray than the first",
        "give all hosts the same image or environment",
    ),
    LogPattern(
        "model not found",
        ("We couldn't connect to 'https://huggingface.co'", "LocalEntryNotFoundError", "OfflineModeIsEnabled"),
        "a model or tokenizer is not on the disk, and nothing is downloaded during a run",
        "name a folder with a complete checkpoint (model, cluster.megatron)",
    ),
    LogPattern(
        "port taken",
        ("Address already in use", "address already in use"),
        "another program, often an earlier job, listens on a port that this one needs",
        "end it, or set RAY_PORT; a run takes free ports otherwise",
    ),
    LogPattern(
        "open files",
        ("Too many open files",),
        "the limit on open files is too low for the connections of the rollouts",
        f"ulimit -n 65536 before the start, or lower rollout.concurrency, {RESUME}",
    ),
    LogPattern(
        "not permitted",
        ("Permission denied", "Read-only file system"),
        "a file or folder belongs to another user, or is read-only",
        "see the path in the line; containers often run as another user",
        regex=r"Errno 13|Errno 30|os error 13|os error 30|cannot be written",
    ),
    LogPattern(
        "refused at the start",
        ("Error: ",),
        "the configuration, the command line or the machine does not fit, and nothing was started",
        "do what the line says; memorywalker doctor CONFIG checks the rest",
        regex=r"^Error: ",
        source=r"^logs/driver\.log",
        rank=SIGN,
    ),
    LogPattern(
        "engine gone",
        (
            ") has exited; see",
            "Scheduler hit an exception",
            "SIGQUIT received.",
            "Received sigquit from a child process",
            "Scheduler watchdog timeout",
            "Triggering SIGQUIT for cleanup",
            "Health check failed for rollout engine",
            "Health check failed. Server couldn't get a response",
        ),
        "an engine crashed, was killed, or hangs",
        f"see the last lines of its log (engine.log, or SGLangEngine-*.err) for the reason, {RESUME}",
        regex=r"the engine \(process|(?i:scheduler|sigquit|health check)",
        rank=SIGN,
    ),
    LogPattern(
        "engine silent",
        ("did not answer a turn of", "rollouts in a row failed; the last", "Max retries ("),
        "the engine did not answer in time: it is overloaded, hangs, or cannot be reached",
        "see its log and GPU; lower rollout.concurrency, or raise engine.timeout and engine.retries; behind a proxy, "
        f"except the hosts of the job (no_proxy), {RESUME}",
        rank=SIGN,
    ),
    LogPattern(
        "NCCL timeout",
        ("Watchdog caught collective operation timeout", "Timed out initializing process group", "Socket Timeout"),
        "a rank waited for another one that has failed, hangs, or is much slower; or the network between hosts is bad",
        "look for an earlier error of another rank; with none, set NCCL_DEBUG=INFO, check NCCL_SOCKET_IFNAME and "
        f"NCCL_IB_HCA, {RESUME}",
        rank=SIGN,
    ),
    LogPattern(
        "NCCL error",
        ("ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclRemoteError", "NCCL error in:"),
        "NCCL could not connect the GPUs, or a rank has gone",
        f"set NCCL_DEBUG=INFO and read its first warning; in a container, --ipc=host and --ulimit memlock=-1, {RESUME}",
        rank=SIGN,
    ),
    LogPattern(
        "rank gone",
        ("Connection closed by peer", "Connection reset by peer", "Timed out waiting"),
        "another rank has ended, so that this one could not go on",
        f"look for the first error in the logs of the other ranks, {RESUME}",
        regex=r"gloo|Gloo|for (recv|send) operation",
        rank=CONSEQUENCE,
    ),
    LogPattern(
        "process gone",
        ("The actor died unexpectedly", "ActorDiedError", "The node died", "WorkerCrashedError", ") has exited; see"),
        "a process was killed: by the kernel for want of memory, by a signal, or with its node",
        f"dmesg shows whether the kernel killed it; see the log of that process, {RESUME}",
        rank=CONSEQUENCE,
    ),
    LogPattern(
        "KV cache full",
        ("KV cache pool is full. Retract requests.",),
        "more tokens are in flight than the engine's KV cache holds, so that rollouts are computed twice",
        "lower rollout.concurrency, or raise cluster.engine_memory",
        severity="info",
    ),
    LogPattern(
        "slow object store",
        ("The object store is using",),
        "/dev/shm is small, so Ray keeps its objects on the disk",
        "docker run --ipc=host, or --shm-size=16g",
        severity="info",
    ),
)
"""Where several match the same line, the first counts."""


def pattern_of(log: str, line: str) -> LogPattern | None:
    """Return the first pattern that a line matches."""
    if HARMLESS.search(line):
        return None
    return next((pattern for pattern in LOG_PATTERNS if pattern.matches(log, line)), None)


def needles() -> Iterator[str]:
    yield from dict.fromkeys(needle for pattern in LOG_PATTERNS for needle in pattern.needles)


def _has(regex: str, text: str) -> bool:
    return not regex or re.search(regex, text) is not None
