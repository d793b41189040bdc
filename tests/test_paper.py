"""The paper's own examples, row by row."""

from __future__ import annotations

import pytest

from slime_plugin.config.method import LogitTree, Mask4d, MethodSettings, NaiveCompressed, NaiveFull, Sdcc
from slime_plugin.methods import lay_out
from slime_plugin.record import Record
from slime_plugin.tree import Trajectory, count, diverging_leaves
from tests.oracle import EXACT, name, path, trained

# Table "per-leaf live-view prefix vs. final-walk prefix": leaf -> (live prefix, final-walk prefix), y_ans is y13.
PREFIXES = {
    6: ([1, 2, 3, 4, 5], [1, 2, 3, 4]),
    7: ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6]),
    9: ([1, 2, 3, 4, 6, 7, 8], [1, 2, 3, 4, 6, 7]),
    10: ([1, 2, 3, 4, 6, 7, 8, 9], [1, 2, 3, 4, 6, 7, 9]),
    12: ([1, 2, 3, 4, 6, 7, 9, 10, 11], [1, 2, 3, 4, 6, 7, 9, 10]),
    13: ([1, 2, 3, 4, 6, 7, 9, 10, 12], [1, 2, 3, 4, 6, 7, 9, 10, 12]),
}


def prefixes(record: Record, method: MethodSettings) -> dict[int, list[int]]:
    """For each trained tape position, the tape positions it is conditioned on."""
    rows = lay_out(record, method).rows
    return {int(row.tape[i]): row.tape[path(row, i)].tolist() for row in rows for i in trained(row)}


@pytest.mark.parametrize("method", EXACT, ids=name)
def test_running_example_live_prefixes(running: Record, method: MethodSettings) -> None:
    found = prefixes(running, method)
    for leaf, (live, _) in PREFIXES.items():
        assert found[leaf] == [0, *live]
    assert sorted(found) == [5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_running_example_final_walk(running: Record) -> None:
    found = prefixes(running, NaiveCompressed())
    assert found == {leaf: [0, *final] for leaf, (_, final) in PREFIXES.items()}
    assert lay_out(running, NaiveCompressed()).lost == {"evicted by pop": 3}


def test_running_example_diverging_leaves(running: Record) -> None:
    diverging = [leaf for leaf, (live, final) in PREFIXES.items() if live != final]
    assert diverging_leaves(Trajectory.of(running)).tolist() == diverging
    (teacher,) = lay_out(running, Sdcc()).teachers
    for leaf, index in zip(diverging, teacher.teacher.tolist(), strict=True):
        assert teacher.row.tape[path(teacher.row, index)].tolist() == [0, *PREFIXES[leaf][0]]


def test_running_example_counts(running: Record) -> None:
    counts = count(Trajectory.of(running))
    assert (counts.K, counts.D, counts.E, counts.L, counts.C, counts.R) == (3, 5, (1, 1, 1), 14, 11, 9)
    assert counts.branch_tokens == 8 + 10 + 11 + 11
    assert counts.trie_tokens == 5 + 3 + 5 + 4 + 2
    assert counts.L - counts.evicted == counts.C, "C = L - |union of E_k| for a history that only shrinks"
    assert Trajectory.of(running).junctions == (8, 11, 13), "J_k = 7, 10, 12, counted with the prompt s"


def test_running_example_trie_layout(running: Record) -> None:
    """Each chain in one piece, forks after it."""
    (row,) = lay_out(running, Mask4d()).rows
    assert row.tape.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9, 10, 9, 10, 11, 12, 12, 13]
    assert row.parent.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 4, 8, 9, 10, 11, 9, 13, 14, 15, 14, 17]


def _words(record: Record, positions: list[int]) -> str:
    return " ".join(record.extra["pieces"][p] for p in positions)


def _first(record: Record, text: str) -> int:
    """Tape position of the first word of a stretch of text."""
    words = text.split(" ")
    pieces = record.extra["pieces"]
    return next(p for p in range(len(pieces)) if pieces[p : p + len(words)] == words)


ENVELOPE = "[weather: afternoon rain]"
S = "rain is likely tomorrow afternoon"
T = "Line 2 runs every four minutes"


def test_weather_pitfall_a_scores_s_without_the_envelope(weather: Record) -> None:
    target = _first(weather, S)
    assert ENVELOPE in _words(weather, prefixes(weather, LogitTree())[target])
    assert ENVELOPE not in _words(weather, prefixes(weather, NaiveCompressed())[target])


def test_weather_pitfall_b_scores_t_with_the_envelope(weather: Record) -> None:
    target = _first(weather, T)
    live = _words(weather, prefixes(weather, LogitTree())[target])
    assert ENVELOPE not in live
    assert S in live, "the span written from the envelope survives it"
    assert ENVELOPE in _words(weather, prefixes(weather, NaiveFull())[target])


def test_weather_mirror_exact_methods_agree(weather: Record) -> None:
    assert (
        prefixes(weather, LogitTree()) == prefixes(weather, Mask4d()) == prefixes(weather, Mask4d(packing="replicated"))
    )


def test_offload_retrieve_restore(memex: Record) -> None:
    """A span leaves, comes back at the end of the context, and is put back in its place for the answer."""
    at = {piece: p for p, piece in enumerate(memex.extra["pieces"])}
    found = {p: _words(memex, prefix) for p, prefix in prefixes(memex, Mask4d()).items()}
    assert found[at["think"]] == "s q call a r1 r2 r3"
    assert found[at["think2"]] == "s q call a stub think offload"
    assert found[at["use"]] == "s q call a stub think offload think2 retrieve back r1 r2 r3"
    assert found[at["answer"]] == "s q call a r1 r2 r3 think offload think2 retrieve use"
    trajectory = Trajectory.of(memex)
    assert [_words(memex, trajectory.restored(k).tolist()) for k in range(3)] == ["", "r1 r2 r3", ""]
    assert [_words(memex, trajectory.evicted(k).tolist()) for k in range(3)] == ["r1 r2 r3", "", "stub back"]
