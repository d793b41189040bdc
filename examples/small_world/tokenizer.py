"""A tokenizer of a few hundred tokens: every word of the small world is one, everything else is spelt in bytes.

Byte-level BPE without a single merge: a word is in the vocabulary as a whole, or falls apart into its bytes, so any
text survives the round trip. Words follow a space, as they do in facts, queries and answers; the same word without one
would be another token that a small model has to learn anew. The fixed parts of tool calls are single tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples.small_world.world import ATTRIBUTES, FIRST, LAST, RELATIONS, words

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
SEARCH = '\n{"name": "search", "arguments": {"query": "'
POP = '\n{"name": "pop", "arguments": {}}\n'
OFFLOAD = '\n{"name": "memory_offload", "arguments": {"name": "'
RETRIEVE = '\n{"name": "memory_retrieve", "arguments": {"name": "'
CLOSE = '"}}\n'
SCAFFOLDS = (SEARCH, POP, OFFLOAD, RETRIEVE, CLOSE)
OPENING = words("system user assistant append pop fold memex What find Summarize nothing Error 's")
"""Words that no space precedes."""
SMALL = words("is there no tool use the call has not")
VALUES = [value for values in ATTRIBUTES.values() for value in values]
INNER = [*SMALL, *FIRST, *LAST, *RELATIONS, *ATTRIBUTES, *VALUES]

# The same text as ChatML of the package, so that a server that renders messages shows what rollouts show.
TEMPLATE = """\
{%- set ns = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}{%- set ns.system = messages[0].content -%}{%- endif -%}
{%- if tools -%}
{%- set ns.system = ns.system + '\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>' -%}
{%- for tool in tools -%}{%- set ns.system = ns.system + '\\n' + (tool | tojson) -%}{%- endfor -%}
{%- set ns.system = ns.system + '\\n</tools>\\n\\nFor each call write a JSON object with the name of the function and \
its arguments between <tool_call> tags:\\n<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call>' -%}
{%- endif -%}
{%- if ns.system -%}{{- '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- elif not (message.role == 'system' and loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def build() -> Tokenizer:
    """The same ids every time: bytes in alphabetical order, then words, then what is added."""
    whole = [*OPENING, *(f"\u0120{word}" for word in INNER)]  # U+0120 is how byte-level BPE writes a space
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *whole]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (*TAGS, *SCAFFOLDS)])
    return tokenizer


def stop_id(tokenizer: Tokenizer) -> int:
    """Of the token that ends a turn."""
    return _known(tokenizer, "<|im_end|>")


def pad_id(tokenizer: Tokenizer) -> int:
    return _known(tokenizer, "<|endoftext|>")


def _known(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, f"{token} is not a token of this tokenizer; make it with build()"
    return found


def save(folder: Path) -> None:
    """As a Hugging Face folder, written by hand: the same bytes with every version of transformers."""
    tokenizer = build()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
