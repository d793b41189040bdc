"""Which questions are asked when."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.errors import ConfigError
from slime_plugin.local.sample import questions_of, samples_of
from slime_plugin.rollout.messages import Question

PATH = Path("questions.jsonl")


def questions(number: int) -> list[Question]:
    return [Question(f"q{i}", f"What is {i}?", (str(i),)) for i in range(number)]


@given(st.integers(1, 40), st.data())
def test_every_question_once_per_epoch(number: int, data: st.DataObject) -> None:
    asked = questions(number)
    prompts, seed = data.draw(st.integers(1, number)), data.draw(st.integers(0, 2**40))
    per_epoch = number // prompts
    for epoch in range(3):
        ids = [
            question.id
            for iteration in range(epoch * per_epoch, (epoch + 1) * per_epoch)
            for question in questions_of(asked, prompts, iteration, seed, PATH)
        ]
        assert len(ids) == len(set(ids)) == per_epoch * prompts
        if number % prompts == 0:
            assert set(ids) == {question.id for question in asked}


@given(st.permutations(range(12)), st.integers(0, 99))
def test_an_iteration_asks_the_same_whatever_came_before(order: list[int], seed: int) -> None:
    asked = questions(10)
    by_iteration = {i: questions_of(asked, 3, i, seed, PATH) for i in order}
    assert [by_iteration[i] for i in range(12)] == [questions_of(asked, 3, i, seed, PATH) for i in range(12)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    asked = questions(50)
    orders = {
        tuple(question.id for question in questions_of(asked, 50, epoch, seed, PATH))
        for epoch in range(4)
        for seed in range(4)
    }
    assert len(orders) == 16


def test_what_is_left_over_in_one_epoch_is_asked_in_another() -> None:
    asked = questions(10)
    counts = Counter(question.id for i in range(300) for question in questions_of(asked, 3, i, 0, PATH))
    assert counts.total() == 900
    assert set(counts) == {question.id for question in asked}


def test_too_few_questions_are_told_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"trainer.prompts is 5, but questions.jsonl has 4 questions; lower trainer"):
        questions_of(questions(4), 5, 0, 0, PATH)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))
def test_names_and_numbers_of_rollouts_are_unique_in_a_run(prompts: int, samples: int, iterations: int) -> None:
    asked = questions(7)
    rollouts = [
        sample
        for iteration in range(iterations)
        for sample in samples_of(questions_of(asked, prompts, iteration, 0, PATH), samples, iteration)
    ]
    assert [sample.index for sample in rollouts] == list(range(iterations * prompts * samples))
    names = [sample.metadata["rollout_name"] for sample in rollouts]
    assert len(set(names)) == len(names)
    by_id = {question.id: question for question in asked}
    for sample in rollouts:
        question = by_id[sample.metadata["id"]]
        assert (sample.prompt, sample.label) == (question.text, list(question.answers))
    groups = Counter((sample.index or 0) // samples for sample in rollouts)
    assert set(groups.values()) == {samples}
    assert all(len({s.metadata["id"] for s in rollouts[g * samples : (g + 1) * samples]}) == 1 for g in groups)
