"""Render messages as tokens: :mod:`.chatml` for ChatML and Qwen, :mod:`.template` for any other chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from slime_plugin.rollout.chat.chat import Chat, ChatError
from slime_plugin.rollout.chat.chatml import ChatML

__all__ = ["Chat", "ChatError", "ChatML", "load_chat"]


def load_chat(folder: Path, kind: Literal["auto", "chatml", "template"] = "auto", *, thinking: bool = True) -> Chat:
    """Return the renderer for the tokenizer of a Hugging Face checkpoint."""
    if not (folder / "tokenizer.json").is_file() and kind != "template":
        raise ChatError(
            f"{folder}: there is no tokenizer.json; name the folder of a Hugging Face checkpoint with a tokenizer"
        )
    if kind != "template":
        try:
            return ChatML.load(folder, thinking=thinking)
        except ChatError:
            if kind == "chatml":
                raise
    from slime_plugin.rollout.chat.template import TemplateChat  # needs jinja, and transformers, which takes seconds

    return TemplateChat.load(folder, thinking=thinking)
