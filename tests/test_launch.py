"""The launch scripts: what they say, and that what they start is a Ray cluster and ends again, whatever happens.

Hosts are addresses of this machine, reached by a stand-in for ssh; Ray on them is real. slime's driver has a stand-in
that looks at the cluster from inside and waits to be told how to end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from slime_plugin.cluster.flags import check_command_line
from slime_plugin.run.processes import descendants, is_alive, start_ticks, terminate
from tests.cli import run
from tests.conftest import ROOT

SCRIPTS = [
    f"launch/{name}"
    for name in ("train.sh", "cluster.sh", "eval.sh", "replay.sh", "prepare.sh", "slurm.sbatch", "verify.sh")
]
CELLS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs" / "cells").glob("*.yaml"))
CELL = "configs/cells/agentfold-mask4d.yaml"
HOSTS = "-127.0.0.1,127.0.0.2"
SECRETS = {
    "WANDB_API_KEY": "secret-of-wandb",
    "DASHSCOPE_API_KEY": "secret-of-dashscope",
    "FIRECRAWL_API_KEY": "secret-3",
}

EXPANDABLE = "SLIME_ENABLE_EXPANDABLE_SEGMENTS"
DRIVER = """
import contextlib, json, os, pathlib, sys, time
import ray

ray.init(log_to_driver=False)

@ray.remote(num_gpus=8)
class Rank:
    def look(self):
        print("here I am", flush=True)
        names = json.loads(os.environ["LOOK_FOR"])
        return {"host": ray.util.get_node_ip_address(), "environment": {name: os.environ.get(name) for name in names}}

ranks = [Rank.remote() for _ in range(int(os.environ["RANKS"]))]
here = ray.get([rank.look.remote() for rank in ranks])
lines = b""
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):  # gone while we looked
        lines += path.read_bytes()
report = pathlib.Path(os.environ["REPORT"])
shown = [name for name in json.loads(os.environ["SECRET"]) if os.environ[name].encode() in lines]
draft = report.with_suffix(".part")
draft.write_text(json.dumps({"pid": os.getpid(), "words": sys.argv[1:], "ranks": here, "shown": shown}))
draft.rename(report)
print("the driver's output", flush=True)
while not report.with_name("go").exists():
    time.sleep(0.1)
sys.exit(7)
"""

REMOTE_SHELL = """\
#!/usr/bin/env bash
# HOST COMMAND...: like ssh, with none of the environment of who calls it
shift
exec env -i HOME="$HOME" PATH=/usr/bin:/bin bash -c "$*"
"""


def script(
    *words: str, cwd: Path = ROOT, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(words),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_model(folder: Path) -> Path:
    """Shaped like Qwen3-4B; a job that is not run needs no weights."""
    (folder / "Qwen3-4B").mkdir(parents=True)
    shape = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
    (folder / "Qwen3-4B" / "config.json").write_text(json.dumps(shape))
    return folder / "Qwen3-4B"


def test_all_scripts_pass_shellcheck() -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "shellcheck" in line]
    checked = {path for pattern in line.split() for path in ROOT.glob(pattern) if "/" in pattern and path.is_file()}
    scripts = {path for folder in ("launch", "docker", ".ci") for path in (ROOT / folder).rglob("*") if _is_bash(path)}
    assert scripts <= checked
    found = script(str(Path(sys.executable).with_name("shellcheck")), "-x", *sorted(map(str, scripts)))
    assert found.returncode == 0, found.stdout


def _is_bash(path: Path) -> bool:
    return path.is_file() and path.read_bytes().startswith((b"#!/usr/bin/env bash", b"# shellcheck shell=bash"))


@pytest.mark.parametrize("name", [*SCRIPTS, "docker/build.sh"])
def test_usage(name: str) -> None:
    for word in ("-h", "--help"):
        shown = script(f"./{name}", word)
        assert shown.returncode == 0
        assert shown.stdout.startswith("usage: ")
        assert name in shown.stdout
    for words in ([], ["--no-such-option"], *([[CELL, "more", "and more"]] if name == "launch/train.sh" else [])):
        wrong = script(f"./{name}", *words)
        assert wrong.returncode == 2, words
        assert "usage: " in wrong.stderr
        assert wrong.stdout == ""


def test_a_container_has_what_training_needs(tmp_path: Path) -> None:
    environment = {"WANDB_API_KEY": "secret", "HTTPS_PROXY": "http://proxy:1", "MINE": "1", "PASS_ENV": "MINE"}
    environment |= {"INFINIBAND": str(tmp_path), "HOME": str(tmp_path), "DOCKER": "podman"}
    shown = script("docker/run.sh", "--dry-run", "nvidia-smi", "-L", environment=environment)
    assert shown.returncode == 0, shown.stderr
    words = shlex.split(shown.stdout)
    assert words[:2] == ["podman", "run"]
    assert words[-3:] == ["memorywalker:slime", "nvidia-smi", "-L"]
    assert {"memlock=-1", "stack=67108864", "--network=host", "--ipc=host", "IPC_LOCK", str(tmp_path)} <= set(words)
    assert {words[i + 1] for i, word in enumerate(words) if word == "--env"} >= {"WANDB_API_KEY", "HTTPS_PROXY", "MINE"}
    assert "secret" not in shown.stdout
    detached = shlex.split(script("docker/run.sh", "--dry-run", "--detach", environment=environment).stdout)
    assert detached[detached.index("--name") + 1] == "memorywalker"
    assert detached[-2:] == ["sleep", "infinity"]


def test_a_container_on_another_host(tmp_path: Path) -> None:
    """Words arrive as they were given, through ssh and a shell in the container."""
    executable(tmp_path / "ssh", '#!/bin/bash\nshift 4\n[[ $1 == gpu1 ]] && shift && exec bash -c "$*"\n')
    executable(tmp_path / "docker", '#!/bin/bash\n[[ "$1 $2 $3" == "exec -i mine" ]] && shift 3 && exec "$@"\n')
    words = ["two words", "$HOME", "it's", '"']
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CONTAINER": "mine"}
    quoted = [shlex.quote(word) for word in ["printf", "%s\n", *words]]
    shown = script("launch/lib/ssh_container.sh", "gpu1", *quoted, environment=environment)
    assert shown.stdout.splitlines() == words, shown.stderr


def test_an_image_with_other_versions(tmp_path: Path) -> None:
    def check(*pins: str) -> subprocess.CompletedProcess[str]:
        return script(sys.executable, "docker/check_image.py", *pins, environment={"PYTHONPATH": str(tmp_path)})

    for name, version in {"sglang": "0.5.15.post2.dev7+gabc", "torch": "2.11.0+cu129"}.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sound = check("torch=2.11.0", "sglang=0.5.15.post1", "--extra", "tap", "--extra", "rollout")
    assert sound.returncode == 0, sound.stderr
    assert "sglang is 0.5.15.post2.dev7+gabc, a build between releases, in place of 0.5.15.post1" in sound.stderr
    wrong = check("torch=2.12.0", "sglang=0.6.0", "no-such-package=1")
    assert wrong.returncode == 1
    assert "torch is 2.11.0+cu129, not 2.12.0; sglang is 0.5.15.post2.dev7+gabc, not 0.6.0" in wrong.stderr
    assert "no-such-package is missing, not 1" in wrong.stderr


def test_a_conversion_in_a_slurm_allocation_is_one_process(tmp_path: Path) -> None:
    shown = script("launch/prepare.sh", str(write_model(tmp_path)), "--dry-run", environment={"SLURM_NTASKS": "4"})
    (line,) = [line for line in shown.stdout.splitlines() if "convert_hf_to_torch_dist.py" in line]
    words = shlex.split(line)
    assert {"WORLD_SIZE=1", "RANK=0", "LOCAL_RANK=0"} <= set(words[: words.index("python3")])


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("nodes", ["1", "4"])
def test_every_cell_has_a_command_line(cell: str, nodes: str) -> None:
    result = run("slime-args", str(ROOT / cell), "--with", str(ROOT / "configs" / "nodes" / f"{nodes}.yaml"))
    assert result.exit_code == 0, result.stderr
    check_command_line(shlex.split(result.stdout))


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["train.sh", CELLS[0]], "--save"),
        (["train.sh", CELLS[-1], "--nodes", "4", "trainer.lr=2e-6"], "--eval-interval"),
        (["eval.sh", CELL], "--eval-prompt-data"),
        (["cluster.sh", "-one,two", CELL, "--nodes", "2"], "--load"),
        (["cluster.sh", "-one,two", CELL, "--evaluate", "--nodes", "2"], "--eval-prompt-data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_dry_run(words: list[str], flag: str, tmp_path: Path) -> None:
    shown = script(f"launch/{words[0]}", *words[1:], "--out", str(tmp_path / "run"), "--dry-run", environment=SECRETS)
    assert shown.returncode == 0, shown.stderr
    (line,) = shown.stdout.splitlines()
    python, m, driver, *flags = shlex.split(line)
    assert [python, m, driver] == ["python", "-m", "slime_plugin.cluster.driver"]
    check_command_line(flags)
    assert flag in flags
    assert flags[flags.index("--num-rollout") + 1] == ("0" if "eval" in " ".join(words) else "200")
    assert flags[flags.index("--custom-config-path") + 1] == str(tmp_path / "run" / "plugin.yaml")
    assert not any(secret in shown.stdout + shown.stderr for secret in SECRETS.values())
    assert not (tmp_path / "run").exists()


def test_paths_count_from_where_they_were_typed(tmp_path: Path) -> None:
    shutil.copy(ROOT / CELL, tmp_path / "mine.yaml")
    (tmp_path / "recorded's").mkdir()
    words = [str(ROOT / "launch" / "replay.sh"), "mine.yaml", "recorded's", "--out", "again", "--dry-run"]
    shown = script(*words, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "recorded" not in shown.stderr, "it was found"
    flags = shlex.split(shown.stdout)
    assert "--debug-train-only" in flags
    assert flags[flags.index("--save") + 1] == str(tmp_path / "again" / "checkpoints")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.sh", CELL, "--nodes", "3"], "there is no configs/nodes/3.yaml; available sizes: 1 2 4 32"),
        (["train.sh", CELL, "--nodes", "4"], "asks for 4 nodes (cluster.nodes), and this starts 1"),
        (["train.sh", CELL, "trainer.tq=2"], "trainer.tq"),
        (["cluster.sh", "-a,b,c", CELL, "--nodes", "4"], "3 hosts for a configuration of 4 nodes (cluster.nodes)"),
        (["cluster.sh", "-a,a", CELL, "--nodes", "2"], "a is listed twice"),
        (["cluster.sh", "-a,b;c", CELL, "--nodes", "2"], "b;c is not a host name"),
        (["cluster.sh", "no-file", CELL], "no-file: there is no such file"),
        (["slurm.sbatch", CELL], "this is not a Slurm job"),
        (["prepare.sh", "no-model"], "holds no Hugging Face checkpoint; hf download"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_started(words: list[str], message: str, tmp_path: Path) -> None:
    refused = script(
        str(ROOT / "launch" / words[0]), *(str(ROOT / w) if w == CELL else w for w in words[1:]), cwd=tmp_path
    )
    assert refused.returncode == 1
    assert message in refused.stderr
    assert refused.stdout == ""


def test_a_job_whose_files_are_missing_is_not_begun(tmp_path: Path) -> None:
    refused = script("launch/train.sh", CELL, "--out", str(tmp_path / "run"), f"model={write_model(tmp_path)}")
    assert refused.returncode == 1
    assert "launch/prepare.sh writes it" in refused.stderr


def test_what_is_not_installed_is_told(tmp_path: Path) -> None:
    if importlib.util.find_spec("slime") is not None:
        pytest.skip("slime is installed")
    job = Job(tmp_path)
    started = job.start("train.sh", ranks=1, driver="")
    assert "there is no slime; use the image of docker/slime.Dockerfile" in job.output()
    assert started.returncode == 1
    again = job.start("cluster.sh", hosts=HOSTS, ranks=2, remote="no-such-shell")
    assert "there is no no-such-shell here; REMOTE_SHELL names the command" in job.output()
    assert again.returncode == 1


@dataclass
class Job:
    """A cell that is ready to be run, on the stand-in driver."""

    folder: Path
    began: list[subprocess.Popen[str]] = field(default_factory=list)
    processes: set[psutil.Process] = field(default_factory=set)

    def __post_init__(self) -> None:
        model = write_model(self.folder)
        model.with_name("Qwen3-4B_torch_dist").mkdir()
        (self.folder / "questions.jsonl").write_text('{"question": "Why?", "answers": ["So."]}\n')
        (self.folder / "modules").mkdir()
        (self.folder / "modules" / "stand_in_driver.py").write_text(DRIVER)
        executable(self.folder / "remote-shell", REMOTE_SHELL)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(
        self,
        name: str,
        *words: str,
        ranks: int,
        hosts: str = "",
        driver: str = "stand_in_driver",
        remote: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.Popen[str]:
        here = self.folder
        settings = [f"{key}.questions={here}/questions.jsonl" for key in ("rollout", "evaluation")]
        words = (
            *([hosts, CELL, "--nodes", str(ranks)] if hosts else [CELL]),
            *words,
            f"model={here}/Qwen3-4B",
            *settings,
        )
        variables = {
            **os.environ,
            **SECRETS,
            "DRIVER": driver,
            "PYTHONPATH": str(here / "modules"),
            "REMOTE_SHELL": remote or str(here / "remote-shell"),
            "NUM_GPUS": "8",
            "NUM_CPUS": "12",
            "http_proxy": "http://127.0.0.1:9",  # nobody listens there
            "PASS_ENV": "REPORT RANKS LOOK_FOR SECRET",
            "SECRET": json.dumps(list(SECRETS)),
            "REPORT": str(here / "report.json"),
            "RANKS": str(ranks),
            "LOOK_FOR": json.dumps([*SECRETS, "no_proxy", "TENSORBOARD_DIR", EXPANDABLE]),
            **environment,
        }
        job = subprocess.Popen(
            # What is started in the background of a script inherits that interrupts are ignored.
            ["env", "--default-signal=INT", f"launch/{name}", *words, "--out", str(self.run)],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.began.append(job)
        return job

    def report(self) -> dict[str, Any]:
        """What the driver has seen, once it has; whatever runs then is remembered."""
        self.wait_for(lambda: (self.folder / "report.json").exists() or self.began[-1].poll() is not None)
        if not (self.folder / "report.json").exists():
            pytest.fail(self.output())
        for job in self.began:
            self.processes |= {*descendants(job.pid), *([psutil.Process(job.pid)] if job.poll() is None else [])}
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return report

    def output(self) -> str:
        return self.began[-1].communicate(timeout=90)[0]

    def nothing_is_left(self) -> None:
        assert len(self.processes) > 10, "Ray was there"
        self.wait_for(lambda: not any(map(is_alive, self.processes)))
        assert list((self.run / "processes").iterdir()) == []

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < until, [process for process in self.processes if is_alive(process)]
            time.sleep(0.1)

    def clear(self) -> None:
        for job in self.began:
            left = descendants(job.pid)
            if job.poll() is None:
                job.kill()
            terminate([*left, *self.processes])
            if job.stdout is not None:
                job.stdout.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.clear()


def test_two_hosts_from_start_to_end(job: Job) -> None:
    """Nodes join, secrets reach ranks and nothing else, a second start is refused, the exit code is the driver's."""
    job.start("cluster.sh", "cluster.rollout_nodes=1", hosts=HOSTS, ranks=2)
    report = job.report()
    assert len({rank["host"] for rank in report["ranks"]}) == 2
    for rank in report["ranks"]:
        assert {"127.0.0.1", "127.0.0.2"} <= set(rank["environment"].pop("no_proxy").split(","))
        assert rank["environment"].pop("TENSORBOARD_DIR") == str(job.run / "tensorboard")
        assert rank["environment"].pop(EXPANDABLE) == "1"  # engines have GPUs of their own
    assert [rank["environment"] for rank in report["ranks"]] == [SECRETS, SECRETS]
    assert report["shown"] == []
    check_command_line(report["words"])
    assert sorted(path.stem for path in (job.run / "processes").iterdir()) == ["127.0.0.1", "127.0.0.2"]
    written = {
        (entry["pid"], entry["began"])
        for path in (job.run / "processes").iterdir()
        for entry in json.loads(path.read_text())["processes"]
    }
    assert report["pid"] in {pid for pid, _ in written}
    known = {(process.pid, start_ticks(process)) for process in job.processes if is_alive(process)}
    assert written - known <= {pair for pair in written if not Path(f"/proc/{pair[0]}").exists()}, "each is one of ours"

    plugin = (job.run / "plugin.yaml").read_bytes()
    second = script("launch/train.sh", CELL, "--out", str(job.run), "method=sdcc")
    assert second.returncode == 1
    assert f"{job.run}: another job is using it (process {job.began[0].pid})" in second.stderr
    assert (job.run / "plugin.yaml").read_bytes() == plugin

    (job.folder / "go").touch()
    output = job.output()
    assert job.began[0].returncode == 7
    assert "2 of 2 nodes and 16 of 16 GPUs have joined" in output
    assert "the driver's output" in output
    job.nothing_is_left()

    assert "the driver's output" in (job.run / "logs" / "driver.log").read_text()
    (logs,) = [path for path in (job.run / "logs").iterdir() if path.is_dir()]
    for host in ("127.0.0.1", "127.0.0.2"):
        (rank,) = (logs / host).glob("Rank-*.out")
        assert "here I am" in rank.read_text()
        assert (logs / f"{host}.ray.log").is_file()
    for path in job.run.rglob("*"):
        assert not path.is_file() or not any(secret.encode() in path.read_bytes() for secret in SECRETS.values()), path


def test_an_interrupt_ends_all_hosts(job: Job) -> None:
    started = job.start("cluster.sh", hosts=HOSTS, ranks=2)
    job.report()
    started.send_signal(signal.SIGINT)
    assert "stopped by SIGINT" in job.output()
    assert started.returncode == 128 + signal.SIGINT
    job.nothing_is_left()


def test_a_driver_that_is_killed(job: Job) -> None:
    started = job.start("train.sh", ranks=1)
    os.kill(job.report()["pid"], signal.SIGKILL)
    assert "the driver ended with -9" in job.output()
    assert started.returncode == 128 + signal.SIGKILL
    job.nothing_is_left()


def test_a_job_that_is_terminated(job: Job) -> None:
    started = job.start("train.sh", ranks=1)
    job.report()
    started.terminate()
    assert "stopped by SIGTERM" in job.output()
    assert started.returncode == 128 + signal.SIGTERM
    job.nothing_is_left()


@pytest.mark.slow
def test_a_script_that_is_killed_takes_its_hosts_with_it(job: Job) -> None:
    started = job.start("cluster.sh", hosts=HOSTS, ranks=2)
    job.report()
    started.kill()
    job.nothing_is_left()


@pytest.mark.slow
def test_a_node_that_is_killed_leaves_nothing_that_the_next_start_does_not_end(job: Job) -> None:
    started = job.start("train.sh", ranks=1)
    job.report()
    (node,) = [p for p in job.processes if b"node.py" in Path(f"/proc/{p.pid}/cmdline").read_bytes()]
    node.kill()
    job.output()
    assert started.returncode == 128 + signal.SIGKILL
    job.wait_for(lambda: not any(map(is_alive, job.processes)))

    (job.folder / "report.json").unlink()
    again = job.start("train.sh", ranks=1)
    job.report()
    (job.folder / "go").touch()
    job.output()
    assert again.returncode == 7
    job.nothing_is_left()


@pytest.mark.slow
def test_a_host_that_never_joins(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOIN_TIMEOUT", "3")
    job.start("train.sh", "--with", str(executable(job.folder / "more.yaml", "cluster: {gpus: 16}\n")), ranks=1)
    output = job.output()
    assert "1 of 1 nodes and 8 of 16 GPUs have joined after 3 s; JOIN_TIMEOUT sets the time to wait" in output
    assert job.began[0].returncode == 1


def test_a_host_with_too_few_cpus(job: Job) -> None:
    """slime would wait for its placement group without an end."""
    job.start("train.sh", ranks=1, environment={"NUM_CPUS": "8"})
    output = job.output()
    assert "Ray counts 8 CPUs (8 on " in output
    assert "slime reserves 10, one per GPU on its node and 2 for itself" in output
    assert "set NUM_CPUS" in output
    assert job.began[0].returncode == 1


@pytest.mark.parametrize(("sent", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_slurm(tmp_path: Path, sent: signal.Signals, requeued: bool) -> None:
    """Before its time limit a job stops and is queued again; one that is cancelled is not."""
    executable(
        tmp_path / "bin" / "scontrol",
        '#!/usr/bin/env bash\n[[ $1 == show ]] && printf "gpu7\\ngpu8\\n" || echo "$*" >>"$OUT/requeued"\n',
    )
    stand_in = """\
        #!/usr/bin/env bash
        printf '%s\\n' "$@" "$REMOTE_SHELL" >"$OUT/words"
        trap 'exit 143' TERM
        touch "$OUT/ready"
        while :; do sleep 0.05; done
        """
    executable(tmp_path / "project" / "launch" / "cluster.sh", textwrap.dedent(stand_in))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OUT": str(tmp_path),
        "SLURM_JOB_NODELIST": "gpu[7-8]",
        "SLURM_JOB_ID": "4711",
        "SLURM_SUBMIT_DIR": str(tmp_path / "project"),
    }
    copy = shutil.copy(ROOT / "launch" / "slurm.sbatch", tmp_path / "slurm_script")
    job = subprocess.Popen(
        [str(copy), "cell.yaml", "method=sdcc"], env=environment, cwd=tmp_path, stderr=subprocess.PIPE
    )
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        job.send_signal(sent)
        job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 143
    hosts, *words, shell = (tmp_path / "words").read_text().splitlines()
    assert (hosts, words) == ("-gpu7,gpu8", ["cell.yaml", "method=sdcc"])
    assert shell.startswith("srun ")
    assert shell.endswith(" --nodelist"), "the name of the host comes next"
    asked = (tmp_path / "requeued").read_text() if (tmp_path / "requeued").exists() else ""
    assert asked == ("requeue 4711\n" if requeued else "")


def test_a_model_is_converted_once_and_again_if_it_was_interrupted(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    executable(
        tmp_path / "slime" / "tools" / "convert_hf_to_torch_dist.py",
        """\
import pathlib, sys
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--save") + 1])
out.mkdir()
(out / "words").write_text("\\n".join(words))
marker = pathlib.Path(__file__).with_name("tried")
if not marker.exists():
    marker.touch()
    sys.exit(3)
(out / "latest_checkpointed_iteration.txt").write_text("release")
""",
    )
    (tmp_path / "megatron").mkdir()
    questions = tmp_path / "all.jsonl"
    questions.write_text("".join(f'{{"question": "Why {n}?", "answer": "So."}}\n' for n in range(300)))

    def prepare(*more: str) -> subprocess.CompletedProcess[str]:
        words = [str(ROOT / "launch/prepare.sh"), "Qwen3-4B", "--questions", "all.jsonl", "--answers", "answer"]
        folders = {"SLIME_DIR": str(tmp_path / "slime"), "MEGATRON_DIR": str(tmp_path / "megatron")}
        return script(*words, "--out", "data", *more, cwd=tmp_path, environment=folders)

    converted = tmp_path / "Qwen3-4B_torch_dist"
    dry = prepare("--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert [line.split()[0] for line in dry.stdout.splitlines()] == ["rm", "env", "mv", "python3"]
    assert prepare().returncode == 3
    assert not converted.exists()
    done = prepare()
    assert done.returncode == 0, done.stderr
    words = (converted / "words").read_text().splitlines()
    flags = [word for word in words if word not in ("--hf-checkpoint", "--save")]
    assert words[words.index("--hf-checkpoint") + 1] == str(model)
    assert words[words.index("--num-layers") + 1] == "36"
    assert not {"--load", "--ref-load", "--num-rollout", "--custom-config-path"} & set(flags)
    assert (tmp_path / "data" / "dev.jsonl").is_file()
    again = prepare()
    assert again.returncode == 0
    assert f"{converted} is there already" in again.stderr
    assert (converted / "words").read_text().splitlines() == words
