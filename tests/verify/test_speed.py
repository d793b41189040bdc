"""The check ``speed``, and ``memorywalker plan`` with what it measured."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime_plugin.architecture import PUBLISHED, Architecture
from slime_plugin.config.method import METHODS, Mask4d, NaiveCompressed, Sdcc
from slime_plugin.config.overrides import load_cell
from slime_plugin.config.trainer import Trainer
from slime_plugin.local.timing import plain_chains, time_in_turns
from slime_plugin.methods import Computed, lay_out
from slime_plugin.planner.calibration import PlannedUpdate, planned_decoding_step, step_seconds
from slime_plugin.planner.job import GPUS, counted_workload, gpu_named
from slime_plugin.planner.memory import token_bytes
from slime_plugin.planner.plan import plan_job
from slime_plugin.verify import longest_row, speed, world
from slime_plugin.verify.generated import workload_record
from slime_plugin.verify.settings import Verification
from slime_plugin.verify.synchronisation import DeviceTimes, WaitCounter, device_times
from tests.cli import run
from tests.cluster.test_plan import CELL, WORKLOADS
from tests.conftest import ROOT, example
from tests.verify.breakages import run_broken

QUICKSTART = "configs/quickstart.yaml"
QWEN = PUBLISHED["Qwen3-4B"]
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def verify(*arguments: str) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    """The exit code, all of the JSON, and the findings of the check by what they are of."""
    result = run("verify", QUICKSTART, "--only", "speed", "--quick", "--json", *arguments)
    value = json.loads(result.stdout)
    (check,) = value["checks"]
    return result.exit_code, value, {finding["what"].strip(): finding for finding in check["measurements"]}


def test_a_sound_cell_is_measured(tmp_path: Path) -> None:
    outputs = ("--out", str(tmp_path / "page.html"), "--out", str(tmp_path / "numbers.json"))
    code, value, found = verify(*outputs)
    assert (code, value["verdict"]) == (0, "1 passed")
    assert json.loads((tmp_path / "numbers.json").read_text()) == value
    assert "plain chain" in (tmp_path / "page.html").read_text()
    names = {**{name: name for name in METHODS}, "mask4d": "mask4d *", "chain": "plain chain"}
    assert set(names.values()) <= set(found)
    records = speed.rollouts_of(Verification(load_cell(QUICKSTART), "cpu", quick=True))
    for name, shown in names.items():
        numbers = found[shown]["numbers"]
        layouts = [lay_out(record, METHODS["mask4d" if name == "chain" else name]) for record in records]
        assert numbers["tokens"] == sum(len(row) for layout in layouts for row in layout.rows)
        assert numbers["teacher_tokens"] == sum(len(t.row) for layout in layouts for t in layout.teachers)
        every = numbers["tokens"] + numbers["teacher_tokens"]
        assert numbers["tokens_per_second"] == pytest.approx(every / found[shown]["value"])
        assert min(numbers["over H_comp"], numbers["over chain"], numbers["over logittree"]) > 0
    assert [found[names[name]]["numbers"][f"over {base}"] for name, base in (
        ("naive_compressed", "H_comp"), ("chain", "chain"), ("logittree", "logittree")
    )] == [1, 1, 1]  # fmt: skip
    assert found["sdcc"]["numbers"]["teacher_tokens"] > 0
    measured = value["measured"]
    assert (measured["model"], measured["method"], measured["dtype"]) == ("model", "mask4d", "float32")
    assert measured["versions"]["torch"] == torch.__version__
    assert measured["device"]
    assert measured["values"] == {}, "one rank on a CPU has nothing of what a plan assumes"
    assert not any("breakages.py" in line for line in found["operations that would wait for a GPU"]["numbers"])


def test_links_are_measured_and_no_plan_takes_those_of_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    code, value, found = verify("trainer.tp=2", "trainer.sp=true", "--out", str(path))
    assert (code, value["split"]["tp"]) == (0, 2)
    values = value["measured"]["values"]
    assert set(values) == {"nvlink"}
    assert found["between tensor-parallel ranks"]["value"] == values["nvlink"]
    assert found["all-reduce of a token"]["value"] > 0
    result = run("plan", CELL, "--measured", str(path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"was measured on {value['measured']['device']}, and the plan is for H100" in result.stderr


def test_the_share_of_a_gpu_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this processor were an H100."""
    monkeypatch.setattr(speed, "gpu_named", lambda device: GPUS["h100"])
    code, value, found = verify("method=naive_full")
    model = Architecture.read(ROOT / "examples/small_world/model")
    matrices = model.parameters - model.layers * (2 * model.hidden + 2 * model.head_size) - model.hidden
    lengths = [len(record) for record in speed.rollouts_of(Verification(load_cell(QUICKSTART), "cpu", quick=True))]
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    forward = 2 * matrices * sum(lengths) + 4 * model.layers * model.heads * model.head_size * pairs
    seconds = found["update by naive_full"]["value"]
    assert (code, seconds) == (0, found["naive_full *"]["value"])
    assert value["measured"]["values"] == {"mfu": pytest.approx(3 * forward / (seconds * 989e12))}
    assert found["share of the GPU's operations"]["limit"] == "plan: 0.3"


def test_memory_that_a_plan_expects_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest_row, "flash_kernel", lambda: SimpleNamespace(version=3))
    verification = Verification(load_cell(ROOT / "configs/cells/agentfold-sdcc.yaml"), "cuda")
    rows = Computed(20_000, 1e8, 0, 0, 20_000, 0.0, 0.1)
    one, four = (longest_row.planned_bytes(verification, rows, number) for number in (1, 4))
    assert four - one == pytest.approx(3 * 2_000 * 2560 * 2, abs=8), "states of the teacher at 2,000 leaves each"
    longer = longest_row.planned_bytes(verification, replace(rows, longest=40_000), 1)
    per_token = sum(token_bytes(replace(plan_job(verification.cell, GPUS["h100"]).job, rows=rows)))
    assert longer - one == (40_000 - verification.cell.trainer.batch_tokens) * per_token, "no micro-batch is smaller"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [["trainer.pp=2"], ["trainer.cp=2", "method=sdcc"], ["method=naive_full", "trainer.dtype=bfloat16"]]
)
def test_every_split_is_measured(settings: list[str]) -> None:
    code, _, found = verify(*settings)
    assert code == 0, found


@pytest.mark.slow
def test_recorded_rollouts_are_timed() -> None:
    records = ROOT / "tests/fixtures/v0_6_0/train/rollout-00000.records"
    code, _, found = verify("--records", str(records))
    assert (code, found["rollouts"]["found"].split(", ")[-1]) == (0, "recorded")


@pytest.mark.slow
def test_a_decoding_step_of_a_real_engine() -> None:
    result = run("verify", QUICKSTART, "--only", "engine", "--quick", "--json")
    findings = json.loads(result.stdout)["checks"][0]["measurements"]
    (step,) = (finding for finding in findings if finding["what"] == "a decoding step of one rollout")
    assert 0 < step["value"] < 1


def test_a_loss_that_is_not_finite_turns_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "run_ranks", functools.partial(run_broken, "overflow"))
    code, value, found = verify()
    assert (code, value["verdict"]) == (1, "0 passed; 1 failed: speed")
    assert (found["mask4d *"]["ok"], found["mask4d *"]["found"]) == (False, "loss nan")
    assert "the loss overflows" in value["checks"][0]["remedies"][0]


def test_a_loss_that_waits_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "run_ranks", functools.partial(run_broken, "waiting_loss"))
    code, _, found = verify()
    lines = found["operations that would wait for a GPU"]["numbers"]
    assert (code, [times for line, times in lines.items() if line.startswith("item in breakages.py:")]) == (0, [1])


# Waiting


MASK = torch.tensor([True, False, True])
X = torch.arange(3.0)


@pytest.mark.parametrize(
    ("action", "name"),
    [
        (lambda: X.sum().item(), "item"),
        (lambda: float(X[1]), "item"),
        (lambda: bool((X > 1).all()), "item"),
        (lambda: X.nonzero()[0], "nonzero"),
        (lambda: X[MASK], "index"),
        (lambda: X.clone().index_put_((MASK,), torch.zeros(())), "index_put_"),
        (lambda: X.masked_select(MASK), "masked_select"),
        (lambda: torch.unique(X), "unique"),
        (lambda: torch.repeat_interleave(X, torch.tensor([1, 2, 3])), "repeat_interleave"),
    ],
)
def test_what_waits_is_counted_with_its_line(action: Callable[[], object], name: str) -> None:
    with WaitCounter() as counter:
        action()
    ((place, times),) = counter.places.items()
    assert (place.split(":")[0], times) == (f"{name} in test_speed.py", 1)


def test_what_does_not_wait_is_not() -> None:
    with WaitCounter() as counter:
        torch.where(MASK, X, 0.0)
        X[torch.tensor([0, 2])].sum().exp()
        X[1:].masked_fill(MASK[1:], 0.0)
        torch.repeat_interleave(X, torch.tensor([1, 2, 3]), output_size=6)
    assert not counter.places


def test_times_of_a_profile() -> None:
    """The GPU runs dry twice: for 20 us because the host waited, and for 10 us because it was slow. One wait has more
    work behind it, and one is at the end."""
    times = device_times(
        [
            ("cudaLaunchKernel", False, 5.0, 8.0),
            ("gemm", True, 10.0, 40.0),
            ("cudaMemcpyAsync", False, 20.0, 22.0),
            ("add", True, 30.0, 50.0),
            ("aten::item", False, 30.0, 60.0),
            ("cudaStreamSynchronize", False, 31.0, 53.0),
            ("copy", True, 70.0, 80.0),
            ("gemm", True, 90.0, 100.0),
            ("cudaDeviceSynchronize", False, 91.0, 105.0),
        ]
    )
    assert times.calls == 3
    assert times.seconds == pytest.approx(100e-6)
    assert times.idle == pytest.approx(30e-6)
    assert times.lost == pytest.approx(20e-6)
    assert device_times([]) == DeviceTimes(0.0, 0.0, 0.0, 0)


# Timing, and what is timed


def test_actions_take_turns() -> None:
    """The clock goes on only where something is done: 1 s for a, 2 s for b, and 100 s between them."""
    order: list[str] = []
    now = 0.0

    def act(name: str, seconds: float) -> None:
        nonlocal now
        order.append(name)
        now += seconds

    def prepare(name: str) -> None:
        nonlocal now
        now += 100

    actions = {"a": lambda: act("a", 1), "b": lambda: act("b", 2)}
    seconds = time_in_turns(actions, 2, prepare=prepare, clock=lambda: now, warm_ups=1)
    assert seconds == {"a": [1, 1], "b": [2, 2]}
    assert "".join(order) == "abbaab"


def test_a_plain_chain_has_the_tokens_of_the_tree() -> None:
    tree = lay_out(example("running_example"), Mask4d())
    (row,), (chain,) = tree.rows, plain_chains(tree).rows
    assert chain.tokens.tolist() == row.tokens.tolist()
    assert chain.parent.tolist() == list(range(-1, len(row) - 1))
    assert chain.position.tolist() == list(range(len(row)))
    assert chain.loss_mask.tolist() == row.loss_mask.tolist()


@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("harness", WORKLOADS)
def test_rollouts_have_the_shape_that_a_harness_declares(harness: str, scale: float) -> None:
    declared = WORKLOADS[harness]
    record = workload_record(1, declared, scale, np.arange(5000, dtype=np.int32))
    found = counted_workload([record])
    assert found.branches == declared.branches
    for key in ("sampled", "tape", "branch_tokens", "trie_tokens"):
        assert getattr(found, key) == pytest.approx(scale * getattr(declared, key), rel=0.05), key
    assert abs(found.turns - declared.turns) <= 2


def test_rows_are_counted_as_they_are() -> None:
    record = example("running_example")
    for method in (Mask4d(), Sdcc(), NaiveCompressed()):
        layout = lay_out(record, method)
        pairs = 0
        for row in layout.rows:
            for token in range(len(row)):
                while token >= 0:  # up to the root
                    token, pairs = int(row.parent[token]), pairs + 1
        counted = Computed.counted([layout, layout])
        assert (counted.tokens, counted.pairs) == (2 * layout.tokens, 2 * pairs)
        assert counted.teacher_tokens == 2 * layout.teacher_tokens
        assert counted.longest == max(map(len, layout.rows))


# What a plan assumes


def test_an_update_by_hand() -> None:
    rows = Computed(10_000, 50_000_000, 2_000, 2_000_000, 10_000, 0.0, 0.0)
    matrices = 4_022_468_096 - 36 * (2 * 2560 + 2 * 128) - 2560

    def forward(tokens: int, pairs: int) -> float:
        return 2 * matrices * tokens + 36 * 4 * 4096 * pairs

    operations = 4 * forward(10_000, 50_000_000) + forward(2_000, 2_000_000)  # with recomputation
    exchange = 4 * 36 * 4 * 2 * 2560 * 10_000 / 2 / 450e9
    trainer = Trainer(tp=2, pp=2, recompute=True)
    update = PlannedUpdate(QWEN, trainer, GPUS["h100"], rows, micro_batches=4)
    bubble = 5 / 4  # four micro-batches on two stages
    assert update.seconds == pytest.approx((operations / (4 * 989e12 * 0.3) + exchange / 2) * bubble)
    assert update.mfu(update.seconds) == pytest.approx(0.3)
    slower = (operations / (4 * 989e12 * 0.2) + exchange / 2) * bubble
    assert update.mfu(slower) == pytest.approx(0.2)
    assert update.mfu(exchange / 2) is None, "less than the exchange alone is assumed to take"


def test_a_decoding_step_by_hand() -> None:
    read = 8_044_936_192 / (0.6 * 3.35e12)
    assert planned_decoding_step(QWEN, 1, GPUS["h100"]) == pytest.approx(0.002 + read)
    assert step_seconds(QWEN, 1, GPUS["h100"], 0.005 + read) == pytest.approx(0.005)
    assert step_seconds(QWEN, 1, GPUS["h100"], read / 2) == 0
    assert step_seconds(QWEN, 2, GPUS["h100"], 0.01) == pytest.approx(0.01 - read / 2 - 72 * 15e-6)


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        (H100, "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", None),
        ("AMD EPYC", None),
    ],
)
def test_gpus_by_the_names_that_drivers_use(device: str, gpu: str | None) -> None:
    assert gpu_named(device) == (None if gpu is None else GPUS[gpu])


@pytest.fixture
def verified(tmp_path: Path) -> Callable[..., str]:
    """Write what ``verify`` would have written on an H100."""

    def write(**changes: Any) -> str:
        measured = {
            "values": {"mfu": 0.21, "nvlink": 3e11, "pcie": 1.5e10, "step_seconds": 0.0, "allreduce_seconds": 3e-5},
            "device": H100,
            "model": "Qwen3-4B",
            "method": "mask4d",
            "dtype": "bfloat16",
            "split": {"tp": 4, "pp": 1, "cp": 1, "sp": True},
            "quick": False,
            "versions": {},
        }
        content = {"version": 1, "checks": [], "measured": measured | changes.pop("measured", {})} | changes
        path = tmp_path / "verified.json"
        path.write_text(json.dumps(content))
        return str(path)

    return write


def test_measured_numbers_change_a_plan_as_assumed_ones_do(verified: Callable[..., str]) -> None:
    path = verified()
    values = json.loads(Path(path).read_text())["measured"]["values"]
    assumed = [word for key, value in values.items() for word in ("--assume", f"{key}={value}")]
    settings = (CELL, "cluster.engine_gpus=2", "--json")
    plain, expected = json.loads(run("plan", *settings).stdout), json.loads(run("plan", *settings, *assumed).stdout)
    result = run("plan", *settings, "--measured", path)
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found.pop("measured")["values"] == values
    assert found == expected
    for phase in ("sampling", "update", "exchange", "swap"):
        assert found["phases"][phase] != plain["phases"][phase]
    assert found["phases"]["update"] == pytest.approx(plain["phases"]["update"] * 0.30 / 0.21)


def test_an_assumption_wins_over_what_was_measured(verified: Callable[..., str]) -> None:
    found = json.loads(run("plan", CELL, "--measured", verified(), "--assume", "mfu=0.5", "--json").stdout)
    assert (found["gpu"]["mfu"], found["gpu"]["nvlink"]) == (0.5, 3e11)
    assert "mfu" not in found["measured"]["values"]


def test_a_plan_says_what_was_measured(verified: Callable[..., str]) -> None:
    result = run("plan", CELL, "--measured", verified(measured={"values": {"mfu": 0.21, "pcie": 1.5e10}}))
    last = result.stdout.splitlines()[-1]
    assert last.startswith(f"measured on {H100} (")
    assert last.endswith("mfu 0.21 (assumed 0.3), pcie 1.5e+10 (assumed 2.5e+10)")


def test_what_was_measured_with_something_else_is_warned_of(verified: Callable[..., str]) -> None:
    split = {"tp": 2, "pp": 1, "cp": 1, "sp": False}
    other = {"model": "Qwen3-8B", "method": "sdcc", "dtype": "float32", "split": split, "quick": True}
    result = run("plan", CELL, "--measured", verified(measured=other))
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert all(line.startswith("Warning: ") for line in lines)
    for line, words in zip(
        lines,
        (
            "model Qwen3-8B, and the plan has Qwen3-4B",
            "method sdcc, and the plan has mask4d",
            "dtype float32, and the plan has bfloat16",
            "split tp 2, pp 1, cp 1, sp False, and the plan has tp 4, pp 1, cp 1, sp True",
            "small inputs (--quick)",
        ),
        strict=True,
    ):
        assert words in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "is of version 2, and this memorywalker reads 1"),
        ({"checks": None}, "is not a verification; memorywalker verify CONFIG --out FILE.json writes it"),
        ({"measured": {"values": []}}, "is not a verification"),
        ({"measured": {"values": {}}}, "holds nothing that a plan assumes"),
        ({"measured": {"values": {"mfus": 0.3}}}, "measured 'mfus', which no plan assumes; is it 'mfu'?"),
        ({"measured": {"values": {"mfu": 0}}}, "measured mfu as 0, which is no positive number"),
        ({"measured": {"values": {"pcie": None}}}, "measured pcie as None, which is no positive number"),
        (
            {"measured": {"device": "NVIDIA A100-SXM4-80GB"}},
            "measured on NVIDIA A100-SXM4-80GB, and the plan is for H100",
        ),
        ({"measured": {"device": "AMD EPYC"}}, "measured on AMD EPYC, and the plan is for H100"),
    ],
)
def test_a_file_of_something_else_is_refused(
    changes: dict[str, Any], message: str, verified: Callable[..., str]
) -> None:
    result = run("plan", CELL, "--measured", verified(**changes))
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<html>")
    result = run("plan", CELL, "--measured", str(tmp_path / "page.html"))
    assert result.exit_code == 1
    assert "page.html: cannot be read as JSON" in result.stderr


def test_a_file_of_another_kind_is_not_written(tmp_path: Path) -> None:
    result = run("verify", QUICKSTART, "--only", "tools", "--out", str(tmp_path / "page.txt"))
    assert result.exit_code == 2
    assert "is neither a page, FILE.html, nor FILE.json" in result.stderr
