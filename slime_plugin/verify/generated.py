"""Rows and rollouts to check with, where none are recorded: random, and the same on all ranks."""

from __future__ import annotations

import numpy as np

from slime_plugin.config.cell import Cell
from slime_plugin.config.workload import Workload
from slime_plugin.record import Edit, Meta, Record, Span
from slime_plugin.record.arrays import IntArray

EDITS = 3
"""Of a rollout."""
PROMPT, TURN, EVICTED = 0.25, 0.125, 0.1
"""Shares of a rollout's tokens: the prompt, what is sampled and what is read in each of its turns, and each edit."""

LEAST_PROMPT = 0.05
"""Share of the tape, for a workload that would leave it less."""

QUESTIONS = 200
"""Whose texts the rollouts are made of."""


def random_tree(tokens: int, segments: int, generator: np.random.Generator) -> IntArray:
    """[tokens] parents of a packed row: each segment follows some earlier token, and one in eight begins a new row."""
    starts = np.sort(generator.choice(np.arange(1, tokens), segments - 1, replace=False))
    parent = np.arange(tokens, dtype=np.int32) - 1
    for number, start in enumerate(starts.tolist()):
        parent[start] = -1 if number % 8 == 7 else generator.integers(0, start)
    return parent


def random_records(
    number: int, tokens: int, texts: IntArray, generator: np.random.Generator, most_live: int
) -> list[Record]:
    """Rollouts of about ``tokens`` tokens of ``texts``, whose context is edited between turns and never longer than
    ``most_live``. The policy's own tokens are still to be sampled."""
    size = min(tokens, most_live)
    return [_random_record(i, size, texts, generator) for i in range(number)]


def _random_record(number: int, tokens: int, texts: IntArray, generator: np.random.Generator) -> Record:
    prompt, turn, evicted = (max(2, int(share * tokens)) for share in (PROMPT, TURN, EVICTED))
    generated = [False] * prompt
    live = list(range(prompt))
    views = []
    for layer in range(EDITS + 1):
        for sampled in (True, False, True):
            begin = len(generated)
            generated += [sampled] * (turn // 2)
            live += range(begin, len(generated))
        views.append(_spans(live))
        if layer < EDITS:
            start = int(generator.integers(prompt, len(live) - evicted))
            del live[start : start + evicted]
    first = int(generator.integers(0, len(texts)))
    return _record(f"generated-{number}", number, generated, views, np.roll(texts, -first))


def workload_record(number: int, work: Workload, scale: float, texts: IntArray) -> Record:
    """A rollout of the shape that a harness declares, with all lengths multiplied by ``scale``: its tape, its contexts
    and their mean length, its prefix tree, and what is sampled. The last context is only nearly as long as declared.

    Every layer hears and samples in turns, and every edit takes as much out of the middle of the context.
    """
    layers = max(1, round(work.branches))
    edits = layers - 1
    live, tape = work.live, work.tape
    prompt = LEAST_PROMPT * tape
    if edits:  # of the first context all but what a layer adds; contexts grow evenly from it to the last one
        prompt = max(prompt, (2 * live - work.final - tape / layers) * layers / edits)
    added = (tape - prompt) / layers
    evicted = added - 2 * (live - prompt - added) / edits if edits else 0.0
    kept = (work.trie_tokens - tape) / edits if edits else 0.0  # behind what is evicted, and computed once more
    turns = max(1, round(work.turns / layers))
    said, heard = (max(1, round(scale * tokens / (layers * turns))) for tokens in (work.sampled, work.tape - prompt))
    generated = [False] * max(2, round(scale * prompt))
    context, views = list(range(len(generated))), []
    for layer in range(layers):
        for _ in range(turns):
            begin = len(generated)
            generated += [False] * max(0, heard - said) + [True] * said
            context += range(begin, len(generated))
        views.append(_spans(context))
        if layer < edits:
            stop = max(2, len(context) - round(scale * kept))
            del context[max(1, stop - max(1, round(scale * evicted))) : stop]
    return _record(f"workload-{number}", number, generated, views, np.roll(texts, -number * len(generated)))


def _record(name: str, number: int, generated: list[bool], views: list[list[Span]], texts: IntArray) -> Record:
    return Record(
        tokens=np.resize(texts, len(generated)),
        generated=generated,
        logprobs=[-1.0 if sampled else None for sampled in generated],
        views=views,
        edits=[Edit("fold", "policy")] * (len(views) - 1),
        meta=Meta(id=name, group=number // 2, reward=float(number % 2)),
    )


def texts_of(cell: Cell, vocabulary: int, generator: np.random.Generator) -> IntArray:
    """Return the tokens of the cell's questions; random ones without a file of questions or a tokenizer."""
    from slime_plugin.rollout.questions import read_questions

    questions, tokenizer = cell.rollout.questions, cell.require_model() / "tokenizer.json"
    if questions is None or not questions.is_file() or not tokenizer.is_file():
        return generator.integers(0, vocabulary, 1 << 14).astype(np.int32)
    from tokenizers import Tokenizer

    texts = [question.text for question in read_questions(questions)[:QUESTIONS]]
    ids = Tokenizer.from_file(str(tokenizer)).encode("\n".join(texts), add_special_tokens=False).ids
    return np.array(ids, dtype=np.int32)


def _spans(positions: list[int]) -> list[Span]:
    """Tape positions in context order as spans."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(np.array(positions), breaks)]
