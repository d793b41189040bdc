"""The proof, on a real SGLang server: what the records say the policy saw is what the engine saw.

Every live context of every record goes through transformers' own Qwen3 in float32, and has to give back the
log-probabilities that the engine logged while it sampled, with its prefix cache, its batches and its router.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.record import Record, read_records
from slime_plugin.rollout.server import Flags, Server
from slime_plugin.tree import Trajectory, count
from tests.cli import run
from tests.conftest import ROOT
from tests.rollout.replay import MODEL, check_replay, replayed
from tests.rollout.router import Router

EDITORS = {
    "search_r1": set[str](),
    "tc_rag": {"pop"},
    "agentfold": {"fold"},
    "memexrl": {"offload", "restore"},
}


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the paths in configurations are relative to it


def rollouts(cell: str, url: str, out: Path, questions: int, samples: int) -> list[Record]:
    """Records of a cell of the small world, sampled by the command as a user would."""
    path = f"configs/small_world/{cell}.yaml"
    options = ("--engine", url, "--questions", str(questions), "--samples", str(samples))
    result = run("rollout", path, "--out", str(out), *options)
    assert result.exit_code == 0, result.stderr
    records = list(read_records([out]))
    assert len(records) == questions * samples
    assert run("record", "check", str(out)).exit_code == 0
    return records


@pytest.mark.parametrize("cell", EDITORS)
def test_every_editor_fires_and_its_contexts_are_what_the_engine_saw(
    cell: str, server: Server, policy: Any, tmp_path: Path
) -> None:
    records = rollouts(cell, server.url, tmp_path / "run", questions=6, samples=4)
    check_replay(records, policy)
    kinds = {edit.kind for record in records for edit in record.edits}
    counts = [count(Trajectory.of(record)) for record in records]
    if cell == "search_r1":
        assert all(counted.K == 0 for counted in counts)
    else:
        assert kinds >= EDITORS[cell]
        assert sum(counted.K for counted in counts) > 0
        assert sum(sum(counted.E) for counted in counts) > 0
        assert sum(counted.D for counted in counts) > 0
    assert {record.meta.status for record in records} <= {"completed", "truncated"}
    assert len({record.meta.reward for record in records}) > 1


def test_sixty_four_rollouts_at_once_share_prefixes_and_stay_exact(server: Server, policy: Any, tmp_path: Path) -> None:
    before = len(server.log.read_text(errors="replace"))
    records = rollouts("agentfold", server.url, tmp_path / "run", questions=4, samples=16)
    check_replay(records, policy)
    log = server.log.read_text(errors="replace")[before:]
    assert sum(int(number) for number in re.findall(r"#cached-token: (\d+)", log)) > 1000
    assert max(int(number) for number in re.findall(r"#running-req: (\d+)", log)) > 8


def test_rollouts_are_reproducible(server: Server, tmp_path: Path) -> None:
    """Whatever else is in the batch: seeds decide what is sampled."""
    alone = rollouts("tc_rag", server.url, tmp_path / "alone", questions=2, samples=2)
    among_others = rollouts("tc_rag", server.url, tmp_path / "others", questions=6, samples=4)
    others = {record.meta.id: record for record in among_others}
    for record in alone:
        assert record.tokens.tolist() == others[record.meta.id].tokens.tolist()
    assert len({tuple(record.tokens.tolist()) for record in alone}) == len(alone)


def test_two_servers_behind_a_router_are_as_exact_as_one(server: Server, policy: Any, tmp_path: Path) -> None:
    with (
        Server(Flags(MODEL, "cpu", max_total_tokens=16384)) as second,
        Router([server.url, second.url]) as router,
    ):
        records = rollouts("memexrl", router.url, tmp_path / "run", questions=4, samples=8)
        assert second.log.read_text(errors="replace").count("/generate") > 20  # both of them worked
    check_replay(records, policy)


def test_a_record_of_another_context_does_not_replay(server: Server, policy: Any, tmp_path: Path) -> None:
    """The oracle can fail: the last context alone does not give the logged numbers back."""
    records = rollouts("agentfold", server.url, tmp_path / "run", questions=2, samples=4)
    edited = next(record for record in records if record.edits)
    positions = [p for start, stop in edited.views[-1] for p in range(start, stop)]
    kept = [p for p in positions if edited.generated[p]]
    flat = Record(
        edited.tokens[positions],
        edited.generated[positions],
        edited.logprobs[positions],
        [[(0, len(positions))]],
    )
    assert kept
    assert max(replayed(flat, policy)) > 1e-2


def test_the_summary_tells_what_the_edits_did(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"
    rollouts("agentfold", server.url, out, questions=2, samples=2)
    totals = json.loads(run("record", "stats", str(out), "--json").stdout)["harnesses"]["agentfold"]
    assert totals["records"] == 4
    assert totals["edits"]["fold"] == sum(len(record.edits) for record in read_records([out]))
