"""Wire formats by the path they are spoken on.

base.py          what a dialect is, and JSON of what a model wrote
reading.py       fields of a request: what is checked, and how a sender is told
conversation.py  messages -> parts in canonical form, for all of them; what was read before is remembered
anthropic.py     /v1/messages, /v1/messages/count_tokens
openai.py        what the next two share
chat.py          /v1/chat/completions
responses.py     /v1/responses, /v1/responses/input_tokens
"""

from __future__ import annotations

from slime_plugin.tap.dialects.anthropic import Anthropic
from slime_plugin.tap.dialects.base import Dialect, read_arguments, write_arguments
from slime_plugin.tap.dialects.chat import Chat
from slime_plugin.tap.dialects.responses import Responses

__all__ = ["DIALECTS", "Anthropic", "Chat", "Dialect", "Responses", "read_arguments", "write_arguments"]

DIALECTS: dict[str, Dialect] = {
    "/v1/messages": Anthropic(),
    "/v1/chat/completions": Chat(),
    "/v1/responses": Responses(),
}
