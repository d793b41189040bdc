"""Read questions from JSON lines: ``{"id": "q7", "question": "...", "answers": ["...", "..."]}``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_plugin.errors import ConfigError
from slime_plugin.rollout.json_lines import read_json_lines
from slime_plugin.rollout.messages import Question

ATTEMPT = "~"
"""Separates the id of a rollout from the number of its attempt. Not allowed in a question's id."""


def rollout_name(id: object) -> str:
    """Return the part of a rollout's id that all of its attempts share.

    >>> rollout_name("q7-3~1")
    'q7-3'
    """
    return str(id).partition(ATTEMPT)[0]


def read_questions(path: Path, answers: str = "answers") -> list[Question]:
    """Return all questions, or raise :class:`ConfigError`. The id defaults to ``q`` and the line number.

    ``answers`` is the field with the answers. Under another name it may also be a single string.
    """
    questions: dict[str, Question] = {}
    for number, where, value in read_json_lines(path, f"question and {answers}"):
        question = _question(value, f"q{number}", where, answers)
        if question.id in questions:
            raise ConfigError(f"{where}: id {question.id!r} is taken by an earlier question; ids are unique")
        questions[question.id] = question
    if not questions:
        raise ConfigError(f"{path}: holds 0 questions")
    return list(questions.values())


def _question(value: dict[str, Any], default_id: str, where: str, field: str) -> Question:
    text, answers, name = value.get("question"), value.get(field), value.get("id", default_id)
    if isinstance(answers, str) and field != "answers":
        answers = [answers]
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: question is {text!r:.40}, but must be a non-blank string")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise ConfigError(f"{where}: {field} is {answers!r:.40}, but must be a list of at least 1 string")
    if not isinstance(name, str | int) or isinstance(name, bool) or ATTEMPT in str(name) or name == "":
        raise ConfigError(f"{where}: id is {name!r:.40}, but must be a name or a number without {ATTEMPT!r}")
    return Question(str(name), text, tuple(answers))
