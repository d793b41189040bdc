"""Episodes of a cell, played by the turn loop on any engine: the expert, or the checkpoint in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import load_config
from slime_plugin.config.tools import Bm25, Search
from slime_plugin.record import Record
from slime_plugin.rollout.chat.chat import Chat
from slime_plugin.rollout.engine.engine import Engine
from slime_plugin.rollout.environment import open_editor_environment
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.turn_loop import EditorRollout, rollout_seed

FOLDER = Path(__file__).parent
CONFIGS = FOLDER.parents[1] / "configs" / "small_world"
CELLS = ("search_r1", "tc_rag", "agentfold", "memexrl")


def load_cell(name: str, corpus: Path) -> Cell:
    """A cell of ``configs/small_world``, over another corpus."""
    cell = load_config(CONFIGS / f"{name}.yaml", Cell)
    tools = []
    for tool in cell.tools:
        assert isinstance(tool, Search), f"{name}.yaml: {tool.type} where a search was expected"
        tools.append(tool.model_copy(update={"backend": Bm25(corpus=corpus)}))
    return cell.model_copy(update={"tools": tuple(tools)})


async def play(cell: Cell, engine: Engine, chat: Chat, questions: Sequence[Question], seed: int = 0) -> list[Record]:
    """One rollout of each question, all at once; in the order of the questions."""
    async with open_editor_environment(cell, chat) as environment:
        rollouts = [
            EditorRollout(environment, engine, q, f"{cell.harness.type}-{q.id}", rollout_seed(seed, q.id))
            for q in questions
        ]
        return await asyncio.gather(*(rollout.run() for rollout in rollouts))
