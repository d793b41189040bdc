"""Teaches a small model the tool protocol, by imitation of a scripted and fallible expert.

    python -m examples.small_world.warm_up --out examples/small_world/model [--steps 400] [--seed 0]

Episodes are played by the turn loop, with the expert for an engine and every editor at work, and laid out as
one row per branch: what is trained is token by token what a rollout will ask of the model. Every batch of episodes has
a world of its own, so that there is nothing to remember and everything to look up. The same steps and seed give the
same weights on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.small_world import model, tokenizer
from examples.small_world.episodes import CELLS, load_cell, play
from examples.small_world.expert import Expert, Noise
from examples.small_world.policy import Policy
from examples.small_world.world import World, write_corpus
from slime_plugin.config.method import LogitTree
from slime_plugin.methods import lay_out
from slime_plugin.record import Record
from slime_plugin.rollout.chat import ChatML

PEOPLE, HOPS = 40, (2, 3)
TOKENS = 2048
"""Of one step, padding included."""
POOL = 40
"""Episodes of each cell that are played at once; their rows are sorted into steps by length."""
REST = 0.05
"""Weight of the tokens that the expert did not say."""
RECALL = 0.05
"""Share of the steps that is spent on facts alone, at first."""
RATE, BETAS, CLIP = 3e-3, (0.9, 0.98), 1.0
MEASURED = 200
"""Questions about unseen names per cell and temperature."""

Row = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Tokens, and the weight of each in the loss."""


@dataclass(frozen=True)
class Tools:
    """What every part of the warm-up needs."""

    tokenizer: Tokenizer
    chat: ChatML
    stop: int

    @classmethod
    def make(cls) -> Tools:
        built = tokenizer.build()
        return cls(built, ChatML(tokenizer.build()), tokenizer.stop_id(built))


def episodes(tools: Tools, number: int, seed: int, noise: Noise) -> list[Record]:
    """A world, and episodes of all cells in it."""
    with tempfile.TemporaryDirectory() as folder:
        world, corpus = World.generate(PEOPLE, hash_of(seed, number)), Path(folder) / "corpus.jsonl"
        write_corpus(corpus, world)

        async def all_cells() -> list[Record]:
            found = []
            for i, name in enumerate(CELLS):
                cell = load_cell(name, corpus)
                asked = world.questions(POOL, HOPS, hash_of(seed, number, i))
                expert = Expert(tools.tokenizer, noise, hash_of(seed, number, i))
                found += await play(cell, expert, tools.chat, asked)
            return found

        return asyncio.run(all_cells())


def hash_of(*numbers: int) -> int:
    """One seed from several numbers."""
    return random.Random(" ".join(map(str, numbers))).getrandbits(31)


def branches(record: Record) -> Iterator[Row]:
    for row in lay_out(record, LogitTree()).rows:
        yield row.tokens.astype(np.int64), np.where(row.loss_mask, 1.0, REST).astype(np.float32)


def recall(tools: Tools, number: int, seed: int) -> Iterator[Row]:
    """Facts, and then the same facts in another order: all that can be known of the second half is in the first."""
    draw = random.Random(hash_of(seed, number, -1))
    facts = World.generate(PEOPLE, hash_of(seed, number, -2)).corpus()
    for _ in range(4 * POOL):
        chosen = draw.sample(facts, 8)
        text = "\n".join([*chosen, *draw.sample(chosen, len(chosen))])
        tokens = np.array(tools.tokenizer.encode(text).ids)
        yield tokens, np.ones(len(tokens), dtype=np.float32)


def steps(tools: Tools, count: int, seed: int, noise: Noise) -> Iterator[list[Row]]:
    """The rows of each step: rows of like length together, in random order."""
    done, number = 0, 0
    while done < count:
        if done < RECALL * count:
            rows = list(recall(tools, number, seed))
        else:
            rows = [row for record in episodes(tools, number, seed, noise) for row in branches(record)]
        draw = random.Random(hash_of(seed, number, -3))
        rows.sort(key=lambda row: (len(row[0]), draw.random()))
        batches: list[list[Row]] = [[]]
        for row in rows:
            if (len(batches[-1]) + 1) * len(row[0]) > TOKENS:
                batches.append([])
            batches[-1].append(row)
        draw.shuffle(batches)
        yield from batches[: count - done]
        done, number = done + len(batches), number + 1


def batch_of(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """[B, T] tokens and weights, padded at the end."""
    longest = max(len(tokens) for tokens, _ in rows)
    tokens, weights = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
    for i, (row, weight) in enumerate(rows):
        tokens[i, : len(row)], weights[i, : len(row)] = torch.from_numpy(row), torch.from_numpy(weight)
    return tokens, weights


def loss_of(weights: model.Weights, rows: Sequence[Row]) -> Tensor:
    """Mean negative log-likelihood, weighted."""
    tokens, weight = batch_of(rows)
    inputs = tokens[:, :-1]
    hidden, _ = model.forward(weights, inputs, torch.arange(inputs.shape[1]).expand_as(inputs))
    kept = weight[:, 1:] > 0
    losses = torch.nn.functional.cross_entropy(
        model.logits_of(weights, hidden[kept]), tokens[:, 1:][kept], reduction="none"
    )
    weighed = weight[:, 1:][kept]
    return (losses * weighed).sum() / weighed.sum()


def train(tools: Tools, count: int, seed: int, noise: Noise) -> model.Weights:
    weights = {name: weight.requires_grad_() for name, weight in model.build(seed).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=BETAS, weight_decay=0.01)
    started, shown = time.monotonic(), 0.0
    for step, rows in enumerate(steps(tools, count, seed, noise)):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * (1 - step / count)
        loss = loss_of(weights, rows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        optimizer.step()
        shown = loss.item() if step == 0 else 0.95 * shown + 0.05 * loss.item()
        if (step + 1) % 50 == 0 or step + 1 == count:
            print(f"step {step + 1:5d} of {count}  loss {shown:.3f}  {time.monotonic() - started:5.0f} s", flush=True)
    return {name: weight.detach() for name, weight in weights.items()}


def measure(tools: Tools, weights: model.Weights, seed: int) -> dict[str, dict[str, float]]:
    """What the model does with names it has never seen, in each cell."""
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        world, corpus = World.generate(PEOPLE, seed, held_out=True), Path(folder) / "corpus.jsonl"
        write_corpus(corpus, world)
        asked = world.questions(MEASURED, HOPS, seed)
        for name in CELLS:
            cell = load_cell(name, corpus)
            sampled, greedy = (
                asyncio.run(play(cell, Policy(weights, tools.stop, temperature), tools.chat, asked, seed))
                for temperature in (1.0, 0.0)
            )
            table[name] = {
                "exact match, T=1": share(record.meta.reward == 1.0 for record in sampled),
                "exact match, greedy": share(record.meta.reward == 1.0 for record in greedy),
                "valid format, T=1": share(record.meta.report.stop == "answer" for record in sampled),
                "over the limit, T=1": share(record.meta.report.stop == "context" for record in sampled),
                "episodes with an edit, T=1": share(len(record.edits) > 0 for record in sampled),
            }
            print(f"{name:10s} " + "  ".join(f"{key} {value:.2f}" for key, value in table[name].items()), flush=True)
    return table


def share(flags: Iterator[bool]) -> float:
    found = list(flags)
    return round(sum(found) / len(found), 3)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.small_world.warm_up", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # several sum in an order of their own, and spin where cores are busy
    tools, noise = Tools.make(), Noise()
    weights = train(tools, given.steps, given.seed, noise)
    tokenizer.save(given.out)
    model.save(weights, given.out, tools.stop, tokenizer.pad_id(tools.tokenizer))
    table = measure(tools, model.load(given.out), given.seed)
    report = {"steps": given.steps, "seed": given.seed, "questions": MEASURED, "unseen names": table}
    (given.out / "warm_up.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
