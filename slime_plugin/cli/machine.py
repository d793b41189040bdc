"""What this machine has of what a run needs, one finding for each thing. Nothing heavy is imported here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
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

from slime_plugin.bridge.server.process import ServerError, check_free, free_port

GB = 1e9
NEWEST_UNSUPPORTED = (3, 10)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's table."""

    name: str
    status: Literal["ok", "warn", "missing"]
    """``missing`` is something without which a run fails; ``warn`` is something that may be meant."""
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution, as pip names it."""

    name: str
    tested: str
    """The version that the test suite runs with."""
    remedy: str
    module: str = ""
    """What it is imported as, if that is not its name."""
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
"""What every run needs."""
TENSORBOARD = Package("tensorboardX", "2.6.5", f"{_from_extra('train')}; or set tracking.tensorboard=false")
WANDB = Package("wandb", "", "pip install wandb; or set tracking.wandb=null")
ON_CUDA = (
    Package("flash-attn", "", "pip install 'memorywalker[cuda]'; the cluster image has it", "flash_attn"),
    Package("apex", "", "build it from NVIDIA's source; the cluster image has it", needed=False),
)
"""What is used only where there are GPUs. None of it could be tested without one."""

USUAL_PORTS = {30000: "SGLang's default", 6379: "Ray's default", 8265: "Ray's dashboard"}
LEAST_MEMORY, LEAST_SHARED, LEAST_DISK = 8 * GB, 2 * GB, 2 * GB
LEAST_FILES = 4096


@dataclass(frozen=True)
class Probe:
    """What a process of its own found out by importing packages, which takes seconds and may fail."""

    gpus: tuple[Mapping[str, Any], ...] = ()
    """Each with name and bytes of memory, free and in total."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Of packages that are installed and cannot be imported."""


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
    """Imports, elsewhere, those of the packages that are there. SGLang is not tried: it needs CUDA, or stand-ins."""
    present = [package for package in packages if package.name != "sglang" and _spec(package)]
    command = [sys.executable, "-c", _PROBE, *(package.imported for package in present)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
        told = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Probe(errors={"torch": f"importing took longer than {timeout:.0f} s"})
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        return Probe(errors={"torch": f"the process that imports it ended with {error}"})
    return Probe(tuple(told["gpus"]), {str(name): str(text) for name, text in told["errors"].items()})


def python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] <= NEWEST_UNSUPPORTED:
        return Finding("Python", "missing", found, "install 3.11 or newer, then PYTHON=python3.11 launch/setup.sh")
    return Finding("Python", "ok", f"{found} ({sys.prefix})")


def package(wanted: Package, probed: Probe) -> Finding:
    """Whether a package is there, can be imported, and is the one that was tested."""
    tested = f"tested with {wanted.tested}" if wanted.tested else ""
    absent: Literal["warn", "missing"] = "missing" if wanted.needed else "warn"
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        if not _spec(wanted):
            return Finding(wanted.name, absent, "not installed", wanted.remedy)
        version = ""
    if wanted.imported in probed.errors:
        return Finding(
            wanted.name,
            absent,
            f"{version} cannot be imported: {probed.errors[wanted.imported]:.200}".strip(),
            f"install it anew: {wanted.remedy}",
        )
    if not version:
        return Finding(wanted.name, "warn", f"from source, its version is unknown; {tested}".rstrip("; "))
    if wanted.tested and version.partition("+")[0] != wanted.tested:
        return Finding(wanted.name, "warn", f"{version}; {tested}", f"if something fails: {wanted.remedy}")
    return Finding(wanted.name, "ok", version)


def devices(probed: Probe) -> Finding:
    cores = len(os.sched_getaffinity(0))
    if not probed.gpus:
        return Finding("devices", "ok", f"{cores} CPU cores, no GPU: small models only, in float32")
    names = ", ".join(
        f"{gpu['name']} ({gpu['free'] / GB:.0f} of {gpu['total'] / GB:.0f} GB free)" for gpu in probed.gpus
    )
    return Finding("devices", "ok", f"{len(probed.gpus)} GPUs: {names}; {cores} CPU cores")


def memory() -> Finding:
    """What can still be had; in a container, of its own share."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    free, total = kilobytes["MemAvailable"] * 1024.0, kilobytes["MemTotal"] * 1024.0
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free, total = min(free, limit - used), min(total, limit)
    found = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    if free < LEAST_MEMORY:
        remedy = f"the quick start takes up to {LEAST_MEMORY / GB:.0f} GB; end what else is running"
        return Finding("memory", "warn", found, remedy)
    return Finding("memory", "ok", found)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Ray keeps its objects there."""
    name, remedy = str(path), f"give it {LEAST_SHARED / GB:.0f} GB (docker run --shm-size=4g), or Ray uses the disk"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding(name, "warn", f"cannot be read: {error.strerror}", remedy)
    found = f"{usage.free / GB:.1f} of {usage.total / GB:.1f} GB free"
    return Finding(name, "ok", found) if usage.free >= LEAST_SHARED else Finding(name, "warn", found, remedy)


def ports(host: str = "127.0.0.1") -> Finding:
    """Whether servers can be started. Ports that others have are no problem: a run takes free ones."""
    try:
        free = free_port(host)
    except ServerError as error:
        return Finding("ports", "missing", str(error), "allow processes to listen on the loopback interface")
    busy = [f"{port} ({whose})" for port, whose in USUAL_PORTS.items() if not _is_free(host, port)]
    found = f"free ones on {host}, such as {free}"
    if busy:
        return Finding("ports", "ok", f"{found}; in use: {', '.join(busy)}", "nothing to do, a run takes free ones")
    return Finding("ports", "ok", found)


def folder(name: str, path: Path, needed: float = 0.0) -> Finding:
    """Whether a folder, or the one it would be made in, can be written to and has space."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    shown = f"{path}" if there == path.absolute() else f"{path} (to be made in {there})"
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        remedy = "choose another one, or make it writable"
        return Finding(name, "missing", f"{shown} cannot be written to: {error.strerror}", remedy)
    found = f"{shown} is writable, {free / GB:.1f} GB free"
    if free < needed:
        return Finding(name, "warn", found, f"{needed / GB:.1f} GB are needed; free some, or choose another disk")
    return Finding(name, "ok", found)


def open_files() -> Finding:
    """Every rollout under way has its connections, and Ray many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        remedy = f"ulimit -n {LEAST_FILES} before a run (at most {most} without an administrator)"
        return Finding("open files", "warn", f"at most {soft}", remedy)
    return Finding("open files", "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def machine(probed: Probe, packages: Iterable[Package], out: Path, disk: float = LEAST_DISK) -> Iterator[Finding]:
    """All that does not depend on a configuration."""
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


def _spec(wanted: Package) -> bool:
    try:
        return importlib.util.find_spec(wanted.imported) is not None
    except ImportError:  # of the package that it is in
        return False


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there, or "max"
        return None


def _is_free(host: str, port: int) -> bool:
    try:
        check_free(host, port)
    except ServerError:
        return False
    return True
