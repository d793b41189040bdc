"""The environment of a cell: editor, tools, chat, reward and limits, shared by all of its rollouts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from slime_plugin.config.cell import Cell
from slime_plugin.config.rollout import Rollout
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.base_rollout import BaseRollout
from slime_plugin.rollout.chat import load_chat
from slime_plugin.rollout.chat.chat import Chat
from slime_plugin.rollout.editors import Editor, editor_factory
from slime_plugin.rollout.engine.engine import Engine
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.reward import Outcome, build_reward
from slime_plugin.rollout.tools import Tool, open_tools
from slime_plugin.rollout.turn_loop import EditorRollout

RolloutHandle = BaseRollout[Any]
"""One rollout, of an editor or of an agent."""


class RolloutEnvironment(Protocol):
    """Opens rollouts: of an editor, or of an agent behind the tap."""

    @property
    def name(self) -> str: ...
    @property
    def limits(self) -> Rollout: ...
    @property
    def chat(self) -> Chat: ...
    @property
    def reward(self) -> Callable[[Outcome], Awaitable[float]]: ...

    def begin(self, engine: Engine, question: Question, id: str, seed: int | None = None) -> RolloutHandle:
        """Create a rollout of a question."""
        ...


@dataclass(frozen=True, slots=True)
class EditorEnvironment:
    """Opens rollouts of an editor."""

    name: str
    editor: Callable[[], Editor[Any]]
    """Creates the editor of one rollout."""
    tools: Mapping[str, Tool]
    chat: Chat
    reward: Callable[[Outcome], Awaitable[float]]
    limits: Rollout

    def begin(self, engine: Engine, question: Question, id: str, seed: int | None = None) -> EditorRollout:
        return EditorRollout(self, engine, question, id, seed)


def open_chat(cell: Cell) -> Chat:
    """The chat format of the policy. Its checkpoint has to exist."""
    model = cell.require_model()
    if not model.is_dir():
        raise ConfigError(f"model: there is no folder {model}")
    return load_chat(model, cell.rollout.chat, thinking=cell.rollout.thinking)


@asynccontextmanager
async def open_editor_environment(cell: Cell, chat: Chat | None = None) -> AsyncIterator[EditorEnvironment]:
    """Open the environment of a cell. Invalid settings and missing API keys are refused here."""
    chat = chat or open_chat(cell)
    editor, reward = editor_factory(cell.harness), build_reward(cell.reward)
    actions = [action.schema.name for action in editor().actions()]
    async with open_tools(cell.tools) as tools:
        taken = next((name for name in actions if name in tools), None)
        if taken is not None:
            raise ConfigError(f"tools: the editor {cell.harness.type} has a tool {taken!r} of its own; rename yours")
        yield EditorEnvironment(cell.harness.type, editor, tools, chat, reward, cell.rollout)
