"""The small world: its questions have answers, its tokens survive, its expert is right, its model is what it says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.small_world import model, tokenizer, warm_up
from examples.small_world.episodes import CELLS, FOLDER, load_cell, play
from examples.small_world.expert import SILENT, Expert, Noise
from examples.small_world.policy import Policy
from examples.small_world.world import World, WorldError, main, names, write_corpus
from slime_plugin.config.cell import Cell
from slime_plugin.config.frozen import load_config
from slime_plugin.record import Record
from slime_plugin.rollout.chat import ChatML
from slime_plugin.rollout.chat.template import TemplateChat
from slime_plugin.rollout.engine.engine import Request
from slime_plugin.rollout.messages import Message
from slime_plugin.rollout.questions import read_questions
from slime_plugin.rollout.tools import open_tools
from slime_plugin.rollout.tools.tool import Parameter, Schema
from tests.conftest import ROOT

DATA = FOLDER / "data"
TOKENIZER = tokenizer.build()
STOP = tokenizer.stop_id(TOKENIZER)


def solve(question: str, texts: list[str]) -> tuple[str, int]:
    """The answer and the number of look-ups, from the sentences alone: only strings are compared."""
    who, *steps = question.removeprefix("What is ").removesuffix("?").split("'s ")
    for step in steps:
        (found,) = [text for text in texts if text.startswith(f"- {who}'s {step} is ")]
        who = found.partition(" is ")[2].rstrip(".")
    return who, len(steps)


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def people_in(texts: list[str]) -> set[str]:
    return set(re.findall(r"- (\w+ \w+)'s", "\n".join(texts)))


@pytest.mark.parametrize("hops", [[2], [3, 4], [2, 3]])
def test_every_question_has_the_one_answer_that_the_facts_give(tmp_path: Path, hops: list[int]) -> None:
    wanted = ["--people", "30", "--questions", "80", "--hops", *map(str, hops), "--seed", "7", "--held-out"]
    main([*wanted, "--out", str(tmp_path / "a")])
    main([*wanted, "--out", str(tmp_path / "b")])
    texts = texts_of(tmp_path / "a" / "corpus.jsonl")
    assert len(texts) == len(set(texts)) == 2 * (8 * 15 + 4 * 30)
    for name in ("questions", "held_out"):
        questions = read_questions(tmp_path / "a" / f"{name}.jsonl")
        assert len({question.text for question in questions}) == 80
        for question in questions:
            answer, lookups = solve(question.text, texts)
            assert question.answers == (answer,)
            assert lookups in hops
            assert question.id.endswith(f"-{lookups}hops")
    for file in ("corpus.jsonl", "questions.jsonl", "held_out.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_fifth_of_the_names_is_held_out_and_made_of_known_words() -> None:
    known, unseen = set(names(held_out=False)), set(names(held_out=True))
    assert (len(known), len(unseen)) == (1280, 320)
    assert not known & unseen
    assert {word for name in unseen for word in name.split()} == {word for name in known for word in name.split()}
    assert people_in(World.generate(40, 3, held_out=True).corpus()) <= unseen


def test_a_world_that_is_too_small_or_too_large_is_refused() -> None:
    with pytest.raises(WorldError, match="2000 people; there are names for 4 to 1280"):
        World.generate(2000, 0)
    with pytest.raises(WorldError, match=r"5000 questions of 2 hops; this world has \d+"):
        World.generate(10, 0).questions(5000, [2], 0)


def test_the_shipped_data_is_what_its_command_writes(tmp_path: Path) -> None:
    command = re.search(r"examples\.small_world\.world (.*) --out", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert command is not None
    main([*command[1].split(), "--out", str(tmp_path)])
    for file in ("corpus.jsonl", "questions.jsonl", "held_out.jsonl"):
        assert (DATA / file).read_bytes() == (tmp_path / file).read_bytes()


def test_search_ranks_the_right_fact_first_and_brings_others() -> None:
    texts = texts_of(DATA / "corpus.jsonl")

    async def search() -> list[str]:
        asked = [text.removeprefix("- ").partition(" is ")[0] for text in texts]
        async with open_tools(load_cell("search_r1", DATA / "corpus.jsonl").tools) as tools:
            return [await tools["search"]({"query": f"find {what}"}) for what in asked]

    results = asyncio.run(search())
    first = [result.splitlines()[0] == text for result, text in zip(results, texts, strict=True)]
    assert np.mean(first) > 0.95
    assert np.mean([text in result.splitlines() for result, text in zip(results, texts, strict=True)]) > 0.99
    assert {len(result.splitlines()) for result in results} == {3}


@given(st.text() | st.lists(st.sampled_from(sorted(TOKENIZER.get_vocab(with_added_tokens=True)))).map("".join))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_words_of_the_world_and_parts_of_calls_are_single_tokens() -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {"query": "find Ada Birch\'s boss"}}\n</tool_call><|im_end|>'
    assert len(TOKENIZER.encode(text).ids) == 10
    assert TOKENIZER.get_vocab_size() == model.CONFIG["vocab_size"] == 432
    assert TOKENIZER.encode("<answer> cat </answer>").tokens[1] == TOKENIZER.encode("pet is cat.").tokens[-2]


@pytest.mark.parametrize("tools", [[], [Schema("search", "Finds.", {"query": Parameter("string", "What.")})]])
def test_the_template_says_what_chatml_says(tmp_path: Path, tools: list[Schema]) -> None:
    tokenizer.save(tmp_path)
    chatml, template = ChatML.load(tmp_path), TemplateChat.load(tmp_path)  # AutoTokenizer, from the folder alone
    question = "What is Ada Birch's boss's pet?"
    for system in ("pop", "") if not tools else ("pop",):
        assert chatml.prompt(system, question, tools) == template.prompt(system, question, tools)
    for message in (Message("tool", "- Ada Birch's boss is Leo Reed.", "search"), Message("user", "Summarize.")):
        assert chatml.render(message) == template.render(message)
    assert chatml.open_turn() == template.open_turn()
    said = [*TOKENIZER.encode("<answer> cat </answer><|im_end|>").ids]
    assert chatml.close_turn(said) == template.close_turn(said)
    assert chatml.close_turn(said[:2]) == template.close_turn(said[:2])
    assert chatml.stop_ids == template.stop_ids == {STOP}


def episodes(name: str, noise: Noise, folder: Path, count: int = 20) -> list[Record]:
    world = World.generate(40, 5)
    write_corpus(folder / "corpus.jsonl", world)
    cell = load_cell(name, folder / "corpus.jsonl")
    expert = Expert(TOKENIZER, noise, seed=1)
    return asyncio.run(play(cell, expert, ChatML(tokenizer.build()), world.questions(count, [2, 3], 5)))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("search_r1", set()), ("tc_rag", {"pop"}), ("agentfold", {"fold"}), ("memexrl", {"offload", "restore"})],
)
def test_the_expert_answers_right_and_edits_in_every_cell(name: str, kinds: set[str], tmp_path: Path) -> None:
    records = episodes(name, SILENT, tmp_path)
    assert [record.meta.reward for record in records] == [1.0] * len(records)
    for record in records:
        assert {edit.kind for edit in record.edits} == kinds


def test_mistakes_are_those_of_the_seed_and_end_in_answers(tmp_path: Path) -> None:
    records = [record for name in CELLS for record in episodes(name, Noise(), tmp_path, 40)]
    again = [record for name in CELLS for record in episodes(name, Noise(), tmp_path, 40)]
    assert [record.tokens.tolist() for record in records] == [record.tokens.tolist() for record in again]
    assert {record.meta.status for record in records} <= {"completed", "truncated"}
    right = np.mean([record.meta.reward == 1.0 for record in records])
    assert 0.3 < right < 0.9
    assert {"pop", "fold", "offload", "restore", "retrieve"} == {e.kind for r in records for e in r.edits}


def test_the_context_limit_binds_where_popping_is_to_be_learnt(tmp_path: Path) -> None:
    """Three hops without a pop do not fit; with one they do."""
    stubborn = Noise(relation=0, person=0, answer=0, summary=0, edit=0, unread=0, retrieve=0)
    for record in episodes("tc_rag", stubborn, tmp_path):
        fits = str(record.meta.group).endswith("2hops")
        assert (record.meta.reward == 1.0) == fits
        assert record.meta.extra["stop"] == ("answer" if fits else "context")


def test_what_the_model_is_built_with_already_looks_things_up() -> None:
    """Tokens that come again are expected the second time, and were not the first time."""
    draw = torch.Generator().manual_seed(3)
    once = torch.stack([torch.randperm(400, generator=draw)[:40] for _ in range(4)])
    tokens = once.repeat(1, 2)
    weights = model.build(0)
    hidden, _ = model.forward(weights, tokens, torch.arange(80).expand_as(tokens))
    logprobs = torch.log_softmax(model.logits_of(weights, hidden), -1)[:, :-1]
    found = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    assert found[:, 40:].mean() > found[:, :39].mean() + 1


def test_the_same_steps_and_seed_give_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "POOL", 4)
    tools = warm_up.Tools.make()
    first, second, other = (warm_up.train(tools, 3, seed, Noise()) for seed in (0, 0, 1))
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert not torch.equal(weight, model.build(0)[name])
    assert not torch.equal(first[model.EMBEDDING], other[model.EMBEDDING])


def test_loss_is_that_of_each_row_alone() -> None:
    """Padding and batching change nothing; computed token by token."""
    weights = model.build(1)
    draw = np.random.default_rng(0)
    rows = [(draw.integers(0, 432, size), draw.choice([1.0, 0.05], size).astype(np.float32)) for size in (7, 19, 12)]
    total, mass = 0.0, 0.0
    for tokens, weight in rows:
        for i in range(1, len(tokens)):
            prefix = torch.from_numpy(tokens[:i])[None]
            hidden, _ = model.forward(weights, prefix, torch.arange(i)[None])
            logprobs = torch.log_softmax(model.logits_of(weights, hidden)[0, -1], -1)
            total, mass = total - float(weight[i]) * logprobs[tokens[i]].item(), mass + float(weight[i])
    assert warm_up.loss_of(weights, rows).item() == pytest.approx(total / mass, rel=1e-5)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums have one order, and tests that run beside each other do not wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shipped() -> model.Weights:
    return model.load(FOLDER / "model")


def test_the_shipped_model_is_a_small_qwen3_with_the_shipped_tokenizer(shipped: model.Weights, tmp_path: Path) -> None:
    config = json.loads((FOLDER / "model" / "config.json").read_text(encoding="utf-8"))
    assert config == {**model.CONFIG, "eos_token_id": STOP, "pad_token_id": tokenizer.pad_id(TOKENIZER)}
    assert {name: tuple(weight.shape) for name, weight in shipped.items()} == model.shapes()
    tokenizer.save(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / "model" / file).read_bytes() == (tmp_path / file).read_bytes()
    assert sum(file.stat().st_size for file in (FOLDER / "model").iterdir()) < 2_000_000


def test_the_shipped_model_computes_what_transformers_does(shipped: model.Weights) -> None:
    from transformers import Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32)
    tokens = torch.tensor(
        [TOKENIZER.encode("<|im_start|>system\npop<|im_end|>\n" + "- Ada Birch's pet is cat.\n" * 5).ids]
    )
    hidden, _ = model.forward(shipped, tokens, torch.arange(tokens.shape[1])[None])
    with torch.no_grad():
        wanted = theirs(input_ids=tokens).logits
    torch.testing.assert_close(model.logits_of(shipped, hidden), wanted, atol=1e-3, rtol=1e-4)


def test_turns_that_are_decoded_together_are_decoded_alike(shipped: model.Weights) -> None:
    chat = ChatML(tokenizer.build())
    prompts = [chat.prompt("pop", q.text, []) + chat.open_turn() for q in read_questions(DATA / "held_out.jsonl")[:6]]
    requests = [Request(prompt[3 * i :], 20, "s", seed=i) for i, prompt in enumerate(prompts)]
    for temperature in (0.0, 1.0):
        policy = Policy(shipped, STOP, temperature)
        together = policy.decode(requests)
        for request, generation in zip(requests, together, strict=True):
            (alone,) = policy.decode([request])
            assert alone.tokens == generation.tokens
            assert alone.logprobs == pytest.approx(generation.logprobs, abs=1e-4)
            sequence = torch.tensor([[*request.prompt, *generation.tokens]])
            hidden, _ = model.forward(shipped, sequence, torch.arange(sequence.shape[1])[None])
            scores = torch.log_softmax(model.logits_of(shipped, hidden), -1)[0, len(request.prompt) - 1 : -1]
            live = scores.gather(-1, torch.tensor(generation.tokens)[:, None])[:, 0]
            assert generation.logprobs == pytest.approx(live.tolist(), abs=1e-4)


def test_the_shipped_model_has_learnt_and_has_something_left_to_learn(shipped: model.Weights) -> None:
    report: dict[str, Any] = json.loads((FOLDER / "model" / "warm_up.json").read_text(encoding="utf-8"))
    for name in CELLS:
        claimed = report["unseen names"][name]
        assert 0.1 < claimed["exact match, T=1"] < 0.6
        assert claimed["exact match, T=1"] < claimed["exact match, greedy"]
        assert (claimed["episodes with an edit, T=1"] > 0.3) == (name != "search_r1")
        cell = load_cell(name, DATA / "corpus.jsonl")
        questions = read_questions(DATA / "held_out.jsonl")[:32]
        records = asyncio.run(play(cell, Policy(shipped, STOP), ChatML(tokenizer.build()), questions))
        assert np.mean([record.meta.reward == 1.0 for record in records]) > 0.05
        assert any(record.edits for record in records) == (name != "search_r1")


@pytest.mark.parametrize("name", CELLS)
def test_cells_point_at_what_is_shipped(name: str) -> None:
    cell = load_config(ROOT / "configs" / "small_world" / f"{name}.yaml", Cell)
    assert cell.harness.type == name
    assert cell.model is not None
    assert ROOT / cell.model == FOLDER / "model"
    assert cell.rollout.questions is not None
    assert len(read_questions(ROOT / cell.rollout.questions)) == 200
    texts = [cell.rollout.system, *(str(value) for value in cell.harness.model_dump().values())]
    known = Tokenizer.from_file(str(FOLDER / "model" / "tokenizer.json"))
    assert len(known.encode(texts[0]).ids) == 1  # the mode is one word to the model
