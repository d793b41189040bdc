"""A model that is large enough for the prompts of real agents, and an engine that says what a script wants.

What is said is the script's; what it is worth is the model's: each turn is scored by a real SGLang server under the
very prompt that it was asked for, as it would have been had it been sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from slime_plugin.record import Record
from slime_plugin.rollout.chat import Chat
from slime_plugin.rollout.engine.engine import EngineError, Generation, Request
from slime_plugin.tree import Trajectory, branches_of
from tests.conftest import ROOT
from tests.tap.engines import sampled


def make_model(folder: Path) -> Path:
    """A random Qwen3 of one layer, and a tokenizer with about 3.5 characters per token of technical English."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("slime_plugin/**/*.py")])
    tokenizer.train([str(path) for path in texts], trainer)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)
    torch.manual_seed(0)
    configure: Any = Qwen3Config
    config = configure(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=131072,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        bos_token_id=None,
        initializer_range=0.3,
    )
    make: Any = Qwen3ForCausalLM
    make(config).save_pretrained(folder)
    return folder


class ScoredScript:
    """Says what ``say`` makes of the prompt's text, scored by a server."""

    def __init__(self, url: str, chat: Chat, say: Callable[[str], str]) -> None:
        self._url, self._chat, self._say = url, chat, say

    async def generate(self, request: Request) -> Generation:
        text = self._chat.text(request.prompt)
        tokens = sampled(self._chat, self._say(text))
        if len(tokens) > request.max_tokens:
            raise EngineError(f"the script says {len(tokens)} tokens where {request.max_tokens} fit")
        body = {
            "input_ids": [*request.prompt, *tokens],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(request.prompt) - 1,
        }
        async with aiohttp.ClientSession() as http, http.post(f"{self._url}/generate", json=body) as answer:
            value = orjson.loads(await answer.read())
        scored = value["meta_info"]["input_token_logprobs"][-len(tokens) :]
        assert [token for _, token, *_ in scored] == list(tokens)
        return Generation(tokens, tuple(float(logprob) for logprob, *_ in scored), "stop", (("1", len(tokens)),))


def mean_logdiff(record: Record, folder: Path) -> float:
    """Mean distance of the log-probabilities in a record from a transformers forward pass over its branches."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    found: list[Any] = []
    for branch in branches_of(Trajectory.of(record)):
        ids = torch.tensor(record.tokens[branch.tape].astype(np.int64))[None]
        at = np.flatnonzero(branch.trained)
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[0, at - 1]
            scores = model.lm_head(hidden).log_softmax(-1)
        mine = scores[torch.arange(len(at)), ids[0, at]].numpy()
        found.append(np.abs(mine - record.logprobs[branch.tape][at]))
    distances = np.concatenate(found)
    assert distances.size == int(record.generated.sum())
    return float(distances.mean())
