"""The editors: when they edit, what leaves and what comes, as the paper's figure of six cases draws it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import parse_config
from slime_plugin.config.harness import BLACK_BOXES
from slime_plugin.errors import ConfigError
from slime_plugin.record import Record, StoreWriter, dump_record, parse_record, read_records
from slime_plugin.rollout.context import Context, ContextError
from slime_plugin.rollout.editors import EDITORS, editor_factory
from slime_plugin.tree import Trajectory
from slime_plugin.tree.places import PLACES, places_of
from tests.cli import run
from tests.conftest import ROOT
from tests.rollout.policy import ANSWER, CHAT, Lookup, Scripted, call, decode, rolled_out

FACTS = Lookup({"a": "first fact", "b": "second and longer fact, with more words", "c": "third fact"})
LOOK_UP = {name: call("search", query=name) for name in "abc"}


def result(text: str) -> str:
    return f"<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n"


def turn(text: str) -> str:
    return f"<|im_start|>assistant\n{text}<|im_end|>\n"


HEAD = "<|im_start|>system\nappend<|im_end|>\n<|im_start|>user\nWhat is it?<|im_end|>\n"
A, B, C = (turn(LOOK_UP[name]) + result(FACTS.known[name]) for name in "abc")


def prompts(engine: Scripted) -> list[str]:
    """What the policy saw at each of its turns, without the opening of the turn itself."""
    return [decode(prompt).removesuffix("<|im_start|>assistant\n") for prompt, _ in engine.seen]


def kinds(record: Record) -> list[tuple[str, str | None]]:
    return [(edit.kind, edit.author) for edit in record.edits]


def test_the_control_never_edits() -> None:
    engine = Scripted([LOOK_UP["a"], LOOK_UP["b"], ANSWER])
    record = rolled_out(engine, {"type": "search_r1"}, [FACTS])
    assert prompts(engine) == [HEAD, HEAD + A, HEAD + A + B]
    assert (len(record.views), record.edits, record.meta.reward) == (1, (), 1.0)


@pytest.mark.parametrize(
    ("evict", "left"),
    [
        ("oldest", turn(LOOK_UP["a"]) + B + C),
        ("newest", A + B + turn(LOOK_UP["c"])),
        ("largest", A + turn(LOOK_UP["b"]) + C),
    ],
)
def test_pop_takes_one_result_out_entirely(evict: str, left: str) -> None:
    engine = Scripted([*LOOK_UP.values(), call("pop"), ANSWER])
    record = rolled_out(engine, {"type": "tc_rag", "evict": evict}, [FACTS])
    assert prompts(engine)[3:] == [HEAD + A + B + C, HEAD + left + turn(call("pop")) + result("removed")]
    assert kinds(record) == [("pop", "policy")]


def test_pop_without_a_reply_leaves_only_the_call() -> None:
    engine = Scripted([LOOK_UP["a"], call("pop"), ANSWER])
    rolled_out(engine, {"type": "tc_rag", "reply": ""}, [FACTS])
    assert prompts(engine)[2] == HEAD + turn(LOOK_UP["a"]) + turn(call("pop"))


def test_what_pop_itself_says_is_not_popped() -> None:
    engine = Scripted([LOOK_UP["a"], LOOK_UP["b"], call("pop"), call("pop"), call("pop"), ANSWER])
    record = rolled_out(engine, {"type": "tc_rag", "evict": "newest"}, [FACTS])
    assert kinds(record) == [("pop", "policy")] * 2
    assert prompts(engine)[5].endswith(result("removed") + turn(call("pop")) + result("nothing to pop"))
    assert not any(fact in prompts(engine)[5] for fact in FACTS.known.values())


def test_pop_with_nothing_to_pop_is_told_so() -> None:
    engine = Scripted([call("pop"), ANSWER])
    record = rolled_out(engine, {"type": "tc_rag"}, [FACTS])
    assert prompts(engine)[1] == HEAD + turn(call("pop")) + result("nothing to pop")
    assert record.edits == ()


FOLD = {"type": "agentfold", "threshold": 80, "request": "Summarize."}
REQUEST = "<|im_start|>user\nSummarize.<|im_end|>\n"


def test_a_long_context_is_folded_into_the_policys_own_summary() -> None:
    engine = Scripted([LOOK_UP["a"], LOOK_UP["b"], "it was the second", LOOK_UP["c"], ANSWER])
    record = rolled_out(engine, FOLD, [FACTS])
    summary = turn("it was the second")
    assert prompts(engine) == [HEAD, HEAD + A, HEAD + A + B + REQUEST, HEAD + summary, HEAD + summary + C]
    assert kinds(record) == [("fold", "policy")]
    span = record.meta.extra["turns"][2]["span"]
    assert record.generated[slice(*span)].all()  # the summary is sampled, and trained where it was sampled
    assert any(start <= span[0] and span[1] <= stop for start, stop in record.views[1])  # and is what is left


def test_the_last_messages_may_stay_as_they_are() -> None:
    engine = Scripted([LOOK_UP["a"], LOOK_UP["b"], "it was the first", ANSWER])
    record = rolled_out(engine, {**FOLD, "keep": 2}, [FACTS])
    assert prompts(engine)[3] == HEAD + turn("it was the first") + B
    assert len(record.views[1]) > 1  # the summary stands in front of what is older than it


def test_a_context_that_is_long_from_the_start_is_not_folded() -> None:
    engine = Scripted([ANSWER])
    assert rolled_out(engine, {**FOLD, "threshold": 1}).edits == ()


def test_a_summary_is_not_folded_alone() -> None:
    engine = Scripted([LOOK_UP["a"], "short", LOOK_UP["b"], "shorter", ANSWER])
    record = rolled_out(engine, {**FOLD, "threshold": 1}, [FACTS])
    assert prompts(engine)[4] == HEAD + turn("shorter")
    assert kinds(record) == [("fold", "policy")] * 2


def test_a_summary_is_cut_at_its_limit() -> None:
    engine = Scripted([LOOK_UP["a"], LOOK_UP["b"], "x" * 99, ANSWER])
    rolled_out(engine, {**FOLD, "summary_tokens": 9}, [FACTS])
    assert prompts(engine)[3] == HEAD + turn("x" * 9)  # and closed, so that the conversation can go on


MEMEX = {"type": "memexrl", "stub": "[{name}]"}


def offload(**arguments: object) -> str:
    return call("memory_offload", **arguments)


def test_offload_leaves_a_stub_and_retrieve_brings_the_tokens_back_at_the_end() -> None:
    stored, back = offload(name="x", items=[1]), call("memory_retrieve", name="x")
    engine = Scripted([LOOK_UP["a"], LOOK_UP["b"], stored, back, ANSWER])
    record = rolled_out(engine, MEMEX, [FACTS])
    assert prompts(engine)[3:] == [
        HEAD + turn(LOOK_UP["a"]) + result("[x]") + B + turn(stored),
        HEAD + turn(LOOK_UP["a"]) + B + turn(stored) + turn(back) + result("first fact"),
    ]
    assert kinds(record) == [("offload", "policy"), ("retrieve", "policy")]
    assert [edit.extra for edit in record.edits] == [{"name": "x"}, {"name": "x"}]
    assert decode(record.tokens).count("first fact") == 1  # on the tape once, however often it came and went


def test_several_results_share_a_stub() -> None:
    stored = offload(name="x")
    engine = Scripted([*LOOK_UP.values(), stored, ANSWER, ANSWER])
    rolled_out(engine, MEMEX, [FACTS])
    assert prompts(engine)[4] == HEAD + turn(LOOK_UP["a"]) + result("[x]") + turn(LOOK_UP["b"]) + turn(
        LOOK_UP["c"]
    ) + turn(stored)
    everything = HEAD + turn(LOOK_UP["a"]) + "".join(result(FACTS.known[name]) for name in "abc")
    assert prompts(engine)[5] == everything + turn(LOOK_UP["b"]) + turn(LOOK_UP["c"]) + turn(stored)


def test_everything_comes_back_before_the_answer_and_the_draft_leaves() -> None:
    first, second = offload(name="x", items=[2]), offload(name="y", items=[1])
    engine = Scripted([LOOK_UP["a"], LOOK_UP["b"], first, second, "<answer>draft</answer>", ANSWER])
    record = rolled_out(engine, MEMEX, [FACTS])
    assert prompts(engine)[5] == HEAD + A + B + turn(first) + turn(second)
    assert kinds(record) == [("offload", "policy"), ("offload", "policy"), ("restore", "harness")]
    assert (record.meta.reward, record.meta.extra["stop"]) == (1.0, "answer")
    assert record.generated[slice(*record.meta.extra["turns"][4]["span"])].all()  # the draft was sampled: it is trained


def test_everything_comes_back_before_the_last_turn() -> None:
    engine = Scripted([LOOK_UP["a"], offload(name="x"), ANSWER])
    record = rolled_out(engine, MEMEX, [FACTS], turns=3)
    assert prompts(engine)[2] == HEAD + A + turn(offload(name="x"))
    assert kinds(record)[-1] == ("restore", "harness")


def test_without_the_terminal_restore_the_stubs_stay() -> None:
    engine = Scripted([LOOK_UP["a"], offload(name="x"), ANSWER])
    record = rolled_out(engine, {**MEMEX, "restore": False}, [FACTS])
    assert kinds(record) == [("offload", "policy")]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (offload(name="x", items=[1]), "Error: memory holds 'x' already"),
        (offload(name="y", items=[2]), "Error: there is no tool result 2; tool results are numbered from 1 to 1"),
        (call("memory_retrieve", name="z"), "Error: memory holds no 'z'; it holds x"),
        (offload(name="y", items=["1"]), "Error: argument 'items' of memory_offload has to hold only integer items"),
        (offload(name="y", items=[]), "Error: items is empty; tool results are numbered from 1 to 1"),
        (offload(items=[1]), "Error: memory_offload needs the argument 'name' (string)"),
    ],
)
def test_a_call_that_memory_cannot_carry_out_is_answered(wrong: str, words: str) -> None:
    engine = Scripted([LOOK_UP["a"], offload(name="x"), LOOK_UP["b"], wrong, ANSWER, ANSWER])
    record = rolled_out(engine, MEMEX, [FACTS])
    assert words in prompts(engine)[4]
    assert kinds(record) == [("offload", "policy"), ("restore", "harness")]


def test_the_registry_and_the_configuration_name_the_same_editors() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"harness": {"type": "xyz"}}, Cell, "cell.yaml")
    assert str(caught.value) == (
        f"cell.yaml: harness.type: there is no 'xyz'; use one of {', '.join((*EDITORS, *BLACK_BOXES))}, "
        "package.module:Name"
    )


@pytest.mark.parametrize(
    ("harness", "words"),
    [
        ({"type": "tests.rollout.policy:Scripted"}, "is not a subclass of slime_plugin.rollout.editors.Editor"),
        ({"type": "tests.rollout.nowhere:X"}, "there is no module 'tests.rollout.nowhere'"),
        ({"type": "examples.editors.keep_last:KeepLast", "kep": 2}, "harness: kep: unknown key; use 'keep'"),
        ({"type": "examples.editors.keep_last:KeepLast", "keep": -2}, "greater than or equal to 0, but it is -2"),
    ],
)
def test_an_editor_of_ones_own_that_cannot_be_used_is_named(
    harness: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        editor_factory(parse_config({"harness": harness}, Cell, "cell.yaml").harness)
    assert words in str(caught.value)


BRANCHING = """
from slime_plugin.rollout.context import Context
from slime_plugin.rollout.editors import Ask, Editor


class Branching(Editor):
    \"\"\"Drops all but the prompt and the last result, as an edit of a kind of its own.\"\"\"

    async def before_turn(self, context: Context, ask: Ask) -> None:
        if len(context.results) > 1:
            with context.edit("context_folding:branch", author="policy", depth=1):
                context.evict(segment.id for segment in context.body[:-1])
"""


def test_an_edit_kind_of_ones_own_goes_all_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the editor through the record and its checks to the commands and the buckets that logdiff is summed by."""
    (tmp_path / "branching.py").write_text(BRANCHING)
    monkeypatch.syspath_prepend(tmp_path)
    record = rolled_out(Scripted([LOOK_UP["a"], LOOK_UP["b"], ANSWER]), {"type": "branching:Branching"}, [FACTS])
    assert kinds(record) == [("context_folding:branch", "policy")]
    path = tmp_path / "run.records"
    with StoreWriter(path) as store:
        store.append(record)
    assert list(read_records([path])) == [parse_record(dump_record(record))] == [record]
    assert run("record", "check", str(path)).exit_code == 0
    assert "context_folding:branch by policy after" in run("record", "show", str(path)).stdout
    stats = json.loads(run("record", "stats", str(path), "--json").stdout)["total"]
    assert stats["edits"] == {"context_folding:branch": 1}
    causes = run("layout", str(path), "--method", "naive_compressed").stdout
    assert "evicted by context_folding:branch" in causes
    answer = places_of(Trajectory.of(record))[record.generated][-1]
    assert PLACES[answer] == "custom/near"


def test_a_kind_that_is_neither_known_nor_of_an_editor_is_refused() -> None:
    context = Context(CHAT, [1], "")
    wanted = "'brnch' is not a kind of edit; use .*, or name one of your own as editor:kind"
    with pytest.raises(ContextError, match=wanted), context.edit("brnch"):
        pass
