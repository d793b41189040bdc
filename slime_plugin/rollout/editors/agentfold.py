"""AgentFold: a context that has grown too long is folded into a summary."""

from __future__ import annotations

from slime_plugin.config.harness import AgentFold
from slime_plugin.rollout.context import Context
from slime_plugin.rollout.editors.editor import Ask, Editor
from slime_plugin.rollout.messages import Message


class AgentFoldEditor(Editor[AgentFold]):
    """Triggered by the length of the context.

    The summary is sampled by the policy under the long context, and trained there. In the short
    context the same tokens replace what they summarise.
    """

    Settings = AgentFold

    async def before_turn(self, context: Context, ask: Ask) -> None:
        prefix = context.body[: max(0, len(context.body) - self.settings.keep)]
        if len(context) <= self.settings.threshold or len(prefix) < 2:  # a single summary cannot be folded further
            return
        summary = await ask(Message("user", self.settings.request), self.settings.summary_tokens)
        if summary is None:
            return
        request = context.segments[context.index(summary.id) - 1]
        with context.edit("fold", author="policy"):
            context.evict([*(segment.id for segment in prefix), request.id, summary.id])
            context.restore([summary.id], at=1)


EDITOR = AgentFoldEditor
