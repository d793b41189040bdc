"""Any Hugging Face chat template that can be continued token by token; others are refused.

A template renders whole conversations. Its pieces are found by rendering one with and without the piece: what the
longer rendering has more is the piece, if it begins with the shorter one, in text and in tokens. Then conversations of
all kinds of pieces are rendered, and have to be the concatenation of these. A template that rewrites earlier messages
when later ones come (as those do that strip old thoughts) is refused with the first token that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import jinja2

from slime_plugin.bridge.chat.base import ChatError, Described, check_vocabulary, cut_note, encodable
from slime_plugin.bridge.messages import Message

_QUESTION = {"role": "user", "content": "Which question?"}
_REPLY = {"role": "assistant", "content": "<think>\nThis or that.\n</think>\n\nThis one."}
_RESULT = Message("tool", "One result.")
_REQUEST = Message("user", "One more thing.")

_USUAL = (None, _RESULT, None, _RESULT, _RESULT, None, _REQUEST, None)
"""What follows the question in rollouts without edits; None is a reply."""
_EDITED = (None, _RESULT, _REQUEST, _REQUEST, None, None, _REQUEST, _RESULT)
"""Neighbours that only an edit brings together: a template may refuse them, but not render them in another way."""

CHECKED_KEPT = 256
"""Beginnings that are known to render as they should."""


class TemplateTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any: ...
    def encode(self, text: str, **settings: Any) -> Any: ...
    def decode(self, token_ids: Any, **settings: Any) -> Any: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...


class _RefusalError(ChatError):
    """The template's own."""


class TemplateChat:
    """Renders with the tokenizer's own template, and checks every piece."""

    def __init__(self, tokenizer: TemplateTokenizer, *, thinking: bool = True) -> None:
        self._tokenizer = tokenizer
        self._settings: dict[str, Any] = {} if thinking else {"enable_thinking": False}
        self._control = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        opened = self._render([_QUESTION], add_generation_prompt=True)
        spoken = opened + _REPLY["content"]
        self._opening = self._continuation("a turn", self._render([_QUESTION]), opened)
        self._reply = self._continuation("what is said in a turn", opened, spoken)
        self._closing = self._continuation("the end of a turn", spoken, self._render([_QUESTION, _REPLY]))
        if not self._closing or self._closing[0] not in self._control:
            raise ChatError(
                "the chat template ends a turn with no control token that could stop it, but with "
                f"{self._named(self._closing, 0)}; set rollout.chat to chatml, or use a template that does"
            )
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset({self._closing[0]} if eos is None else {self._closing[0], eos})
        self._checked: set[tuple[str, tuple[str, ...]]] = set()
        self.prompt("", _QUESTION["content"], ())

    @classmethod
    def load(cls, folder: Path, *, thinking: bool = True) -> TemplateChat:
        from transformers import AutoTokenizer  # takes seconds, and ChatML does without it

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ChatError(f"{folder}: there is no tokenizer that transformers can load: {error}") from error
        if not tokenizer.chat_template:
            raise ChatError(f"{folder}: the tokenizer has no chat template; set rollout.chat to chatml")
        check_vocabulary(folder, len(tokenizer))
        return cls(tokenizer, thinking=thinking)

    def prompt(self, system: str, question: str, tools: Sequence[Described]) -> list[int]:
        begun = [{"role": "system", "content": self._harmless(system)}] if system else []
        begun.append({"role": "user", "content": self._harmless(question)})
        schemas = [tool.to_json() for tool in tools] or None
        ids = self._encode(self._render(begun, tools=schemas))
        kind = (system, tuple(tool.name for tool in tools))
        if kind not in self._checked:
            self._check(begun, ids, _USUAL, tools=schemas)
            with suppress(_RefusalError):
                self._check(begun, ids, _EDITED, tools=schemas)
            if len(self._checked) >= CHECKED_KEPT:
                self._checked.clear()
            self._checked.add(kind)
        return ids

    def render(self, message: Message) -> list[int]:
        before = [_QUESTION, _REPLY]
        whole = self._render([*before, self._said(message)])
        piece = self._continuation(f"a message of role {message.role}", self._render(before), whole)
        if not piece:
            raise ChatError(f"the chat template leaves messages of role {message.role} out; set rollout.chat to chatml")
        return piece

    def head(self, system: str, tools: Sequence[Described]) -> list[int]:
        question = self.render(Message("user", _QUESTION["content"]))
        begun = self.prompt(system, _QUESTION["content"], tools)
        if begun[-len(question) :] != question:
            raise ChatError(
                "the chat template renders the first question in another way than later ones, so what stands before it "
                "cannot be told; set rollout.chat to chatml"
            )
        return begun[: -len(question)]

    def reply(self, text: str) -> list[int]:
        return [*self._opening, *self._encode(self._harmless(text)), *self._closing]

    def open_turn(self) -> list[int]:
        return self._opening

    def close_turn(self, sampled: Sequence[int]) -> list[int]:
        if not sampled or sampled[-1] not in self.stop_ids:
            return self._closing
        return self._closing[1:]

    def text(self, sampled: Sequence[int]) -> str:
        spoken = sampled[:-1] if sampled and sampled[-1] in self.stop_ids else sampled
        return str(self._tokenizer.decode(list(spoken), skip_special_tokens=False))

    def cut(self, text: str, tokens: int) -> str:
        ids = self._encode(self._harmless(text))
        if len(ids) <= tokens:
            return text
        kept = str(self._tokenizer.decode(ids[:tokens], skip_special_tokens=False))
        return kept.rstrip("\ufffd") + cut_note(tokens, len(ids))  # the last character may be cut in half

    def _check(
        self, begun: list[dict[str, str]], ids: list[int], following: Sequence[Message | None], **settings: Any
    ) -> None:
        """A piece must not depend on what stands around it: an edit changes that."""
        messages, wanted = list(begun), list(ids)
        for message in following:
            if message is None:
                opened = self._encode(self._render(messages, add_generation_prompt=True, **settings))
                self._compare("a turn", [*wanted, *self._opening], opened)
            messages.append(_REPLY if message is None else self._said(message))
            wanted += [*self._opening, *self._reply, *self._closing] if message is None else self.render(message)
            what = " after ".join(f"a message of role {said['role']}" for said in messages[:-3:-1])
            self._compare(what, wanted, self._encode(self._render(messages, **settings)))

    def _continuation(self, what: str, before: str, whole: str) -> list[int]:
        """The tokens by which ``whole`` is longer."""
        before_ids, whole_ids = self._encode(before), self._encode(whole)
        self._compare(what, before_ids, whole_ids[: len(before_ids)])
        if not whole.startswith(before):  # equal tokens of different text: a lossy tokenizer
            raise ChatError(
                f"the chat template rewrites the conversation when {what} is added; set rollout.chat to chatml"
            )
        return whole_ids[len(before_ids) :]

    def _compare(self, what: str, wanted: list[int], found: list[int]) -> None:
        if wanted == found:
            return
        at = next(  # one may be the beginning of the other: then they differ where it ends
            (i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), min(len(wanted), len(found))
        )
        was, now = (self._named(ids, at) for ids in (wanted, found))
        raise ChatError(
            f"the chat template cannot be continued token by token: with {what} added, token {at} is {now} where it "
            f"was {was}; set rollout.chat to chatml, or use a template that only appends"
        )

    def _named(self, ids: list[int], at: int) -> str:
        if at >= len(ids):
            return "absent"
        return f"{ids[at]} ({self._tokenizer.convert_ids_to_tokens(ids[at])!r})"

    def _said(self, message: Message) -> dict[str, str]:
        said = {"role": message.role, "content": self._harmless(message.content)}
        return said if message.name is None else {**said, "name": self._harmless(message.name)}

    def _harmless(self, text: str) -> str:
        """With a space in every control token that someone wrote into a text, or it would become one."""
        for token in self._control.values():
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _render(self, messages: Sequence[Mapping[str, str]], **settings: Any) -> str:
        try:
            settings = {**self._settings, **settings}
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **settings))
        except (jinja2.TemplateError, ValueError, TypeError, LookupError) as error:  # a template is somebody's program
            roles = ", ".join(message["role"] for message in messages)
            raise _RefusalError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(encodable(text), add_special_tokens=False))
