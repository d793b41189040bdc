"""Base class of editors, which rewrite the live context.

Every rollout has an editor instance of its own, so an editor may keep state. It decides when and what to edit; the
verbs of :class:`~slime_plugin.rollout.context.Context` do it and log it. All methods are optional:

* :meth:`Editor.actions`: tools that the policy calls to edit its own context, such as ``pop()``;
* :meth:`Editor.before_turn`: called before every turn, for rules such as "when it gets too long";
* :meth:`Editor.before_answer`: called when the policy is about to answer.

``docs/extend.md`` walks through a complete one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from slime_plugin.config.custom import NoSettings
from slime_plugin.config.frozen import Frozen
from slime_plugin.config.harness import TcRag
from slime_plugin.config.workload import Workload
from slime_plugin.rollout.context import Context, Segment
from slime_plugin.rollout.messages import Message
from slime_plugin.rollout.tools.tool import Schema

SettingsType = TypeVar("SettingsType", bound=Frozen)

Ask = Callable[[Message, int], Awaitable[Segment | None]]
"""Ask the policy something outside of its turns: append the message, and a reply of at most that many tokens. Returns
None if the rollout is about to end, because a limit was reached or it was stopped."""


@dataclass(frozen=True, slots=True)
class Action:
    """A tool by which the policy edits its own context."""

    schema: Schema
    run: Callable[[Context, Mapping[str, Any]], str]
    """Executes a call. Returns the tool result; an empty text appends none."""


class Editor(Generic[SettingsType]):
    """Edits nothing. A subclass overrides what it needs."""

    Settings: ClassVar[type[Frozen]] = NoSettings
    """The keys of ``harness:`` beside ``type``, validated before the first rollout."""
    workload: ClassVar[Workload] = TcRag.workload
    """Of an editor by import path: an average rollout, for ``memorywalker plan``."""

    def __init__(self, settings: SettingsType) -> None:
        self.settings = settings

    def actions(self) -> Iterable[Action]:
        return ()

    async def before_turn(self, context: Context, ask: Ask) -> None:
        pass

    def before_answer(self, context: Context, draft: Segment | None) -> bool:
        """Called when the policy called no tool, so ``draft`` would end the rollout; or with None before its last turn.

        Return True if there is a draft and the context was edited so that the policy has to answer again.
        """
        return False
