"""What was read and placed before is not read and placed again, and nobody can tell by the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.bridge.chat import ChatML
from slime_plugin.bridge.engine.base import Generation
from slime_plugin.tap.contexts import Contexts
from slime_plugin.tap.dialects import DIALECTS
from slime_plugin.tap.dialects.conversation import REMEMBERED, Memory
from slime_plugin.tap.messages import Payload, TapError
from slime_plugin.tap.pieces import Piece, Turn, read_turn
from tests.conftest import ROOT
from tests.tap.engines import sampled, spell
from tests.tap.test_dialects import (
    ANTHROPIC,
    CALL,
    CALL_2,
    CHAT,
    HI,
    ITEM,
    ITEM_2,
    RESPONSES,
    USE,
    USE_2,
    block,
    output,
    result,
    said,
    text,
    tool,
)

KEY = {ANTHROPIC: "messages", CHAT: "messages", RESPONSES: "input"}
SAME: list[dict[str, Any]] = [HI, {"role": "system", "content": "be brief"}, {"role": "user", "content": " "}]
MESSAGES: dict[str, list[dict[str, Any]]] = {
    ANTHROPIC: [
        *SAME,
        said("assistant", text("look"), USE, USE_2),
        said("assistant", block("thinking", thinking="or not", signature="t1"), text("look")),
        said("assistant", USE | {"input": {"a": True}}),
        said("assistant", USE | {"input": {"a": 1}}),
        said("assistant"),
        said("user", result("c2", "two"), text("and"), result("c1", "one")),
        said("user", result("c1", [block("tool_reference", tool_name="found")])),
        said("user", result("c1", "one", is_error=True)),
        said("user", result("c1", "one", is_error=1)),  # refused
        said("robot"),  # refused
    ],
    CHAT: [
        *SAME,
        {"role": "assistant", "content": "look", "tool_calls": [CALL, CALL_2]},
        {"role": "assistant", "content": "look", "reasoning_content": "or not"},
        {"role": "assistant", "content": ""},
        tool("c1", "one"),
        tool("c2", "two"),
        tool("c2", 2),  # refused
    ],
    RESPONSES: [
        *SAME,
        {"role": "assistant", "content": "look"},
        {"role": "assistant", "content": ""},
        block("reasoning", id="rs_t1", summary=[block("summary_text", text="or not")]),
        ITEM,
        ITEM_2,
        output("c1", "one"),
        output("c2", "two"),
        output("c2", 2),  # refused
    ],
}
TOOLS = [{"name": "found", "input_schema": {"type": "object"}, "defer_loading": True}]


@st.composite
def histories(draw: st.DrawFn, path: str) -> list[list[dict[str, Any]]]:
    """Requests, each an earlier one that was cut somewhere and goes on in some way."""
    messages = st.lists(st.sampled_from(MESSAGES[path]), max_size=6)
    requests = [draw(messages)]
    for _ in range(draw(st.integers(1, 6))):
        before = draw(st.sampled_from(requests))
        kept = before[: draw(st.integers(0, len(before)))] if draw(st.booleans()) else before
        requests.append(kept + draw(messages))
    return requests


def body(path: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Parsed anew each time, as from the wire: no two requests share an object."""
    whole: dict[str, Any] = orjson.loads(orjson.dumps({"model": "m", KEY[path]: messages, **fields}))
    return whole


def outcome(path: str, memory: Memory | None, messages: list[dict[str, Any]], **fields: Any) -> object:
    try:
        return repr(DIALECTS[path].read(body(path, messages, **fields), memory))  # tells 1 from True
    except TapError as error:
        return error.kind, str(error), error.param


@pytest.mark.parametrize("path", KEY)
@given(data=st.data())
def test_reading_with_a_memory_gives_the_same(path: str, data: st.DataObject) -> None:
    memory = Memory()
    tools = {"tools": TOOLS} if path == ANTHROPIC else {}
    for messages in data.draw(histories(path)):
        broken = {"model": 7} if data.draw(st.integers(0, 9)) == 0 else {}  # refused after all of it was read
        assert outcome(path, memory, messages, **tools, **broken) == outcome(path, None, messages, **tools, **broken)


def test_a_memory_is_of_one_system_message_and_one_dialect() -> None:
    memory = Memory()
    messages = [HI, said("assistant", text("look")), HI]
    for path in (ANTHROPIC, CHAT):
        for system in ("one", "two"):
            fields = {"system": system} if path == ANTHROPIC else {}
            read = DIALECTS[path].read(body(path, messages, **fields), memory)
            assert read == DIALECTS[path].read(body(path, messages, **fields))


# Placing


class Growing:
    """A conversation in which the policy looks at one thing after the other."""

    def __init__(self, chat: ChatML, *, keep_thoughts: bool) -> None:
        self.chat, self.keep_thoughts = chat, keep_thoughts
        self.contexts, self.memory = Contexts(chat, keep_thoughts=keep_thoughts), Memory()
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Look at all of it."}]

    def read(self, memory: Memory | None) -> Payload:
        return DIALECTS[ANTHROPIC].read(body(ANTHROPIC, self.messages, system="You look."), memory)

    def turn(self) -> None:
        at = self.contexts.place(self.contexts.find(self.read(self.memory)))
        number = len(self.contexts.turns)
        words = spell(f"number {number}", [("look", {"at": number})], f"at {number}?")
        tokens = sampled(self.chat, words)
        said_ = read_turn(self.chat.text(tokens), f"t{number}", most_calls=None)
        generation = Generation(tokens, (-1.0,) * len(tokens), "stop", ())
        self.contexts.add_turn(Turn(f"t{number}", number, at.id, generation, said_, ""))
        thought = block("thinking", thinking=said_.thought, signature=f"t{number}")
        calls = [block("tool_use", id=call.id, name=call.name, input=call.arguments) for call in said_.calls]
        self.messages.append(said("assistant", thought, text(said_.text), *calls))
        self.messages.append(said("user", *(result(call.id, f"it is {number}") for call in said_.calls)))

    def placed_anew(self) -> list[int]:
        """Without a memory of either kind, with the same turns at the same places."""
        contexts = Contexts(self.chat, keep_thoughts=self.keep_thoughts)
        for turn in self.contexts.turns:
            path = self.contexts.nodes[turn.at].pieces()
            node = contexts.root
            for piece in path:
                node = contexts.add(node, piece)
            contexts.add_turn(Turn(turn.id, turn.number, node.id, turn.generation, turn.said, ""))
        return contexts.place(contexts.find(self.read(None))).tokens()


@pytest.fixture(scope="module")
def chat() -> ChatML:
    return ChatML.load(ROOT / "examples" / "small_world" / "model")


@pytest.mark.parametrize("keep_thoughts", [True, False])
def test_placing_what_is_remembered_gives_the_same_tokens(chat: ChatML, keep_thoughts: bool) -> None:
    growing = Growing(chat, keep_thoughts=keep_thoughts)
    changes: dict[int, Callable[[], object]] = {
        3: lambda: growing.messages.append({"role": "user", "content": "And now the rest."}),  # thoughts go
        5: lambda: growing.messages.__delitem__(slice(-2, None)),  # a retry from before, in which they come back
        7: lambda: growing.messages.__setitem__(slice(2, 4), [HI]),  # pruned
        9: lambda: growing.messages.__setitem__(0, HI),
    }
    for step in range(12):
        growing.turn()
        changes.get(step, lambda: None)()
        found, anew = growing.contexts.find(growing.read(growing.memory)), growing.placed_anew()
        assert (growing.contexts.place(found).tokens(), found.length) == (anew, len(anew))


def test_what_a_turn_takes_does_not_depend_on_those_before(chat: ChatML, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: pieces that are looked at for a request, and messages that are read."""
    growing = Growing(chat, keep_thoughts=True)
    looked: list[str] = []

    def counted(name: str) -> Callable[..., Piece]:
        usual = getattr(growing.contexts.renderer, name)

        def look(*parts: Any, **how: Any) -> Piece:
            looked.append(name)
            piece: Piece = usual(*parts, **how)
            return piece

        return look

    for name in ("text", "result", "reply", "turn"):
        monkeypatch.setattr(growing.contexts.renderer, name, counted(name))
    counts = []
    for _ in range(60):
        before = growing.read(growing.memory).parts
        looked.clear()
        growing.turn()
        counts.append(len(looked))
        again = growing.read(growing.memory).parts
        fresh = sum(one is not other for one, other in zip(before, again, strict=False))  # the second is longer
        assert fresh <= 3  # the system message and the last turn with its result
    assert max(counts[3:]) == min(counts[3:]) <= 6


def test_several_conversations_are_remembered_side_by_side() -> None:
    memory = Memory()
    dialect = DIALECTS[CHAT]

    def messages(agent: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"You are {agent}."}, *MESSAGES[CHAT][3:4], tool("c1", "1"), *[HI] * 2]

    first = [dialect.read(body(CHAT, messages(agent)), memory).parts for agent in range(REMEMBERED + 1)]
    longer = [dialect.read(body(CHAT, [*messages(agent), HI]), memory).parts for agent in range(REMEMBERED, -1, -1)][
        ::-1
    ]
    assert [one[0] is other[0] for one, other in zip(first, longer, strict=True)] == [False] + [True] * REMEMBERED
