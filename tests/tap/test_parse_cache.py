"""What was read and placed before is not read and placed again, and nobody can tell by the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.engine.engine import Generation
from slime_plugin.tap.blocks import Block, Turn, parse_turn
from slime_plugin.tap.context_tree import ContextTree
from slime_plugin.tap.payload import Payload, TapError
from slime_plugin.tap.wire import WIRE_FORMATS
from slime_plugin.tap.wire.parts_builder import CACHED_CONVERSATIONS, ParseCache
from tests.conftest import ROOT
from tests.tap.engines import sampled, spell
from tests.tap.test_wire_formats import (
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


def outcome(path: str, memory: ParseCache | None, messages: list[dict[str, Any]], **fields: Any) -> object:
    try:
        return repr(WIRE_FORMATS[path].read(body(path, messages, **fields), memory))  # tells 1 from True
    except TapError as error:
        return error.kind, str(error), error.param


@pytest.mark.parametrize("path", KEY)
@given(data=st.data())
def test_reading_with_a_memory_gives_the_same(path: str, data: st.DataObject) -> None:
    memory = ParseCache()
    tools = {"tools": TOOLS} if path == ANTHROPIC else {}
    for messages in data.draw(histories(path)):
        broken = {"model": 7} if data.draw(st.integers(0, 9)) == 0 else {}  # refused after all of it was read
        assert outcome(path, memory, messages, **tools, **broken) == outcome(path, None, messages, **tools, **broken)


def test_a_memory_is_of_one_system_message_and_one_dialect() -> None:
    memory = ParseCache()
    messages = [HI, said("assistant", text("look")), HI]
    for path in (ANTHROPIC, CHAT):
        for system in ("one", "two"):
            fields = {"system": system} if path == ANTHROPIC else {}
            read = WIRE_FORMATS[path].read(body(path, messages, **fields), memory)
            assert read == WIRE_FORMATS[path].read(body(path, messages, **fields))


# Placing


class Growing:
    """A conversation in which the policy looks at one thing after the other."""

    def __init__(self, chat: ChatML, *, keep_thoughts: bool) -> None:
        self.chat, self.keep_thoughts = chat, keep_thoughts
        self.contexts, self.memory = ContextTree(chat, keep_thoughts=keep_thoughts), ParseCache()
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Look at all of it."}]

    def read(self, memory: ParseCache | None) -> Payload:
        return WIRE_FORMATS[ANTHROPIC].read(body(ANTHROPIC, self.messages, system="You look."), memory)

    def turn(self) -> None:
        at = self.contexts.insert(self.contexts.match(self.read(self.memory)))
        number = len(self.contexts.turns)
        words = spell(f"number {number}", [("look", {"at": number})], f"at {number}?")
        tokens = sampled(self.chat, words)
        said_ = parse_turn(self.chat.text(tokens), f"t{number}", max_calls=None)
        generation = Generation(tokens, (-1.0,) * len(tokens), "stop", ())
        self.contexts.add_turn(Turn(f"t{number}", number, at.id, generation, said_, ""))
        thought = block("thinking", thinking=said_.thought, signature=f"t{number}")
        calls = [block("tool_use", id=call.id, name=call.name, input=call.arguments) for call in said_.calls]
        self.messages.append(said("assistant", thought, text(said_.text), *calls))
        self.messages.append(said("user", *(result(call.id, f"it is {number}") for call in said_.calls)))

    def placed_anew(self) -> list[int]:
        """Without a memory of either kind, with the same turns at the same places."""
        contexts = ContextTree(self.chat, keep_thoughts=self.keep_thoughts)
        for turn in self.contexts.turns:
            path = self.contexts.nodes[turn.at].blocks()
            node = contexts.root
            for piece in path:
                node = contexts.add(node, piece)
            contexts.add_turn(Turn(turn.id, turn.number, node.id, turn.generation, turn.content, ""))
        return contexts.insert(contexts.match(self.read(None))).tokens()


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
        found, anew = growing.contexts.match(growing.read(growing.memory)), growing.placed_anew()
        assert (growing.contexts.insert(found).tokens(), found.length) == (anew, len(anew))


def test_what_a_turn_takes_does_not_depend_on_those_before(chat: ChatML, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: pieces that are looked at for a request, and messages that are read."""
    growing = Growing(chat, keep_thoughts=True)
    looked: list[str] = []

    def counted(name: str) -> Callable[..., Block]:
        usual = getattr(growing.contexts.renderer, name)

        def look(*parts: Any, **how: Any) -> Block:
            looked.append(name)
            piece: Block = usual(*parts, **how)
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
    memory = ParseCache()
    wire_format = WIRE_FORMATS[CHAT]

    def messages(agent: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"You are {agent}."}, *MESSAGES[CHAT][3:4], tool("c1", "1"), *[HI] * 2]

    agents = range(CACHED_CONVERSATIONS + 1)
    first = [wire_format.read(body(CHAT, messages(agent)), memory).parts for agent in agents]
    longer = {agent: wire_format.read(body(CHAT, [*messages(agent), HI]), memory).parts for agent in reversed(agents)}
    cached = [first[agent][0] is longer[agent][0] for agent in agents]
    assert cached == [False] + [True] * CACHED_CONVERSATIONS
