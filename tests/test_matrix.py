"""``memorywalker matrix``: which cells there are, which are left to do, and what is said about them in the end."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slime_plugin.cli import matrix
from slime_plugin.config.cell import Cell
from slime_plugin.config.overrides import load_cell
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.report.matrix_table import control_line, matrix_table
from slime_plugin.report.run_data import read_runs
from slime_plugin.run.folder import RunFolder
from slime_plugin.run.processes import descendants, is_alive
from tests.cli import INTERRUPTIBLE, run
from tests.conftest import ROOT
from tests.run_folders import COSTS, LOGDIFFS, compare, iteration, make_run, running

METHODS = ("naive_compressed", "naive_full", "logittree", "mask4d", "sdcc")
TC_RAG, FOLD, CONTROL = (f"configs/small_world/{name}.yaml" for name in ("tc_rag", "agentfold", "search_r1"))
ONE = "trainer.iterations=1"
SMALL = (ONE, "trainer.prompts=2", "rollout.samples=2")


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def begin(folder: RunFolder, cell: Cell) -> None:
    folder.path.mkdir(exist_ok=True)
    folder.settings.write_text(json.dumps({"version": 1, "cell": cell.to_json()}), encoding="utf-8")


def train(folder: RunFolder, cell: Cell) -> None:
    """What a run leaves behind, but for weights and rollouts."""
    begin(folder, cell)
    lines = [iteration(i, logdiff={"mean": 0.25, "max": 2.0}) for i in range(cell.trainer.iterations)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def trained(out: Path, method: str) -> RunFolder:
    folder = RunFolder(out / f"tc_rag-{method}")
    train(folder, load_cell(TC_RAG, [ONE, f"method={method}"]))
    return folder


def finished(out: Path, method: str) -> RunFolder:
    folder = trained(out, method)
    compare(folder, [running("a")], {})
    return folder


def cells(text: str) -> list[str]:
    """The names in a plan, in its order."""
    return re.findall(r"^  (\S+)", text, flags=re.MULTILINE)


def rows(table: str) -> Iterator[list[str]]:
    for line in table.splitlines():
        yield re.split(r"\s{2,}", line.strip())


class TestPlan:
    def test_five_methods_by_three_editors_and_the_control(self, tmp_path: Path) -> None:
        out = tmp_path / "matrix"
        result = run("matrix", "--dry-run", "--out", str(out))
        assert result.exit_code == 0, result.stderr
        editors = ("tc_rag", "agentfold", "memexrl")
        assert cells(result.stdout) == [f"{e}-{m}" for e in editors for m in METHODS] + ["search_r1"]
        assert result.stdout.startswith(f"16 cells in {out}, 16 of them to do: about ")
        assert "search_r1 is trained once: nothing is edited there, so all methods are the same" in result.stdout
        assert not out.exists()

    def test_settings_stand_where_they_differ(self, tmp_path: Path) -> None:
        lines = run("matrix", "--dry-run", "--out", str(tmp_path)).stdout.splitlines()
        of = {line.split()[0]: line for line in lines[2:]}
        assert "harness.threshold=120" in of[FOLD]
        assert 'rollout.system="fold"' in of[FOLD]
        assert "rollout.context_tokens=200" in of[TC_RAG]
        assert 'harness.stub="[{name}]"' in of["configs/small_world/memexrl.yaml"]
        assert "method.warmup=0.2" in of["tc_rag-sdcc"]
        assert "trainer.lr" not in "".join(lines)

    def test_it_knows_how_far_cells_are(self, tmp_path: Path) -> None:
        finished(tmp_path, "mask4d")
        trained(tmp_path, "logittree")
        begin(RunFolder(tmp_path / "tc_rag-sdcc"), load_cell(TC_RAG, [ONE, "method=sdcc"]))
        result = run("matrix", TC_RAG, ONE, "--dry-run", "--out", str(tmp_path))
        states = {row[0]: row[1:3] for row in rows(result.stdout)}
        assert states["tc_rag-mask4d"] == ["finished", "0 s"]
        assert states["tc_rag-logittree"] == ["trained, to be compared", f"{matrix.COMPARE_S:.0f} s"]
        assert states["tc_rag-sdcc"][0] == "0 of 1 iterations"
        assert states["tc_rag-naive_full"][0] == "new"
        assert "5 cells" in result.stdout
        assert "4 of them to do" in result.stdout

    def test_a_longer_matrix_goes_on_with_a_shorter_one(self, tmp_path: Path) -> None:
        finished(tmp_path, "mask4d")
        result = run("matrix", TC_RAG, "--methods", "mask4d", "--dry-run", "--out", str(tmp_path))
        assert "1 of 8 iterations" in result.stdout

    def test_chosen_methods_keep_their_order(self, tmp_path: Path) -> None:
        result = run("matrix", TC_RAG, CONTROL, "--methods", "sdcc, naive_full", "--dry-run", "--out", str(tmp_path))
        assert cells(result.stdout) == ["tc_rag-naive_full", "tc_rag-sdcc", "search_r1"]

    def test_settings_of_the_only_method_can_be_given(self, tmp_path: Path) -> None:
        words = (TC_RAG, CONTROL, "method.weight=0.3", "--methods", "sdcc")
        assert run("matrix", *words, "--dry-run", "--out", str(tmp_path)).exit_code == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--methods", "mask4"), "there is no method 'mask4'; use 'mask4d'"),
            (("trainer.iteration=3",), "trainer.iteration: unknown key; use 'iterations'"),
            (("method=sdcc",), "use --methods"),
            ((TC_RAG, FOLD, "harness=tc_rag"), f"{FOLD}: tc_rag is the harness of {TC_RAG} too"),
            (("rollout.samples=1",), "rollout.samples: 1 rollout per question"),
            (("configs/small_word/tc_rag.yaml",), "configs/small_word/tc_rag.yaml: cannot be read"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_before_any_work(
        self, tmp_path: Path, words: Sequence[str], message: str
    ) -> None:
        out = tmp_path / "matrix"
        result = run("matrix", *words, "--out", str(out))
        assert result.exit_code in (1, 2)
        assert message in result.stderr
        assert not out.exists()

    def test_a_cell_that_was_begun_with_other_settings(self, tmp_path: Path) -> None:
        folder = finished(tmp_path, "mask4d")
        words = (TC_RAG, ONE, "trainer.lr=1e-3", "--methods", "mask4d", "--out", str(tmp_path))
        result = run("matrix", *words)
        assert result.exit_code == 1
        assert f"{folder.path}: was started with trainer.lr = 0.0003, not 0.001" in result.stderr

    def test_damaged_metrics_name_their_cell(self, tmp_path: Path) -> None:
        folder = finished(tmp_path, "mask4d")
        folder.metrics.write_text("{\n", encoding="utf-8")
        result = run("matrix", TC_RAG, ONE, "--methods", "mask4d", "--out", str(tmp_path))
        assert result.exit_code == 1
        assert f"{folder.metrics}: line 1 is not JSON" in result.stderr

    def test_the_small_world_has_to_be_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        result = run("matrix", "--dry-run")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "configs/small_world/tc_rag.yaml: not here" in result.stderr


class TestWork:
    def test_finished_cells_are_left_alone(self, tmp_path: Path) -> None:
        folders = [finished(tmp_path, m) for m in ("mask4d", "sdcc")]
        before = [(path, path.stat().st_mtime_ns) for folder in folders for path in folder.path.rglob("*")]
        result = run("matrix", TC_RAG, ONE, "--methods", "mask4d,sdcc", "--out", str(tmp_path))
        assert result.exit_code == 0, result.stderr
        assert re.findall(r"cell (\d) of 2: \S+: finished already", result.stderr) == ["1", "2"]
        assert before == [(path, path.stat().st_mtime_ns) for folder in folders for path in folder.path.rglob("*")]
        assert result.stdout.endswith(f"wrote {tmp_path / 'report.html'}\n")
        assert "tc_rag-sdcc" in (tmp_path / "report.html").read_text(encoding="utf-8")

    def test_a_cell_that_cannot_be_trained_does_not_stop_the_others(self, tmp_path: Path) -> None:
        """For real, up to where a run makes its folder."""
        (tmp_path / "tc_rag-naive_full").write_text("in the way", encoding="utf-8")
        finished(tmp_path, "sdcc")
        result = run("matrix", TC_RAG, ONE, "--methods", "naive_full,sdcc", "--out", str(tmp_path))
        assert result.exit_code == 1
        said = result.stderr.splitlines()
        assert any(line.startswith(f"Error: {TC_RAG}: {tmp_path / 'tc_rag-naive_full'}") for line in said)
        assert said[-1] == "failed: tc_rag-naive_full; the same command retries"
        assert "cell 2 of 2: tc_rag-sdcc: finished already" in said
        assert ["sdcc", "reward", "0.12"] in list(rows(result.stdout))
        assert (tmp_path / "report.html").exists()

    def test_nothing_but_failures_is_no_table(self, tmp_path: Path) -> None:
        (tmp_path / "tc_rag-sdcc").write_text("in the way", encoding="utf-8")
        result = run("matrix", TC_RAG, ONE, "--methods", "sdcc", "--out", str(tmp_path))
        assert (result.exit_code, result.stdout) == (1, "")

    def test_what_is_left_is_done_once_and_in_order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """New cells begin, others go on, trained ones are only compared, whatever happens to those before them."""
        finished(tmp_path, "naive_compressed")
        trained(tmp_path, "naive_full")
        begin(RunFolder(tmp_path / "tc_rag-logittree"), load_cell(TC_RAG, [ONE, "method=logittree"]))
        done: list[tuple[Any, ...]] = []

        def train_cell(cell: Cell, folder: RunFolder, config: Path, *, resume: bool) -> None:
            done.append(("train", folder.path.name, cell.method.type, resume))
            if folder.path.name == "tc_rag-mask4d":
                raise RuntimeError("a bug")
            train(folder, cell)

        def compare_run(folder: RunFolder, *rest: Any) -> None:
            done.append(("compare", folder.path.name))
            if folder.path.name == "search_r1":
                raise MemoryWalkerError("no rollout ended well")
            compare(folder, [running("a")], {})

        monkeypatch.setattr(matrix, "train_cell", train_cell)
        monkeypatch.setattr(matrix, "compare_run", compare_run)
        result = run("matrix", TC_RAG, CONTROL, ONE, "--out", str(tmp_path))
        assert done == [
            ("compare", "tc_rag-naive_full"),
            ("train", "tc_rag-logittree", "logittree", True),
            ("compare", "tc_rag-logittree"),
            ("train", "tc_rag-mask4d", "mask4d", False),
            ("train", "tc_rag-sdcc", "sdcc", False),
            ("compare", "tc_rag-sdcc"),
            ("train", "search_r1", "mask4d", False),
            ("compare", "search_r1"),
        ]
        assert result.exit_code == 1
        assert "RuntimeError: a bug" in result.stderr
        assert "Error: no rollout ended well" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("failed: tc_rag-mask4d, search_r1;")
        assert re.search(r"cell 5 of 6: tc_rag-sdcc; \d+ s so far, about \d+ s to go", result.stderr)
        assert "tc_rag-sdcc: reward 0.12, logdiff 0.25, cost 1.62x" in result.stderr


class TestTable:
    def test_it_has_the_numbers_of_the_runs(self, tmp_path: Path) -> None:
        folders = []
        for harness in ("tc_rag", "agentfold"):
            for i, method in enumerate(METHODS):
                rewards = (0.1 * i, 0.9, 0.1 * i + 0.25)
                lines = [
                    iteration(n, reward=reward, logdiff={"mean": LOGDIFFS[method] * (n + 1), "max": 9.0})
                    for n, reward in enumerate(rewards)
                ]
                folder = make_run(tmp_path / f"{harness}-{method}", lines=lines, method=method, harness=harness)
                compare(folder, [running("a")], {})
                folders.append(folder)
        table = list(rows(shown(folders[:-1])))  # agentfold x sdcc is missing
        assert table[0] == ["method", "tc_rag", "agentfold"]
        assert table[1] == ["naive_compressed", "reward", "0.00 -> 0.25", "0.00 -> 0.25"]
        assert table[2] == ["logdiff", "1.25", "1.25"]  # twice what the first iteration has: the mean of three
        assert table[3] == ["cost", "1.00x", "1.00x"]
        assert table[7] == ["logittree", "reward", "0.20 -> 0.45", "0.20 -> 0.45"]
        assert table[8] == ["logdiff", "6e-7", "6e-7"]
        assert table[9] == ["cost", f"{COSTS['logittree']:.2f}x", f"{COSTS['logittree']:.2f}x"]
        assert table[13:16] == [["sdcc", "reward", "0.40 -> 0.65", "no run"], ["logdiff", "1.25"], ["cost", "1.62x"]]

    def test_what_is_not_there_is_not_zero(self, tmp_path: Path) -> None:
        lines = [iteration(0, reward=None, logdiff={"mean": None, "max": None})]
        folder = make_run(tmp_path / "run", lines=lines)
        assert list(rows(shown([folder])))[1:] == [
            ["mask4d", "reward", "n/a (1 of 3)"],
            ["logdiff", "n/a"],
            ["cost", "n/a"],
        ]

    def test_the_control_is_a_line(self, tmp_path: Path) -> None:
        edited = make_run(tmp_path / "run", lines=[iteration(0)])
        control = make_run(tmp_path / "search_r1", lines=[iteration(n) for n in range(3)], harness="search_r1")
        assert "search_r1" not in shown([edited, control])
        assert control_line(read_runs([edited, control])) == (
            "search_r1, where nothing is edited and all methods are the same: "
            "reward 0.12 -> 0.50, logdiff 4e-7, cost n/a"
        )
        assert control_line(read_runs([edited])) is None


def shown(folders: Sequence[RunFolder]) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(matrix_table(read_runs(folders)))
    return captured.get()


@pytest.mark.slow
def test_an_interrupted_matrix_goes_on(tmp_path: Path) -> None:
    """The real thing, once: engine, trainer, comparison, page."""
    command = [*INTERRUPTIBLE, "matrix", FOLD, *SMALL, "--methods", "mask4d", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("starting 1 training rank"):
            break
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert rest.split("\n\n") == ["stopped in agentfold-mask4d; run the same command again to resume", "Interrupted\n"]
    assert started
    assert not [each for each in started if is_alive(each)]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    folder = RunFolder(tmp_path / "agentfold-mask4d")
    (whole,) = [each for each in folder.read_metrics() if each["kind"] == "iteration"]
    assert whole["rollouts"] == 4
    assert whole["logdiff"]["mean"] < 1e-5
    assert list(json.loads(folder.comparison.read_text(encoding="utf-8"))["methods"]) == list(METHODS)
    assert ["method", "agentfold"] in list(rows(ended.stdout))
    assert (tmp_path / "report.html").exists()

    again = run(*command[len(INTERRUPTIBLE) :])
    assert again.exit_code == 0
    assert again.stderr == "cell 1 of 1: agentfold-mask4d: finished already\n"
    assert again.stdout.split() == ended.stdout.split()
