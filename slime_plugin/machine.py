"""Check what a run needs of this machine. Nothing heavy is imported in this process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from slime_plugin.config.cell import Cell
from slime_plugin.rollout.server.ports import ServerError, check_free, free_port

GB = 1e9
FindingStatus = Literal["ok", "warn", "missing"]
"""``missing``: a run fails without it; ``warn``: it may be intended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's table."""

    name: str
    status: FindingStatus
    found: str
    remedy: str = ""

    @classmethod
    def of(cls, name: str, ok: bool, found: str, remedy: str, otherwise: FindingStatus = "warn") -> Finding:
        return cls(name, "ok", found) if ok else cls(name, otherwise, found, remedy)


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution, by its name on PyPI."""

    name: str
    tested: str
    """The version that the tests run with."""
    remedy: str
    module: str = ""
    """The name to import, if it differs."""
    needed: bool = True

    @property
    def imported(self) -> str:
        return self.module or self.name


def _from_extra(extra: str) -> str:
    return f"run launch/setup.sh, or pip install 'memorywalker[{extra}]'"


PACKAGES = (
    Package("torch", "2.13.0", _from_extra("train")),
    Package("megatron-core", "0.16.1", _from_extra("train"), "megatron.core"),
    Package("safetensors", "0.8.0", _from_extra("train")),
    Package("ray", "2.60.0", _from_extra("train")),
    Package("sglang", "0.5.23", "run launch/setup.sh; on a machine with CUDA also pip install 'memorywalker[engine]'"),
    Package("transformers", "5.22.2", _from_extra("rollout")),
    Package("tokenizers", "0.23.3", _from_extra("rollout")),
    Package("aiohttp", "3.14.5", _from_extra("rollout")),
    Package("bm25s", "0.3.16", _from_extra("rollout")),
    Package("orjson", "3.13.0", _from_extra("rollout")),
)
"""Needed by every run."""
TENSORBOARD = Package("tensorboardX", "2.6.5", f"{_from_extra('train')}; or set tracking.tensorboard=false")
WANDB = Package("wandb", "", "pip install wandb; or set tracking.wandb=null")
ON_CUDA = (
    Package("flash-attn", "", "pip install 'memorywalker[cuda]'; the cluster image has it", "flash_attn"),
    Package(
        "flash-attn-3",
        "",
        "on Hopper it is twice as fast; the cluster image has it",
        "flash_attn_interface",
        needed=False,
    ),
    Package("apex", "", "build it from NVIDIA's source; the cluster image has it", needed=False),
)
"""Used only with GPUs, and not tested without one."""

USUAL_PORTS = {30000: "SGLang's default", 6379: "Ray's default", 8265: "Ray's dashboard"}
MIN_MEMORY_BYTES, MIN_SHARED_BYTES, MIN_DISK_BYTES = 8 * GB, 2 * GB, 2 * GB
MIN_OPEN_FILES = 4096
CHECKPOINT_BYTES = 14
"""Per parameter: weights in bfloat16; in float32 those that Adam updates, and both of its moments."""
EXPORT_BYTES = 4
"""Per parameter of the weights exported for the engine, at most."""


@dataclass(frozen=True)
class Probe:
    """The result of importing packages in a subprocess, which takes seconds and may fail."""

    gpus: tuple[Mapping[str, Any], ...] = ()
    """Each with ``name``, and ``free`` and ``total`` bytes of memory."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """By module: why an installed package cannot be imported."""


_PROBE = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
errors, gpus = {}, []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        errors[name] = f"{type(error).__name__}: {error}"
if "torch" in sys.modules and "torch" not in errors:
    import torch
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            gpus.append({"name": torch.cuda.get_device_name(i), "free": free, "total": total})
print()
print(json.dumps({"gpus": gpus, "errors": errors}))
"""


def probe(packages: Iterable[Package], timeout: float = 300.0) -> Probe:
    """Import the installed packages in a subprocess. Not SGLang, which needs CUDA or stubs."""
    wanted = (*packages, *ON_CUDA)  # a wheel for another torch is there, and cannot be imported
    present = [package for package in wanted if package.name != "sglang" and _spec(package)]
    command = [sys.executable, "-c", _PROBE, *(package.imported for package in present)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Probe(errors={"torch": f"importing took longer than {timeout:.0f} s"})
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        return Probe(errors={"torch": f"the process that imports it ended with {error}"})
    return Probe(tuple(result["gpus"]), result["errors"])


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    remedy = "install 3.11 or newer, then PYTHON=python3.11 launch/setup.sh"
    return Finding.of("Python", sys.version_info >= (3, 11), f"{version} ({sys.prefix})", remedy, "missing")


def package(wanted: Package, probed: Probe) -> Finding:
    """Whether a package is installed, can be imported, and has the tested version."""
    tested = f"tested with {wanted.tested}" if wanted.tested else ""
    absent: FindingStatus = "missing" if wanted.needed else "warn"
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        if not _spec(wanted):
            return Finding(wanted.name, absent, "not installed", wanted.remedy)
        version = ""
    if error := probed.errors.get(wanted.imported):
        found = f"{version} cannot be imported: {error:.200}".strip()
        return Finding(wanted.name, absent, found, f"reinstall it: {wanted.remedy}")
    if not version:
        return Finding(wanted.name, "warn", f"from source, its version is unknown; {tested}".rstrip("; "))
    if wanted.tested and version.partition("+")[0] != wanted.tested:
        return Finding(wanted.name, "warn", f"{version}; {tested}", f"if something fails: {wanted.remedy}")
    return Finding(wanted.name, "ok", version)


def devices(probed: Probe) -> Finding:
    cores = len(os.sched_getaffinity(0))
    if not probed.gpus:
        return Finding("devices", "ok", f"{cores} CPU cores, no GPU: small models only, in float32")
    names = ", ".join(f"{gpu['name']} ({_of_gb(gpu['free'], gpu['total'], 0)})" for gpu in probed.gpus)
    return Finding("devices", "ok", f"{len(probed.gpus)} GPUs: {names}; {cores} CPU cores")


def memory() -> Finding:
    """Available memory; in a container, within its limit."""
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # no control group, or its limit is "max"
        limit, used = (int((Path("/sys/fs/cgroup") / f"memory.{key}").read_text()) for key in ("max", "current"))
        free, total = min(free, limit - used), min(total, limit)
    remedy = f"the quick start takes up to {MIN_MEMORY_BYTES / GB:.0f} GB; stop other programs"
    return Finding.of("memory", free >= MIN_MEMORY_BYTES, _of_gb(free, total), remedy)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Ray's object store."""
    remedy = f"give it {MIN_SHARED_BYTES / GB:.0f} GB (docker run --shm-size=4g), or Ray uses the disk"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding(str(path), "warn", f"cannot be read: {error.strerror}", remedy)
    return Finding.of(str(path), usage.free >= MIN_SHARED_BYTES, _of_gb(usage.free, usage.total), remedy)


def ports(host: str = "127.0.0.1") -> Finding:
    """Whether servers can be started. Used ports are no problem: a run takes free ones."""
    try:
        free = free_port(host)
    except ServerError as error:
        return Finding("ports", "missing", str(error), "allow processes to listen on the loopback interface")
    busy = []
    for port, use in USUAL_PORTS.items():
        try:
            check_free(host, port)
        except ServerError:
            busy.append(f"{port} ({use})")
    found = f"free ones on {host}, such as {free}"
    if busy:
        return Finding("ports", "ok", f"{found}; in use: {', '.join(busy)}", "nothing to do, a run takes free ones")
    return Finding("ports", "ok", found)


def folder(name: str, path: Path, needed: float = 0.0) -> Finding:
    """Whether a folder, or the one that it would be created in, is writable and has ``needed`` bytes free."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    shown = f"{path}" if existing == path.absolute() else f"{path} (to be created in {existing})"
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        remedy = "choose another one, or make it writable"
        return Finding(name, "missing", f"{shown} cannot be written to: {error.strerror}", remedy)
    remedy = f"{needed / GB:.1f} GB are needed; free some, or choose another disk"
    return Finding.of(name, free >= needed, f"{shown} is writable, {free / GB:.1f} GB free", remedy)


def disk_needed(cell: Cell | None) -> float:
    """Bytes for the checkpoints that are kept, the one being written, and two versions of exported weights."""
    if cell is None or cell.model is None:
        return MIN_DISK_BYTES
    weights = sum(path.stat().st_size for path in cell.model.glob("*.safetensors"))
    parameters = weights / 2  # bfloat16, as Qwen3 is published
    saved = min(cell.trainer.keep, cell.trainer.iterations // cell.trainer.save_every + 1) + 1
    return MIN_DISK_BYTES + parameters * (CHECKPOINT_BYTES * saved + EXPORT_BYTES * 2)


def open_files() -> Finding:
    """Every rollout has its connections, and Ray many more."""
    soft, hard = (math.inf if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    most = "unlimited" if hard == math.inf else str(hard)
    remedy = f"ulimit -n {MIN_OPEN_FILES} before a run (at most {most} without an administrator)"
    return Finding.of(
        "open files", soft >= MIN_OPEN_FILES, "unlimited" if soft == math.inf else f"at most {soft}", remedy
    )


def machine(probed: Probe, packages: Iterable[Package], out: Path, disk: float = MIN_DISK_BYTES) -> Iterator[Finding]:
    """Yield the findings that do not depend on a configuration."""
    yield python()
    for wanted in (*packages, *(ON_CUDA if probed.gpus else ())):
        yield package(wanted, probed)
    yield devices(probed)
    yield memory()
    yield shared_memory()
    yield ports()
    yield open_files()
    yield folder("current folder", Path("."))
    yield folder("run folder", out, disk)


def _of_gb(free: float, total: float, digits: int = 1) -> str:
    return f"{free / GB:.{digits}f} of {total / GB:.{digits}f} GB free"


def _spec(wanted: Package) -> bool:
    try:
        return importlib.util.find_spec(wanted.imported) is not None
    except ImportError:  # of the package that it is in
        return False
