"""A method of one's own, end to end: the example of docs/extend.md against transformers, with values and gradients."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from transformers import Qwen3ForCausalLM

from examples.methods.last_branch import LastBranch
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.method import CustomMethod, Distillation, Mask4d, NaiveCompressed
from slime_plugin.errors import ConfigError, LayoutError
from slime_plugin.local.compare_run import compare_run
from slime_plugin.local.sample import recorded_samples
from slime_plugin.local.score import score_records
from slime_plugin.local.scorer import CompareSettings, Scorer
from slime_plugin.methods import Layout, Row, TrainedTokens, lay_out, method_of, teachers_of
from slime_plugin.methods.mask4d import Mask4dMethod
from slime_plugin.methods.naive_compressed import NaiveCompressedMethod
from slime_plugin.methods.sdcc import SdccMethod
from slime_plugin.planner.job import GPUS
from slime_plugin.planner.plan import plan_job
from slime_plugin.record import Record, StoreWriter, dump_record
from slime_plugin.run.folder import RunFolder
from slime_plugin.slime.batch import Batch
from slime_plugin.slime.refusals import training_problems
from slime_plugin.tree import Trajectory, diverging_leaves
from tests.cli import run
from tests.histories import Rollout, histories
from tests.train import oracle
from tests.train.conftest import Truth
from tests.train.test_exact import SPLITS, outcomes, worst

NAME = "examples.methods.last_branch:LastBranch"
METHOD = CustomMethod(type=NAME)
LIMIT = 0.4


def after_the_last_edit(rollout: oracle.Rollout) -> list[int]:
    """Sampled tokens that stand in no view but the last."""
    earlier = {p for view in rollout.record.views[:-1] for start, stop in view for p in range(start, stop)}
    return [p for p in oracle.final_context(rollout) if p in rollout.live and p not in earlier]


def scored(model: Qwen3ForCausalLM, rollout: oracle.Rollout) -> oracle.Scores:
    live = oracle.score_live(model, rollout)
    return {p: live[p] for p in after_the_last_edit(rollout)}


def lost(truth: Truth) -> int:
    return sum(len(r.live) - len(after_the_last_edit(r)) for r in truth.rollouts)


@given(rollout=histories())
def test_every_sampled_token_is_trained_or_lost(rollout: Rollout) -> None:
    record = rollout[0]
    layout = lay_out(record, METHOD)
    assert layout.trained + sum(layout.lost.values()) == int(record.generated.sum())


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp", "cp2 dp2"])
def test_an_update_is_one_forward_pass_per_token(truth: Truth, split: str) -> None:
    settings, replicas = SPLITS[split]
    model = oracle.load_model(truth.folder, torch.float64)
    scores = [scored(model, rollout) for rollout in truth.rollouts]
    loss = oracle.grpo(scores, truth.rollouts, truth.references, truth.objective)
    (outcome,) = outcomes(truth.job(dtype=torch.float64, **settings), [METHOD], replicas)
    assert outcome.sums["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert worst(outcome, oracle.gradients(model, loss))[0] < 1e-9


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp", "cp2 dp2"])
def test_tokens_of_a_large_logdiff_have_no_loss(truth: Truth, split: str) -> None:
    """And still count in the mean of their rollout."""
    settings, replicas = SPLITS[split]
    rng = np.random.default_rng(3)
    old = [r.record.logprobs + rng.normal(0, LIMIT, len(r.record)) for r in truth.rollouts]
    rollouts = []
    for rollout, before in zip(truth.rollouts, old, strict=True):
        large = [p for p in rollout.live if abs(before[p] - float(rollout.record.logprobs[p])) > LIMIT]
        rollouts.append(oracle.with_weights(rollout, [[p, p + 1, 0.0] for p in large]) if large else rollout)
    model = oracle.load_model(truth.folder, torch.float64)
    scores = [scored(model, rollout) for rollout in truth.rollouts]
    loss = oracle.grpo(scores, rollouts, truth.references, truth.objective, old)
    unlimited = oracle.grpo(scores, truth.rollouts, truth.references, truth.objective, old)
    method = CustomMethod.model_validate({"type": NAME, "max_logdiff": LIMIT})
    (outcome,) = outcomes(truth.job(dtype=torch.float64, old=old, **settings), [method], replicas)
    assert outcome.sums["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert outcome.sums["loss"] != pytest.approx(unlimited.item(), rel=1e-3)
    assert worst(outcome, oracle.gradients(model, loss))[0] < 1e-9


def test_scores_are_those_of_transformers(truth: Truth) -> None:
    scorer = Scorer((METHOD,), dtype="float64")
    (found,) = score_records([r.record for r in truth.rollouts], truth.folder, scorer)
    model = oracle.load_model(truth.folder, torch.float64)
    for rollout, score in zip(truth.rollouts, found, strict=True):
        expected = {
            p: float(torch.log_softmax(z.detach(), -1)[token]) for p, (token, z) in scored(model, rollout).items()
        }
        assert dict(zip(score.tape.tolist(), score.logprobs.tolist(), strict=True)) == pytest.approx(expected, rel=1e-9)


def test_metrics_count_its_tokens(truth: Truth) -> None:
    metrics = Batch.of(recorded_samples([r.record for r in truth.rollouts]), Cell(method=METHOD)).metrics()
    assert metrics["lost"] == {"before the last edit": lost(truth)}
    assert metrics["trained"] == metrics["sampled"] - lost(truth)
    assert metrics["off_context"] == 0


def test_it_is_compared_and_reported_under_its_name(truth: Truth, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.weights(0).parent.mkdir(parents=True)
    folder.weights(0).symlink_to(truth.folder)
    folder.settings.write_text('{"cell": {}}')
    with StoreWriter(folder.rollouts(0)) as store:
        for rollout in truth.rollouts:
            store.append(rollout.record.with_meta(replace(rollout.record.meta, weight_version="0")))
    value = compare_run(folder, CompareSettings(methods=(NaiveCompressed(), METHOD), repeats=1))
    found = value["methods"][NAME]
    assert found["exact"] is True
    assert found["lost"] == {"before the last edit": lost(truth)}
    assert found["tokens"] == sum(len(oracle.final_context(rollout)) for rollout in truth.rollouts)
    assert found["cost"] > 0
    page = tmp_path / "page.html"
    assert run("report", str(folder.path), "--out", str(page)).exit_code == 0
    assert NAME in page.read_text()


class TwoStudents(SdccMethod):
    """A teacher belongs to the student row, and here are two."""

    def lay_out(self, trajectory: Trajectory) -> Layout:
        layout = super().lay_out(trajectory)
        return replace(layout, rows=layout.rows * 2)


def test_a_teacher_has_one_student(truth: Truth) -> None:
    record = next(r.record for r in truth.rollouts if oracle.diverging(r))
    method = CustomMethod(type=f"{__name__}:TwoStudents")
    with pytest.raises(LayoutError, match=r"1 teacher rows for 2 rows of .*TwoStudents; a rollout has one student row"):
        lay_out(record, method)


def test_a_job_is_planned_by_its_cost() -> None:
    cell = Cell(model=Path("models/Qwen3-4B"), method=METHOD)
    plan = plan_job(cell, GPUS["h100"])
    assert plan.job.rows == plan.methods[NAME]
    assert (plan.job.rows.tokens, plan.job.rows.longest) == (plan.job.workload.final, cell.rollout.context_tokens)


class HalvedPerEdit(Mask4dMethod[Mask4d]):
    """A token counts half as much for every edit before it: what that takes travels beside the tokens of a tree."""

    def columns(self, trajectory: Trajectory, row: Row) -> dict[str, np.ndarray]:
        return {"edits": trajectory.born[row.tape]}

    def token_factors(self, tokens: TrainedTokens) -> Any:
        return 0.5 ** tokens.columns["edits"]


def edits_before(record: Record, position: int) -> int:
    return next(k for k, view in enumerate(record.views) if any(a <= position < b for a, b in view))


@pytest.mark.parametrize("split", ["one process", "tp2 pp2 sp", "cp2 dp2", "dp3"])
def test_columns_of_its_own_reach_the_loss(truth: Truth, split: str) -> None:
    settings, replicas = SPLITS[split]
    rollouts = [
        oracle.with_weights(r, [[p, p + 1, 0.5 ** edits_before(r.record, p)] for p in r.live]) for r in truth.rollouts
    ]
    model = oracle.load_model(truth.folder, torch.float64)
    scores = [oracle.score_live(model, rollout) for rollout in truth.rollouts]
    loss = oracle.grpo(scores, rollouts, truth.references, truth.objective)
    method = CustomMethod(type=f"{__name__}:HalvedPerEdit")
    (outcome,) = outcomes(truth.job(dtype=torch.float64, **settings), [method], replicas)
    assert outcome.sums["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert worst(outcome, oracle.gradients(model, loss))[0] < 1e-9


class TooFew(HalvedPerEdit):
    def columns(self, trajectory: Trajectory, row: Row) -> dict[str, np.ndarray]:
        return {"edits": trajectory.born[row.tape][1:]}


def test_a_column_has_a_number_per_token(truth: Truth) -> None:
    method = CustomMethod(type=f"{__name__}:TooFew")
    with pytest.raises(LayoutError, match=r"column 'edits' of .*:TooFew has \d+ numbers for a row of \d+ tokens"):
        Batch.for_scoring([truth.rollouts[0].record], method).train_data()


class OwnTeacher(NaiveCompressedMethod[Distillation]):
    """SDCC again, with nothing of its settings type or its file."""

    Settings = Distillation

    @property
    def distillation(self) -> Distillation:
        return self.settings

    def lay_out(self, trajectory: Trajectory) -> Layout:
        leaves = diverging_leaves(trajectory)
        return replace(self.lay_out_with(trajectory, leaves), teachers=teachers_of(trajectory, leaves))


@pytest.mark.parametrize("split", ["one process", "cp2 dp2"])
def test_a_teacher_of_its_own(truth: Truth, split: str) -> None:
    settings, replicas = SPLITS[split]
    loss, gradients = truth.distilled(torch.float64, 0.7)
    method = CustomMethod.model_validate({"type": f"{__name__}:OwnTeacher", "weight": 0.7, "warmup": 0.0})
    (outcome,) = outcomes(truth.job(dtype=torch.float64, **settings), [method], replicas)
    assert outcome.sums["loss"] == pytest.approx(loss, rel=1e-9)
    assert worst(outcome, gradients)[0] < 1e-9


class Diagnostic(LastBranch):
    @property
    def only_scored(self) -> bool:
        return True


def test_a_method_that_is_only_scored_is_not_trained() -> None:
    cell = Cell(method=CustomMethod(type=f"{__name__}:Diagnostic"))
    assert any(f"{__name__}:Diagnostic is a diagnostic for score" in problem for problem in training_problems(cell))


def test_commands_take_its_import_path(truth: Truth, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("".join(dump_record(rollout.record) + "\n" for rollout in truth.rollouts))
    result = run("score", str(file), "--model", str(truth.folder), "--method", NAME, "--dtype", "float64", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert value["summary"]["method"] == {"type": NAME}
    assert value["summary"]["lost"] == {"before the last edit": lost(truth)}
    assert len(value["tokens"]) == sum(len(after_the_last_edit(rollout)) for rollout in truth.rollouts)


def test_its_settings_are_checked() -> None:
    wrong = Cell(method=CustomMethod.model_validate({"type": NAME, "max_logdif": 2}))
    with pytest.raises(ConfigError, match="max_logdif"):
        method_of(wrong.method)
    with pytest.raises(ConfigError, match=r"not a subclass of slime_plugin\.methods\.Method"):
        method_of(parse_config({"type": "examples.methods.last_branch:LastBranchSettings"}, CustomMethod, "method"))
