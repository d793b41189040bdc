"""``memorywalker compare``: its numbers are those of transformers, context by context, with the weights of the time."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest.mock as mock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from slime_plugin.config.method import Mask4d, MethodSettings, NaiveCompressed
from slime_plugin.local.compare import time_training
from slime_plugin.local.compare_run import compare_run
from slime_plugin.local.rank import Rank
from slime_plugin.local.scorer import CompareSettings, ScoredIteration
from slime_plugin.methods import lay_out
from slime_plugin.record import Meta, Record, StoreWriter, dump_record
from slime_plugin.report.comparison_table import comparison_table, verdict
from slime_plugin.run.folder import RunFolder
from slime_plugin.slime import batch
from slime_plugin.slime.args import args_of
from slime_plugin.train.ranks import OnProgress, run_ranks
from tests.cli import INTERRUPTIBLE, Result, run
from tests.train import oracle
from tests.train.test_score import WITHOUT_TORCH, in_session

METHODS = ["naive_compressed", "naive_full", "logittree", "mask4d", "sdcc"]
EXACT = ["logittree", "mask4d"]
COMPARED = [0, 2]
QUICK = ("--repeats", "1")

Logprobs = dict[int, float]
"""By tape position."""


@dataclass(frozen=True)
class Scored:
    """A rollout, and what transformers with the weights of its iteration gives its tokens in three contexts."""

    rollout: oracle.Rollout
    iteration: int
    live: Logprobs
    compressed: Logprobs
    full: Logprobs

    @property
    def record(self) -> Record:
        return self.rollout.record

    def under(self, method: str) -> Logprobs:
        wrong = {"naive_compressed": self.compressed, "sdcc": self.compressed, "naive_full": self.full}
        return wrong.get(method, self.live)

    def logdiff(self, method: str) -> list[float]:
        return [abs(value - float(self.record.logprobs[p])) for p, value in self.under(method).items()]


@dataclass(frozen=True)
class Run:
    """A training run of three iterations that has lost the weights of the second."""

    folder: RunFolder
    scored: list[Scored] = field(default_factory=list)

    def compare(self, *options: str) -> Result:
        return run("compare", str(self.folder.path), *options)

    def copy(self, to: Path) -> RunFolder:
        return RunFolder(Path(shutil.copytree(self.folder.path, to)))

    def read(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.folder.comparison.read_text())
        return value


def score(model: Qwen3ForCausalLM, rollout: oracle.Rollout, iteration: int) -> Scored:
    """The rollout as that model would have logged it, and its other contexts."""
    old = rollout.record
    live = logprobs_of(oracle.score_live(model, rollout))
    logged = np.full(len(old), np.nan, dtype=np.float32)
    logged[list(live)] = list(live.values())
    record = Record(old.tokens, old.generated, logged, old.views, old.edits, old.meta)
    tape = old.tokens.tolist()
    logits = model(torch.tensor([tape])).logits[0]
    full = {p: (tape[p], logits[p - 1]) for p in rollout.live}
    compressed = oracle.score_compressed(model, rollout)
    rollout = oracle.Rollout(record, rollout.live)
    return Scored(rollout, iteration, live, logprobs_of(compressed), logprobs_of(full))


def logprobs_of(scores: oracle.Scores) -> Logprobs:
    return {p: float(torch.log_softmax(logits, -1)[token]) for p, (token, logits) in scores.items()}


def with_meta(rollout: oracle.Rollout, meta: Meta) -> oracle.Rollout:
    r = rollout.record
    return replace(rollout, record=Record(r.tokens, r.generated, r.logprobs, r.views, r.edits, meta))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = Run(RunFolder(tmp_path_factory.mktemp("run")))
    made.folder.settings.write_text(json.dumps({"cell": {}}))
    for iteration in range(3):
        weights = oracle.make_model(made.folder.weights(iteration), tied=True, seed=iteration)
        model = oracle.load_model(weights, torch.float64)
        with torch.no_grad(), StoreWriter(made.folder.rollouts(iteration)) as store:
            for i, seed in enumerate(range(4 * iteration, 4 * iteration + 4)):
                meta = Meta(
                    f"q{i // 2}-{i % 2}", "simulated", f"q{i // 2}", float(i % 2), weight_version=str(iteration)
                )
                scored = score(model, with_meta(oracle.simulate(seed), meta), iteration)
                store.append(scored.record)
                if iteration in COMPARED:
                    made.scored.append(scored)
            for meta in (
                Meta("stopped", "simulated", "q0", None, "aborted", str(iteration)),
                Meta(
                    "both",
                    "simulated",
                    "q0",
                    1.0,
                    "completed",
                    "9",
                    {"turns": [{"straddles": [["8", 1], ["9", 2]]}]},
                ),
            ):
                store.append(with_meta(oracle.simulate(90), meta).record)
    shutil.rmtree(made.folder.weights(1))
    return made


@pytest.fixture(scope="module")
def compared(trained: Run) -> tuple[Run, Result]:
    result = trained.compare("--repeats", "2")
    assert result.exit_code == 0, result.stderr
    return trained, result


@pytest.mark.parametrize("method", METHODS)
def test_logdiff_is_that_of_transformers(compared: tuple[Run, Result], method: str) -> None:
    trained, _ = compared
    value = trained.read()
    logdiff = [distance for scored in trained.scored for distance in scored.logdiff(method)]
    found = value["methods"][method]["logdiff"]
    if method in EXACT:
        assert found["mean"] < 1e-6
        assert found["max"] < 1e-5
    else:
        assert found["mean"] == pytest.approx(np.mean(logdiff), rel=1e-4)
        assert found["max"] == pytest.approx(np.max(logdiff), rel=1e-4)
        assert found["mean"] > 1e3 * value["floor"]["mean"]
    for part in value["by_iteration"]:
        own = [d for scored in trained.scored if scored.iteration == part["iteration"] for d in scored.logdiff(method)]
        assert part["methods"][method]["mean"] == pytest.approx(np.mean(own), rel=1e-4, abs=1e-6)
        assert part["methods"][method]["max"] == pytest.approx(np.max(own), rel=1e-4, abs=1e-5)


def test_what_is_compared_is_said(compared: tuple[Run, Result]) -> None:
    trained, result = compared
    value = trained.read()
    assert value["iterations"] == COMPARED == [part["iteration"] for part in value["by_iteration"]]
    assert value["records"] == len(trained.scored)
    assert value["sampled"] == sum(len(scored.live) for scored in trained.scored)
    assert value["left_out"] == {"aborted": 2, "straddling": 2}
    assert value["skipped"] == [1]
    assert list(value["methods"]) == METHODS
    assert [name for name, part in value["methods"].items() if part["exact"]] == EXACT
    assert value["floor"] in [value["methods"][name]["logdiff"] for name in EXACT]
    assert "without iterations 1: the weights that sampled them were removed" in result.stderr
    assert "left out 1 aborted, 1 straddling" in result.stderr


@pytest.mark.parametrize("method", METHODS)
def test_every_trained_token_is_in_the_arrays(compared: tuple[Run, Result], method: str) -> None:
    trained, _ = compared
    with np.load(trained.folder.comparison_arrays / f"{method}.npz", allow_pickle=False) as arrays:
        keys = zip(arrays["iteration"].tolist(), arrays["ids"].tolist(), strict=True)
        assert list(keys) == [(scored.iteration, scored.record.meta.id) for scored in trained.scored]
        assert arrays["logprob"].dtype == np.float32
        found: list[Logprobs] = [{} for _ in trained.scored]
        for record, tape, logprob in zip(*(arrays[key].tolist() for key in ("record", "tape", "logprob")), strict=True):
            assert tape not in found[record]
            found[record][tape] = logprob
    for scored, tokens in zip(trained.scored, found, strict=True):
        assert tokens == pytest.approx(scored.under(method), abs=1e-5)


def prefixes(contexts: Sequence[tuple[int, ...]]) -> int:
    """Nodes of the prefix tree, root by root."""
    return len({context[: i + 1] for context in contexts for i in range(len(context))})


def until_sampled(rollout: oracle.Rollout, positions: Sequence[int]) -> list[tuple[int, ...]]:
    return [(*rollout.live[p], int(rollout.record.tokens[p])) for p in positions]


def chains(rollout: oracle.Rollout) -> int:
    """Tokens of all contexts, each as far as something new was sampled in it."""
    seen: set[int] = set()
    total = 0
    for view in rollout.record.views:
        positions = [p for start, stop in view for p in range(start, stop)]
        total += max((i + 1 for i, p in enumerate(positions) if p in rollout.live and p not in seen), default=0)
        seen |= set(positions)
    return total


TOKENS: dict[str, Callable[[oracle.Rollout], int]] = {
    "naive_compressed": lambda rollout: len(oracle.final_context(rollout)),
    "naive_full": lambda rollout: len(rollout.record),
    "logittree": chains,
    "mask4d": lambda rollout: prefixes(until_sampled(rollout, list(rollout.live))),
    "sdcc": lambda rollout: len(oracle.final_context(rollout)),
}
"""All simulated rollouts end with sampled tokens, so no context is cut."""


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_counted_as_the_simulator_counts_them(compared: tuple[Run, Result], method: str) -> None:
    trained, _ = compared
    value = trained.read()
    part, rollouts = value["methods"][method], [scored.rollout for scored in trained.scored]
    under = [scored.under(method) for scored in trained.scored]
    assert part["trained"] == sum(map(len, under))
    assert part["share_trained"] == pytest.approx(sum(map(len, under)) / value["sampled"])
    assert sum(part["lost"].values()) == value["sampled"] - part["trained"]
    assert part["tokens"] == sum(map(TOKENS[method], rollouts))
    leaves = [oracle.diverging(rollout) for rollout in rollouts]
    teachers = [prefixes(until_sampled(r, p)) for r, p in zip(rollouts, leaves, strict=True)]
    assert part["teacher_tokens"] == (sum(teachers) if method == "sdcc" else 0)
    stale = [live != tuple(r.record.tokens[:p].tolist()) for r in rollouts for p, live in r.live.items()]
    off = {"naive_compressed": sum(map(len, leaves)), "sdcc": sum(map(len, leaves)), "naive_full": sum(stale)}
    assert part["off_context"] == off.get(method, 0)
    assert sum(place["tokens"] for place in part["places"].values()) == part["trained"]
    assert part["leaves"]["number"] == (sum(map(len, leaves)) if method == "sdcc" else 0)


def test_updates_are_timed_where_most_was_edited(compared: tuple[Run, Result]) -> None:
    trained, _ = compared
    value = trained.read()
    edits = {i: sum(len(s.record.edits) for s in trained.scored if s.iteration == i) for i in COMPARED}
    assert value["timed"] == {"iteration": max(edits, key=lambda i: edits[i]), "records": 4, "repeats": 2}
    assert value["denominator"] == "naive_compressed"
    assert value["methods"]["naive_compressed"]["cost"] == 1.0
    assert all(part["cost"] > 0 and part["seconds"] > 0 for part in value["methods"].values())
    assert "float32" in value["machine"]


def layouts_while_timing(on_progress: OnProgress, timed: ScoredIteration, settings: CompareSettings) -> int:
    rank = Rank(args_of(settings.cell(timed.model, settings.methods[0])))
    with mock.patch.object(batch, "lay_out", wraps=lay_out) as counted:
        time_training(on_progress, timed, settings, rank)
    return counted.call_count


@pytest.mark.parametrize("methods", [(NaiveCompressed(),), (NaiveCompressed(), Mask4d())], ids=len)
def test_every_timed_repetition_lays_out(trained: Run, methods: tuple[MethodSettings, ...]) -> None:
    records = tuple(scored.record for scored in trained.scored if scored.iteration == 0)
    timed = ScoredIteration(0, trained.folder.weights(0), records)
    (layouts,) = run_ranks(1, layouts_while_timing, timed, CompareSettings(methods, repeats=2))
    assert layouts == len(methods) * (1 + 2) * len(records)


def test_a_person_can_read_it(compared: tuple[Run, Result]) -> None:
    trained, result = compared
    out = result.stdout
    assert f"{trained.folder.path}: 8 rollouts of iterations 0 and 2" in out
    assert re.search(r"method +exact +mean +max +trained +tokens +cost", out)
    assert re.search(r"\nmask4d +yes +\S+e-0[78] +\S+e-0[67] +100\.0% +[\d,]+ \(\d\.\d\dx\) +\d+\.\d\dx", out)
    assert re.search(r"\nsdcc +no +\S+ +\S+ +\d\d\.\d% +[\d,]+\+[\d,]+ \(\d\.\d\dx\)", out)
    assert re.search(
        r"nats per token\): logittree and mask4d; above it .*: naive_compressed \d, naive_full \d and", out
    )
    assert out.endswith(f"wrote {trained.folder.comparison}\n")


def without_times(value: dict[str, Any]) -> dict[str, Any]:
    methods = {name: {**part, "cost": None, "seconds": None} for name, part in value["methods"].items()}
    return {**value, "methods": methods, "timed": None}


def test_comparing_again_gives_the_same(compared: tuple[Run, Result], tmp_path: Path) -> None:
    trained, _ = compared
    copy = trained.copy(tmp_path / "again")
    before = {path.name: path.read_bytes() for path in copy.comparison_arrays.iterdir()}
    value = compare_run(copy, CompareSettings(repeats=0))
    assert value == json.loads(copy.comparison.read_text())
    assert value["timed"] is None
    assert {part["cost"] for part in value["methods"].values()} == {None}
    assert value == without_times(trained.read())
    assert {path.name: path.read_bytes() for path in copy.comparison_arrays.iterdir()} == before


def test_progress_ends_with_all_of_it(trained: Run, tmp_path: Path) -> None:
    totals: list[int] = []
    steps: list[int] = []
    lines: list[str] = []

    def start(total: int) -> Callable[[int], None]:
        totals.append(total)
        return steps.append

    compare_run(trained.copy(tmp_path / "run"), CompareSettings(repeats=1), start, lines.append)
    assert all(step > 0 for step in steps)
    assert totals == [sum(steps)]
    assert len(lines) == 3


@pytest.mark.parametrize("split", [["--tp", "2", "--sp"], ["--pp", "2"], ["--cp", "2"]], ids=" ".join)
def test_ranks_share_the_work(compared: tuple[Run, Result], tmp_path: Path, split: list[str]) -> None:
    trained, _ = compared
    copy = trained.copy(tmp_path / "run")
    result = run("compare", str(copy.path), *QUICK, *split, "--batch-tokens", "64", "--json")
    assert result.exit_code == 0, result.stderr
    value, alone = json.loads(result.stdout), trained.read()
    assert value == json.loads(copy.comparison.read_text())
    for method, part in value["methods"].items():
        before = alone["methods"][method]
        assert part["logdiff"] == pytest.approx(before["logdiff"], rel=1e-4, abs=1e-5)
        assert [part[key] for key in ("trained", "tokens", "lost")] == [
            before[key] for key in ("trained", "tokens", "lost")
        ]
        assert part["cost"] > 0


def test_the_method_of_a_run_is_compared_as_the_run_has_it(trained: Run, tmp_path: Path) -> None:
    copy = trained.copy(tmp_path / "run")
    copy.settings.write_text(json.dumps({"cell": {"method": {"type": "mask4d", "packing": "replicated"}}}))
    assert run("compare", str(copy.path), "--repeats", "0", "--methods", "mask4d").exit_code == 0
    found = json.loads(copy.comparison.read_text())["methods"]["mask4d"]
    records = [scored.record for scored in trained.scored if scored.iteration in COMPARED]
    replicated, trie = (
        sum(len(row) for record in records for row in lay_out(record, Mask4d(packing=packing)).rows)
        for packing in ("replicated", "trie")
    )
    assert found["tokens"] == replicated > trie


def test_a_method_that_is_only_scored_has_no_cost(trained: Run) -> None:
    settings = CompareSettings((NaiveCompressed(), Mask4d(packing="union")), iterations=1, repeats=1)
    value = compare_run(trained.copy(trained.folder.path.with_name("union")), settings)
    assert value["methods"]["mask4d"]["cost"] is None
    assert value["methods"]["mask4d"]["logdiff"]["mean"] > 1e-3
    assert value["methods"]["naive_compressed"]["cost"] == 1.0


def test_some_methods_some_iterations(compared: tuple[Run, Result], tmp_path: Path) -> None:
    trained, _ = compared
    copy = trained.copy(tmp_path / "run")
    result = run("compare", str(copy.path), *QUICK, "--methods", "mask4d", "--iterations", "1")
    assert result.exit_code == 0, result.stderr
    value = json.loads(copy.comparison.read_text())
    assert list(value["methods"]) == ["naive_compressed", "mask4d"]
    assert value["iterations"] == [0]
    assert value["by_iteration"] == [
        {
            "iteration": 0,
            "methods": {name: trained.read()["by_iteration"][0]["methods"][name] for name in value["methods"]},
        }
    ]
    assert sorted(path.name for path in copy.comparison_arrays.iterdir()) == ["mask4d.npz", "naive_compressed.npz"]


def test_what_other_weights_sampled_is_refused(trained: Run, tmp_path: Path) -> None:
    copy = trained.copy(tmp_path / "run")
    shutil.copy(copy.rollouts(1), copy.rollouts(2))
    before = sorted(copy.path.rglob("*"))
    result = run("compare", str(copy.path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert (
        "rollout-00002.records#0: record q0-0 (simulated) was sampled by weights of version '1', not by version '2'"
        in (result.stderr)
    )
    assert sorted(copy.path.rglob("*")) == before


def test_without_any_weights_there_is_nothing_to_compare(trained: Run, tmp_path: Path) -> None:
    copy = trained.copy(tmp_path / "run")
    shutil.rmtree(copy.path / "weights")
    result = run("compare", str(copy.path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "3 iterations with rollouts, 0 with the weights that sampled them" in result.stderr


def test_weights_of_another_shape_are_refused(trained: Run, tmp_path: Path) -> None:
    copy = trained.copy(tmp_path / "run")
    config = copy.weights(2) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 2}))
    result = run("compare", str(copy.path))
    assert result.exit_code == 1
    assert f"{copy.weights(2)}: has another shape than {copy.weights(0)}" in result.stderr


def test_damaged_records_are_left_out_and_counted(trained: Run, tmp_path: Path) -> None:
    copy = trained.copy(tmp_path / "run")
    with copy.rollouts(2).open("ab") as store:
        store.write(b"\xf5mwr torn")
    result = run("compare", str(copy.path), "--repeats", "0")
    assert result.exit_code == 1
    assert "Error: " in result.stderr
    assert json.loads(copy.comparison.read_text())["left_out"]["damaged"] == 1


def test_records_outside_a_training_run(trained: Run, tmp_path: Path) -> None:
    """A folder of stores is written into; a file has no place for it."""
    model, own = trained.folder.weights(2), [scored for scored in trained.scored if scored.iteration == 2]
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(dump_record(scored.record) + "\n" for scored in own))
    folder = RunFolder(tmp_path / "stores")
    with StoreWriter(folder.path / "rollout-0.records") as store:
        for scored in own:
            store.append(scored.record)
    folder.settings.write_text(json.dumps({"version": 1, "settings": {}}))  # as memorywalker rollout does
    result = run("compare", str(file), str(folder.path), "--model", str(model), *QUICK)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("4 rollouts of iteration 0") == 2
    assert result.stdout.count("wrote ") == 1
    value = json.loads(folder.comparison.read_text())
    assert value["iterations"] == [0]
    logdiff = [distance for scored in own for distance in scored.logdiff("naive_full")]
    assert value["methods"]["naive_full"]["logdiff"]["mean"] == pytest.approx(np.mean(logdiff), rel=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollouts.jsonl", "stores"]


def test_rollouts_that_nobody_has_scored_are_timed_too(trained: Run, tmp_path: Path) -> None:
    file, scored = tmp_path / "bare.jsonl", trained.scored[0]
    bare = dump_record(with_meta(scored.rollout, Meta()).record)
    file.write_text(f"{bare}\n{bare}\n")
    result = run("compare", str(file), "--model", str(trained.folder.weights(0)), *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["methods"]["sdcc"]["cost"] > 0


def test_one_model_has_one_version(trained: Run, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    unversioned = with_meta(trained.scored[1].rollout, Meta("unversioned"))
    records = (trained.scored[0].record, unversioned.record, trained.scored[-1].record)
    file.write_text("".join(dump_record(record) + "\n" for record in records))
    result = run("compare", str(file), "--model", str(trained.folder.weights(0)))
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(r"mixed.jsonl:3: .* was sampled by weights of version '2', not by version '0'", result.stderr)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "mask4"], "there is no method 'mask4'; use 'mask4d'"),
        (["--iterations", "0"], "'0' is neither a positive whole number nor all"),
        (["--model", "{run}/weights/v00000"], "is a training run and has its own weights: leave --model out"),
        (["--tp", "3"], "num_attention_heads is 4, which 3 tensor-parallel ranks do not divide"),
        (["{run}/rollout-00000.records"], "is not a training run: pass --model, the weights that sampled its records"),
        (["--help"], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_without_loading_torch(trained: Run, options: list[str], message: str) -> None:
    here = str(trained.folder.path)
    command = ["compare", here, *(option.format(run=here) for option in options)]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert message in done.stderr


def test_an_interrupt_ends_every_process_and_writes_nothing(trained: Run, tmp_path: Path) -> None:
    copy = trained.copy(tmp_path / "run")
    for path in (copy.comparison, *copy.comparison_arrays.glob("*.npz")):
        path.unlink(missing_ok=True)
    process = subprocess.Popen(
        [*INTERRUPTIBLE, "compare", str(copy.path), "--tp", "2", "--repeats", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while (
        in_session(process.pid) < 5
    ):  # the command, a resource tracker, a server that ranks are forked from, two ranks
        assert process.poll() is None, "it has ended by itself: make it longer"
        time.sleep(0.05)
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1] == "Interrupted"
    while in_session(process.pid):  # a process that stays makes this test hang, and so fail
        time.sleep(0.05)
    assert not copy.comparison.exists()
    assert not list(copy.path.rglob("*.part"))


def numbers(means: dict[str, float | None], floor: float | None) -> dict[str, Any]:
    part = {"exact": False, "share_trained": None, "tokens": 0, "teacher_tokens": 0, "cost": None}
    return {
        "floor": None if floor is None else {"mean": floor, "max": floor},
        "iterations": [3],
        "records": 1,
        "denominator": "naive_compressed",
        "methods": {name: part | {"logdiff": {"mean": mean, "max": mean}} for name, mean in means.items()},
    }


@pytest.mark.parametrize(
    ("means", "floor", "expected"),
    [
        (
            {"naive_compressed": 0.4, "mask4d": 4e-7},
            4e-7,
            "mask4d; above it by orders of magnitude: naive_compressed 6",
        ),
        ({"naive_compressed": 5e-7, "mask4d": 4e-7}, 4e-7, "naive_compressed and mask4d; no method is above it"),
        ({"naive_compressed": 0.0, "mask4d": 0.0}, 0.0, "naive_compressed and mask4d; no method is above it"),
        ({"naive_compressed": 0.9, "mask4d": 0.8}, 0.8, "even exact methods are off by 0.8 nats per token"),
        ({"naive_compressed": 0.9}, None, "no exact method was compared"),
        ({"naive_compressed": None, "mask4d": 1e-7}, 1e-7, "mask4d; no method is above it"),
    ],
)
def test_the_verdict_says_what_the_numbers_mean(
    means: dict[str, float | None], floor: float | None, expected: str
) -> None:
    value = numbers(means, floor)
    assert expected in verdict(value)
    assert comparison_table(value).row_count == len(means)
