"""Any Hugging Face chat template that only appends; others are refused.

A template renders whole conversations. A piece is found by rendering a conversation with and without it: the longer
rendering has to begin with the shorter one, in text and in tokens. Then conversations of all kinds of pieces have to be
the concatenation of these. A template that rewrites earlier messages (Qwen3's strips old thoughts) is refused with the
first token that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import jinja2

from slime_plugin.rollout.chat.chat import ChatError, TokenizerText, ToolDescription, check_vocabulary, encodable
from slime_plugin.rollout.messages import Message

_QUESTION = {"role": "user", "content": "Which question?"}
_REPLY = {"role": "assistant", "content": "<think>\nThis or that.\n</think>\n\nThis one."}
_RESULT = Message("tool", "One result.")
_REQUEST = Message("user", "One more thing.")

_USUAL = (None, _RESULT, None, _RESULT, _RESULT, None, _REQUEST, None)
"""Messages after the question in rollouts without edits; None is a reply."""
_EDITED = (None, _RESULT, _REQUEST, _REQUEST, None, None, _REQUEST, _RESULT)
"""Neighbours that only occur after an edit: a template may refuse them, but not render them differently."""

CHECKED_CACHE_SIZE = 256
"""Combinations of system message and tools that passed the check."""


class TemplateTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any: ...
    def encode(self, text: str, **settings: Any) -> Any: ...
    def decode(self, token_ids: Any, **settings: Any) -> Any: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...


class _TemplateError(ChatError):
    """The template raised an error itself."""


class TemplateChat(TokenizerText):
    """Renders with the tokenizer's template, and checks every piece."""

    def __init__(self, tokenizer: TemplateTokenizer, *, thinking: bool = True) -> None:
        self._tokenizer = tokenizer
        self._settings: dict[str, Any] = {} if thinking else {"enable_thinking": False}
        self._control = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        opened = self._render([_QUESTION], add_generation_prompt=True)
        replied = opened + _REPLY["content"]
        self._opening = self._continuation("a turn", self._render([_QUESTION]), opened)
        self._reply = self._continuation("the text of a turn", opened, replied)
        self._closing = self._continuation("the end of a turn", replied, self._render([_QUESTION, _REPLY]))
        if not self._closing or self._closing[0] not in self._control:
            raise ChatError(
                "the chat template does not end a turn with a control token that could stop it, but with "
                f"{self._named(self._closing, 0)}; set rollout.chat to chatml, or use a template that does"
            )
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset({self._closing[0]} if eos is None else {self._closing[0], eos})
        self._checked: set[tuple[str, tuple[str, ...]]] = set()
        self.prompt("", _QUESTION["content"], ())

    @classmethod
    def load(cls, folder: Path, *, thinking: bool = True) -> TemplateChat:
        from transformers import AutoTokenizer  # import takes seconds, and ChatML does not need it

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ChatError(f"{folder}: there is no tokenizer that transformers can load: {error}") from error
        if not tokenizer.chat_template:
            raise ChatError(f"{folder}: the tokenizer has no chat template; set rollout.chat to chatml")
        check_vocabulary(folder, len(tokenizer))
        return cls(tokenizer, thinking=thinking)

    def prompt(self, system: str, question: str, tools: Sequence[ToolDescription]) -> list[int]:
        start = [{"role": "system", "content": self._escape(system)}] if system else []
        start.append({"role": "user", "content": self._escape(question)})
        schemas = [tool.to_json() for tool in tools] or None
        ids = self._encode(self._render(start, tools=schemas))
        kind = (system, tuple(tool.name for tool in tools))
        if kind not in self._checked:
            self._check(start, ids, _USUAL, tools=schemas)
            with suppress(_TemplateError):
                self._check(start, ids, _EDITED, tools=schemas)
            if len(self._checked) >= CHECKED_CACHE_SIZE:
                self._checked.clear()
            self._checked.add(kind)
        return ids

    def render(self, message: Message) -> list[int]:
        before = [_QUESTION, _REPLY]
        whole = self._render([*before, self._as_dict(message)])
        piece = self._continuation(f"a message of role {message.role}", self._render(before), whole)
        if not piece:
            raise ChatError(f"the chat template leaves messages of role {message.role} out; set rollout.chat to chatml")
        return piece

    def head(self, system: str, tools: Sequence[ToolDescription]) -> list[int]:
        question = self.render(Message("user", _QUESTION["content"]))
        start = self.prompt(system, _QUESTION["content"], tools)
        if start[-len(question) :] != question:
            raise ChatError(
                "the chat template renders the first question differently from later ones, so what precedes it "
                "cannot be determined; set rollout.chat to chatml"
            )
        return start[: -len(question)]

    def reply(self, text: str) -> list[int]:
        return [*self._opening, *self._encode_text(text), *self._closing]

    def open_turn(self) -> list[int]:
        return self._opening

    def close_turn(self, sampled: Sequence[int]) -> list[int]:
        if not sampled or sampled[-1] not in self.stop_ids:
            return self._closing
        return self._closing[1:]

    def _check(
        self, start: list[dict[str, str]], ids: list[int], following: Sequence[Message | None], **settings: Any
    ) -> None:
        """Check that pieces do not depend on their neighbours, which edits change."""
        messages, wanted = list(start), list(ids)
        for message in following:
            if message is None:
                opened = self._encode(self._render(messages, add_generation_prompt=True, **settings))
                self._compare("a turn", [*wanted, *self._opening], opened)
            messages.append(_REPLY if message is None else self._as_dict(message))
            wanted += [*self._opening, *self._reply, *self._closing] if message is None else self.render(message)
            what = " after ".join(f"a message of role {entry['role']}" for entry in messages[:-3:-1])
            self._compare(what, wanted, self._encode(self._render(messages, **settings)))

    def _continuation(self, what: str, before: str, whole: str) -> list[int]:
        """Tokens by which ``whole`` continues ``before``."""
        before_ids, whole_ids = self._encode(before), self._encode(whole)
        self._compare(what, before_ids, whole_ids[: len(before_ids)])
        if not whole.startswith(before):  # equal tokens of different text, from a lossy tokenizer
            raise ChatError(
                f"the chat template rewrites the conversation when {what} is added; set rollout.chat to chatml"
            )
        return whole_ids[len(before_ids) :]

    def _compare(self, what: str, wanted: list[int], found: list[int]) -> None:
        if wanted == found:
            return
        at = next(  # if one is a prefix of the other, they differ where it ends
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

    def _as_dict(self, message: Message) -> dict[str, str]:
        entry = {"role": message.role, "content": self._escape(message.content)}
        return entry if message.name is None else {**entry, "name": self._escape(message.name)}

    def _escape(self, text: str) -> str:
        """Insert a space into control tokens in a text, so that they stay text."""
        for token in self._control.values():
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _render(self, messages: Sequence[Mapping[str, str]], **settings: Any) -> str:
        try:
            settings = {**self._settings, **settings}
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **settings))
        except (jinja2.TemplateError, ValueError, TypeError, LookupError) as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise _TemplateError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(encodable(text), add_special_tokens=False))

    def _encode_text(self, text: str) -> list[int]:
        return self._encode(self._escape(text))
