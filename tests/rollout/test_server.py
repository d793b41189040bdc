"""The real engine: what it answers, and that nothing of it is left when it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from slime_plugin.rollout.server import Flags, Server, ServerError
from slime_plugin.rollout.server.ports import bind
from slime_plugin.rollout.server.server_process import ServerProcess, tail_errors
from slime_plugin.rollout.server.sglang_on_cpu import murmur_hash32
from slime_plugin.run.processes import descendants, is_alive, session_members
from tests.cli import run
from tests.rollout.router import Router

COMMAND = [sys.executable, "-c", "from slime_plugin.cli.main import main; main()", "engine"]
IGNORING_INTERRUPTS = ["bash", "-c", "trap '' INT; exec \"$@\"", "bash"]
"""Before a command: what is started in the background of a script inherits that interrupts are ignored."""


def post(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        value: dict[str, Any] = json.load(response)
        return value


def generate(url: str, prompt: list[int], tokens: int = 16, key: str | None = None, **sampling: Any) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True, **sampling},
        "return_logprob": True,
    }
    return post(f"{url}/generate", body, {"X-SMG-Routing-Key": key} if key else None)


def eventually(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def test_log_probabilities_are_those_of_the_model(server: Server, model_folder: Path) -> None:
    """Against transformers, for every sampled token, at a temperature and with the nucleus that it was sampled from."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"top_p": 0.5, "top_k": 20}]
    for sampling in settings:
        answer = generate(server.url, prompt, 24, sampling_seed=11, **sampling)
        logprobs, ids, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
        assert list(ids) == answer["output_ids"]
        model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer["output_ids"]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / sampling.get("temperature", 1.0)).log_softmax(-1)[range(len(ids)), list(ids)]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)


def test_the_answer_tells_weights_and_reason(server: Server) -> None:
    meta = generate(server.url, [5, 6, 7], 9, sampling_seed=3)["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 9}
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 9}]


def test_a_stop_token_is_part_of_what_was_sampled(server: Server) -> None:
    free = generate(server.url, [5, 6, 7], 20, sampling_seed=3)["output_ids"]
    stop: dict[str, Any] = {"stop_token_ids": [free[6]], "no_stop_trim": True, "ignore_eos": False}
    stopped = generate(server.url, [5, 6, 7], 20, sampling_seed=3, **stop)
    assert stopped["output_ids"] == free[: free.index(free[6]) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[6]}
    assert len(stopped["meta_info"]["output_token_logprobs"]) == len(stopped["output_ids"])


def test_a_seed_decides_what_is_sampled_whatever_is_in_the_batch(server: Server) -> None:
    prompt = [8, 6, 4, 2]
    alone = generate(server.url, prompt, 32, sampling_seed=7)["output_ids"]
    with ThreadPoolExecutor(16) as pool:
        crowd = [pool.submit(generate, server.url, [i + 1] * (i + 3), 48, sampling_seed=i) for i in range(15)]
        among = generate(server.url, prompt, 32, sampling_seed=7)["output_ids"]
        for other in crowd:
            other.result()
    assert among == alone
    assert generate(server.url, prompt, 32, sampling_seed=8)["output_ids"] != alone


def test_a_prefix_is_computed_once(server: Server) -> None:
    prompt = [311, *range(100, 300)]
    first, second = (generate(server.url, prompt, 1, sampling_seed=1)["meta_info"]["cached_tokens"] for _ in range(2))
    assert (first, second) == (0, len(prompt) - 1)


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, from its description, for whole words and a tail."""
    state = 0

    def scramble(block: int) -> int:
        block = block * 0xCC9E2D51 % 2**32
        return (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32

    whole = len(data) // 4 * 4
    for (block,) in struct.iter_unpack("<I", data[:whole]):
        state ^= scramble(block)
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    if data[whole:]:
        state ^= scramble(int.from_bytes(data[whole:], "little"))
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> shift) * factor % 2**32
    return state


def test_noise_is_a_well_known_hash() -> None:
    assert [murmur3(word) for word in (b"", b"test", b"Hello, world!")] == [0, 0xBA6BD213, 0xC0363E43]
    seeds, positions, columns = [0, 7, 2**40 + 5, -1], [0, 1, 99, 2**31], [0, 1, 511, 151_935]
    hashed = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    assert hashed.dtype == torch.uint32
    expected = [[murmur3(struct.pack("<qII", s, p, c)) for c in columns] for s, p in zip(seeds, positions, strict=True)]
    assert hashed.tolist() == expected


def test_importing_the_launcher_loads_no_engine() -> None:
    code = "import sys, slime_plugin.rollout.server, slime_plugin.cli.engine; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "sglang", "sglang_router", "transformers", "ray"}


def test_a_server_that_dies_early_says_why(model_folder: Path, tmp_path: Path) -> None:
    """In its own process, and in one that it started."""
    flags = Flags(model_folder, "cpu", extra=("--no-such-flag",))
    misled = Server(flags, log=tmp_path / "misled.log")
    broken = Server(Flags(_with_torn_weights(model_folder, tmp_path / "torn"), "cpu"), log=tmp_path / "broken.log")
    misled.start()
    broken.start()
    for server, word in ((misled, "unrecognized arguments: --no-such-flag"), (broken, "SafetensorError")):
        group = server.pid
        with pytest.raises(ServerError) as caught:
            server.wait()
        assert word in str(caught.value)
        assert f"see {server.log}" in str(caught.value)
        assert session_members(group) == []


def _with_torn_weights(model: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    return folder


def test_the_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("[12:00] ready\nTraceback (most recent call last):\n  File x\nValueError: no \x1b[2J\n[12:01] bye\n")
    assert tail_errors(log) == ["ValueError: no \\x1b[2J"]
    log.write_text("a\n\nb\n")
    assert tail_errors(log) == ["a", "b"]


def test_a_busy_port_is_told_before_anything_starts(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1 cannot be used: Address already in use"):
            Server(Flags(model_folder, "cpu"), port=port).start()
        result = run("engine", "--model", str(model_folder), "--device", "cpu", "--port", str(port))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "Address already in use" in result.stderr


def test_what_cannot_be_served_is_one_clear_line(model_folder: Path, tmp_path: Path) -> None:
    missing = run("engine", "--model", str(tmp_path / "no"))
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr
    model = str(model_folder)
    for arguments, words in (
        (["--model", str(tmp_path), "--device", "cpu"], "has no config.json"),
        (
            ["--model", model, "--device", "cuda", "--tp", "99"],
            "device cuda with tp 99 needs 99 GPUs, this machine has ",
        ),
        (["--model", model, "--device", "cpu", "--tp", "2"], "on a CPU there is 1"),
        (["--model", model, "--device", "cpu", "--host", "192.0.2.1"], "choose an address of this machine"),
        (["--model", model, "--device", "cpu", "--log", str(tmp_path / "no" / "log")], "the log cannot be written"),
    ):
        result = run("engine", *arguments)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.stderr
        assert words in result.stderr


def test_a_missing_engine_is_one_clear_line(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "sglang" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    result = run("engine", "--model", str(model_folder), "--device", "cpu")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: the engine needs sglang: run launch/setup.sh, or pip install sglang\n"


def test_flags_for_gpus_keep_the_prefix_cache(tmp_path: Path) -> None:
    """They cannot be run here; these are the ones that are known to matter."""
    plain = Flags(tmp_path, "cuda", tp=8).command("127.0.0.1", 1)
    assert plain[1:3] == ["-m", "sglang.launch_server"]
    assert plain[plain.index("--tp-size") + 1] == "8"
    assert "--enable-deterministic-inference" not in plain
    seeded = Flags(tmp_path, "cuda", seeded=True, extra=("--attention-backend", "fa3")).command("127.0.0.1", 1)
    assert "--enable-deterministic-inference" in seeded
    assert seeded[-2:] == ["--attention-backend", "fa3"], "what is asked for comes last, and wins"
    assert not {"--disable-radix-cache"} & {*plain, *seeded}


@dataclass(frozen=True)
class Engine:
    """``memorywalker engine`` in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    group: int
    """Of the server."""

    def end(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        _, error = self.process.communicate(timeout=120)
        return error


def start_engine(model: Path, *before: str) -> subprocess.Popen[str]:
    command = [*before, *COMMAND, "--model", str(model), "--device", "cpu", "--max-total-tokens", "16384"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def server_of(process: subprocess.Popen[str]) -> int:
    """The process group of the server, once it is being started."""
    assert process.stderr is not None
    assert process.stderr.readline() == "0 s: starting\n"
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    process = start_engine(model_folder)
    try:
        group = server_of(process)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 600)[0], "not healthy within ten minutes"
        words = process.stdout.readline().split()
        url, pid = words[words.index("at") + 1], words[words.index("(pid") + 1].rstrip(",")
        assert int(pid) == group
        yield Engine(process, url, group)
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=120)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def test_a_router_keeps_a_session_on_one_server(server: Server, engine: Engine) -> None:
    with Router([server.url, engine.url]) as router:
        group = router.pid
        homes = []
        for session in range(4):
            prompt = [350 + session, *range(20, 60)]
            cached = []
            for _ in range(3):
                answer = generate(router.url, prompt, 4, key=f"session-{session}", sampling_seed=session)
                cached.append(answer["meta_info"]["cached_tokens"])
                prompt += answer["output_ids"]
            assert cached == [0, 44, 48], "a turn finds its prefix, but for the last token, where it was computed"
            homes.append(prompt)
        # And the same turns on each server alone: seeds make them the same everywhere.
        for session, prompt in enumerate(homes):
            for url in (server.url, engine.url):
                assert generate(url, prompt[:41], 4, sampling_seed=session)["output_ids"] == prompt[41:45]
    assert session_members(group) == []


def test_the_command_ends_with_all_it_started_on_sigterm(engine: Engine) -> None:
    assert len(session_members(engine.group)) >= 3, "the server, its scheduler and its detokenizer"
    assert generate(engine.url, [1, 2, 3], 2, sampling_seed=1)["output_ids"]
    engine.end(signal.SIGTERM)
    assert engine.process.returncode == 128 + signal.SIGTERM
    assert session_members(engine.group) == []


def test_an_interrupt_ends_the_command_while_the_server_starts(model_folder: Path) -> None:
    with start_engine(model_folder, *IGNORING_INTERRUPTS) as process:
        group = server_of(process)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=120)
    assert (process.returncode, out, error.splitlines()[-1]) == (130, "", "Interrupted")
    assert session_members(group) == []


def test_a_server_does_not_outlive_whoever_started_it(model_folder: Path) -> None:
    with start_engine(model_folder) as process:
        group = server_of(process)
        process.kill()
        process.communicate(timeout=120)
    eventually(lambda: not session_members(group), "the server of a killed command still runs")


class Late(ServerProcess):
    """Does not serve yet, as an engine that still loads its weights."""

    def command(self, port: int) -> list[str]:
        return ["sleep", "600"]


def test_nobody_is_given_the_port_of_a_server_that_does_not_listen_yet() -> None:
    """What takes the port between its choice and its use would answer health checks, or let them hang."""
    server = Late("server that is late")
    server.start()
    try:
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind((server.host, server.port))
        with bind(server.host, server.port) as listener:  # the server itself, with SO_REUSEADDR
            listener.listen()
    finally:
        server.stop()
    with socket.socket() as another:
        another.bind((server.host, server.port))


OWNER = """
import sys
from slime_plugin.rollout.server.server_process import ServerProcess

class Any(ServerProcess):
    def command(self, port):
        return ["sh", "-c", "setsid sleep 600 & sleep 600 & wait"]

server = Any("server of anything")
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def started_below(owner: subprocess.Popen[str]) -> list[psutil.Process]:
    assert owner.stdout is not None
    supervisor = int(owner.stdout.readline())
    eventually(lambda: len(descendants(supervisor)) == 3, "the shell and both of its children")
    return [psutil.Process(supervisor), *descendants(supervisor)]


@pytest.mark.parametrize("killed", ["owner", "supervisor", "nobody"])
def test_no_process_of_any_server_outlives_its_owner(killed: str) -> None:
    """Of a program that knows nothing of its owner; also a child that left the session, unless the supervisor dies."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        processes = started_below(owner)
        (escaped,) = [each for each in processes[1:] if os.getsid(each.pid) != processes[0].pid]
        if killed == "owner":
            owner.kill()
        elif killed == "supervisor":
            processes[0].kill()
        owner.communicate(timeout=60)
    if killed == "supervisor":
        escaped.kill()
    eventually(lambda: not any(map(is_alive, processes)), "nothing is left")


def test_a_server_stops_whole_and_can_start_again(model_folder: Path) -> None:
    """Also one that does not answer its grace period, being stopped itself."""
    server = Server(Flags(model_folder, "cpu"))
    server.stop()  # nothing to do
    server.start()
    with pytest.raises(ServerError, match="runs already"):
        server.start()
    group, log = server.pid, server.log
    os.kill(group, signal.SIGSTOP)
    server.stop()
    server.stop()
    assert session_members(group) == []
    assert not log.exists(), "nothing went wrong, so nobody needs it"
    server.start()
    assert server.alive
    assert server.pid != group
    server.stop()
    assert not server.alive


def test_requests_that_cannot_be_served_are_refused(server: Server) -> None:
    for prompt, words in (
        ([], "cannot be empty"),
        ([1] * 5000, "longer than the model's context length (2048 tokens)"),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            generate(server.url, prompt)
        with caught.value as response:
            assert response.code == 400
            assert words in response.read().decode()
