"""The context: whatever an editor does, the record says what the policy saw."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.small_world.tokenizer import build
from slime_plugin.config.custom import NoSettings
from slime_plugin.record import KINDS, Meta
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.context import Context, ContextError
from slime_plugin.rollout.editors import Ask, Editor
from slime_plugin.rollout.engine.engine import Generation
from slime_plugin.rollout.messages import Message
from tests.rollout.policy import ANSWER, Scripted, begin, call, check_conditioning, decode, encode, rolled_out

CHAT = ChatML(build())


def context(*results: str) -> Context:
    """A question, and a turn with a result for each of the texts: segments 1, 2 and 3, 4 and so on."""
    made = Context(CHAT, CHAT.prompt("append", "What?", ()), "What?")
    for text in results:
        tokens = encode(f"looking for {text}<|im_end|>")
        made.append_turn(Generation(tokens, (-0.5,) * len(tokens), "stop"))
        made.append(Message("tool", text, "search"))
    return made


def text_of(made: Context) -> str:
    return decode(made.prompt())


def test_the_prompt_is_the_concatenation_of_the_messages() -> None:
    assert text_of(context("red")) == (
        "<|im_start|>system\nappend<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n"
        "<|im_start|>assistant\nlooking for red<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nred\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_evict_takes_a_message_out_and_logs_it() -> None:
    made = context("red", "green")
    whole = text_of(made)
    made.evict([2])
    assert text_of(made) == whole.replace("<|im_start|>user\n<tool_response>\nred\n</tool_response><|im_end|>\n", "")
    record = made.record(Meta())
    red = made[2]
    assert [(edit.kind, edit.author) for edit in record.edits] == [("prune", "harness")]
    assert record.views == (((0, len(record)),), ((0, red.start), (red.stop, len(record))))


def test_replace_puts_a_message_where_the_first_stood() -> None:
    made = context("red", "green")
    segment = made.replace([4, 2], Message("tool", "gone"))
    assert [s.id for s in made.segments] == [0, 1, segment.id, 3]
    assert "looking for red<|im_end|>\n<|im_start|>user\n<tool_response>\ngone" in text_of(made)
    assert [edit.kind for edit in made.record(Meta()).edits] == ["compact"]


def test_restore_brings_the_same_tokens_back_anywhere() -> None:
    made = context("red", "green")
    tape = len(made.record(Meta()))
    made.evict([2, 4])
    made.restore([4], at=1)
    made.restore([2])
    assert [s.id for s in made.segments] == [0, 4, 1, 3, 2]
    record = made.record(Meta())
    assert len(record) == tape
    assert [edit.kind for edit in record.edits] == ["prune", "restore", "restore"]


def test_verbs_inside_an_edit_are_one_edit() -> None:
    made = context("red", "green")
    with made.edit("fold", author="policy", reason="long"):
        made.evict([1, 2])
        made.replace([3], Message("user", "in short"))
    (edit,) = made.record(Meta()).edits
    assert (edit.kind, edit.author, edit.extra) == ("fold", "policy", {"reason": "long"})


def test_what_changes_nothing_is_no_edit() -> None:
    made = context("red", "green")
    made.evict([])
    with made.edit("fold"):
        made.evict([4])
        made.restore([4])
    with made.edit("fold"):
        made.append(Message("user", "go on"))
    assert made.record(Meta()).edits == ()


def test_an_edit_that_fails_did_not_happen() -> None:
    made = context("red", "green")
    before, record = text_of(made), made.record(Meta())

    def fold() -> None:
        with made.edit("fold"):
            made.replace([1, 2], Message("user", "in short"))
            made.evict([0])

    with pytest.raises(ContextError, match="segment 0 is the prompt"):
        fold()
    assert text_of(made) == before
    assert made.record(Meta()) == record
    made.append(Message("user", "go on"))
    assert text_of(made).endswith("go on<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda made: made.evict([9]), "no segment 9; this rollout has had 5"),
        (lambda made: (made.evict([2]), made.evict([2])), "segment 2 is not in the live context"),
        (lambda made: made.restore([2]), "segment 2 is in the live context already"),
        (lambda made: (made.evict([2]), made.restore([2, 2])), "segment 2 is in the live context already"),
        (lambda made: (made.evict([2]), made.restore([2], at=0)), "index 0: indices go from 1, after the prompt, to 4"),
        (lambda made: (made.evict([2]), made.restore([2], at=5)), "index 5"),
        (lambda made: made.replace([], Message("user", "x")), "at least 1 segment"),
        (lambda made: made.edit("popp").__enter__(), "'popp' is not a kind of edit; use 'pop'"),
        (lambda made: made.take_back(made[2]), "not the last message"),
        (lambda made: made.take_back(made[3]), "not the last message"),
        (lambda made: (made.evict([1, 2, 3, 4]), made.take_back(made[0])), "not the last message"),
        (lambda made: (made.evict([2]), made.take_back(made[4])), "not the last message"),
        (lambda made: made.take_back(made.replace([4], Message("user", "x"))), "not the last message"),
    ],
)
def test_mistakes_of_an_editor_are_named(wrong: Any, words: str) -> None:
    with pytest.raises(ContextError, match=words):
        wrong(context("red", "green"))


def test_edits_do_not_nest() -> None:
    made = context("red")
    with pytest.raises(ContextError, match="inside another edit"), made.edit("fold"), made.edit("pop"):
        pass


def test_what_comes_with_an_edit_does_not_leave_with_it() -> None:
    made = context("red")
    with pytest.raises(ContextError, match="segment 3 came with this edit"), made.edit("fold"):
        made.evict([made.replace([2], Message("user", "in short")).id])


def test_the_policy_is_not_asked_in_the_middle_of_an_edit() -> None:
    made = context("red")
    with pytest.raises(ContextError, match="sample first, then edit"), made.edit("fold"):
        made.prompt()


def test_a_message_can_be_taken_back() -> None:
    made = context("red")
    before, record = text_of(made), made.record(Meta())
    made.take_back(made.append(Message("user", "Summarize.")))
    assert (text_of(made), made.record(Meta())) == (before, record)


class Restless(Editor[NoSettings]):
    """Does anything that the verbs allow, and now and then something that they do not."""

    def __init__(self, draw: st.DataObject) -> None:
        super().__init__(NoSettings())
        self.draw = draw

    async def before_turn(self, context: Context, ask: Ask) -> None:
        for _ in range(self.draw.draw(st.integers(0, 3))):
            grouped = self.draw.draw(st.booleans())
            kind = self.draw.draw(st.sampled_from(KINDS))
            with contextlib.suppress(ContextError), context.edit(kind) if grouped else contextlib.nullcontext():
                for _ in range(self.draw.draw(st.integers(1, 3))):
                    await self.one(context, ask)

    async def one(self, context: Context, ask: Ask) -> None:
        known = [segment.id for segment in context.segments]
        some = st.lists(st.integers(0, max(known) + 2), max_size=3, unique=True)
        match self.draw.draw(st.sampled_from(["evict", "replace", "restore", "append", "ask"])):
            case "evict":
                context.evict(self.draw.draw(some))
            case "replace":
                context.replace(self.draw.draw(some), Message("user", "in short"))
            case "restore":
                context.restore(self.draw.draw(some), self.draw.draw(st.none() | st.integers(0, len(known) + 1)))
            case "append":
                context.append(Message("user", "and now?"))
            case "ask":
                await ask(Message("user", "Summarize."), self.draw.draw(st.integers(1, 9)))


@given(st.data())
def test_whatever_an_editor_does_the_record_says_what_the_policy_saw(data: st.DataObject) -> None:
    says = st.sampled_from([call("search", query="a"), call("nonsense"), "<tool_call>{", ANSWER])
    engine = Scripted(lambda prompt: data.draw(says))
    record = rolled_out(engine, lambda: Restless(data), turns=data.draw(st.integers(1, 6)), context_tokens=600)
    assert "error" not in record.meta.extra


def test_a_failed_edit_inside_a_turn_fails_the_rollout_and_loses_nothing() -> None:
    class Wrong(Editor[NoSettings]):
        async def before_turn(self, context: Context, ask: Ask) -> None:
            if len(context.body) > 2:
                context.evict([0])

    engine = Scripted([call("search", query="a"), call("search", query="b"), ANSWER])
    record = asyncio.run(begin(engine, lambda: Wrong(NoSettings())).run())
    check_conditioning(record, engine)
    assert (record.meta.status, record.meta.reward, record.meta.extra["stop"]) == ("failed", None, "error")
    assert "segment 0 is the prompt" in record.meta.extra["error"]


def test_the_index_of_a_segment_goes_by_its_old_name_too() -> None:
    made = context()
    with pytest.warns(FutureWarning, match=r"Context\.place is now Context\.index"):
        assert made.place(0) == made.index(0) == 0
