"""What all rollouts of a cell share: its editor, tools, chat, reward and limits. Everything but the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slime_plugin.bridge.chat import load_chat
from slime_plugin.bridge.chat.base import Chat
from slime_plugin.bridge.editors import Editor, editor_factory
from slime_plugin.bridge.engine.base import Engine
from slime_plugin.bridge.messages import Question
from slime_plugin.bridge.reward import Outcome, build_reward
from slime_plugin.bridge.session import Session
from slime_plugin.bridge.tools import Tool, open_tools
from slime_plugin.config.cell import Cell
from slime_plugin.config.rollout import Rollout
from slime_plugin.errors import ConfigError
from slime_plugin.record import Record


class Running(Protocol):
    """A rollout that was begun."""

    @property
    def turns(self) -> int:
        """How often the policy was asked so far."""
        ...

    async def run(self) -> Record:
        """The record of the rollout. Raises nothing but cancellation."""
        ...

    def stop(self) -> None:
        """End soon, as aborted, with what there is. May be called at any time, any number of times."""
        ...


class Surroundings(Protocol):
    """What the policy works in: a harness of ours, or an agent that is served through the tap."""

    @property
    def limits(self) -> Rollout: ...
    @property
    def chat(self) -> Chat: ...

    def begin(self, engine: Engine, question: Question, id: str, seed: int | None = None) -> Running:
        """One rollout of one question."""
        ...


@dataclass(frozen=True, slots=True)
class Harness:
    """The surroundings of the policy."""

    name: str
    editor: Callable[[], Editor[Any]]
    """Makes the editor of one session."""
    tools: Mapping[str, Tool]
    chat: Chat
    reward: Callable[[Outcome], Awaitable[float]]
    limits: Rollout

    def begin(self, engine: Engine, question: Question, id: str, seed: int | None = None) -> Session:
        return Session(self, engine, question, id, seed)


def check_model(cell: Cell) -> Path:
    """The folder of the policy."""
    if cell.model is None:
        raise ConfigError("model: missing; name the folder of a Hugging Face checkpoint with its tokenizer")
    if not cell.model.is_dir():
        raise ConfigError(f"model: there is no folder {cell.model}")
    return cell.model


@asynccontextmanager
async def open_harness(cell: Cell, chat: Chat | None = None) -> AsyncIterator[Harness]:
    """The harness of a cell. Whatever is wrong with its settings, missing keys among them, is told here."""
    if chat is None:
        chat = load_chat(check_model(cell), cell.rollout.chat, thinking=cell.rollout.thinking)
    editor, reward = editor_factory(cell.harness), build_reward(cell.reward)
    actions = [action.schema.name for action in editor().actions()]
    async with open_tools(cell.tools) as tools:
        taken = next((name for name in actions if name in tools), None)
        if taken is not None:
            raise ConfigError(
                f"tools: {taken!r} is what the editor {cell.harness.type} calls a tool of its own; rename it"
            )
        yield Harness(cell.harness.type, editor, tools, chat, reward, cell.rollout)
