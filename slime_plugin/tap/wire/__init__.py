"""Wire formats by URL path.

wire_format.py       their base class, and JSON of what a model wrote
fields.py            checked access to the fields of a request
parts_builder.py     messages -> canonical parts, for all formats; what was parsed before is cached
anthropic.py         /v1/messages, /v1/messages/count_tokens
openai.py            what the next two share
chat_completions.py  /v1/chat/completions
responses.py         /v1/responses, /v1/responses/input_tokens
"""

from __future__ import annotations

from slime_plugin.tap.wire.anthropic import Anthropic
from slime_plugin.tap.wire.chat_completions import ChatCompletions
from slime_plugin.tap.wire.responses import Responses
from slime_plugin.tap.wire.wire_format import WireFormat

__all__ = ["WIRE_FORMATS", "WireFormat"]

WIRE_FORMATS: dict[str, WireFormat] = {
    "/v1/messages": Anthropic(),
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
}
