"""What an editor is: the part of a harness that rewrites the live context.

An editor is made anew for every rollout, so it may keep state. It says when and what to edit; the verbs of
:class:`~slime_plugin.bridge.context.Context` do it and log it. All of these are optional:

* :meth:`Editor.actions`: tools that the policy calls to edit its own context, such as ``pop()``;
* :meth:`Editor.before_turn`: called before every turn, for rules such as "when it gets too long";
* :meth:`Editor.before_answer`: called when the policy is about to answer.

``docs/extend.md`` walks through a complete one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from slime_plugin.bridge.context import Context, Segment
from slime_plugin.bridge.messages import Message
from slime_plugin.bridge.tools.base import Schema
from slime_plugin.config.frozen import Frozen

Knobs = TypeVar("Knobs", bound=Frozen)

Ask = Callable[[Message, int], Awaitable[Segment | None]]
"""Ask the policy something, outside of its turns: the message is appended, and so is what the policy samples, with at
most that many tokens. None if the rollout is about to end, because a limit was reached or it was stopped."""


@dataclass(frozen=True, slots=True)
class Action:
    """A tool by which the policy edits its own context."""

    schema: Schema
    run: Callable[[Context, Mapping[str, Any]], str]
    """Carries a call out. What it returns is the tool result; an empty text is none."""


class NoSettings(Frozen):
    """For an editor that has nothing to set."""


class Editor(Generic[Knobs]):
    """Edits nothing. A subclass overrides what it needs."""

    Settings: ClassVar[type[Frozen]] = NoSettings
    """The keys that ``harness:`` takes beside ``type``; checked before anything starts."""

    def __init__(self, settings: Knobs) -> None:
        self.settings = settings

    def actions(self) -> Iterable[Action]:
        return ()

    async def before_turn(self, context: Context, ask: Ask) -> None:
        pass

    def before_answer(self, context: Context, draft: Segment | None) -> bool:
        """The policy called no tool, so it is about to end with ``draft``; or it has one turn left (``draft`` is None).

        True if there is a draft and the context was edited so that the policy is to answer anew.
        """
        return False
