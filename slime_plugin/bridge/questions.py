"""Questions in JSON lines: ``{"id": "q7", "question": "...", "answers": ["...", "..."]}``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_plugin.bridge.messages import Question
from slime_plugin.errors import ConfigError

ATTEMPT = "~"
"""Separates a rollout's id from the number of its attempt, so that no question may have it in its id."""


def read_questions(path: Path) -> list[Question]:
    """All of them, or a :class:`ConfigError` that names the line. Without an ``id`` a question goes by its line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold what else ends a line
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from error
    questions: dict[str, Question] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        question = _question(line, number, f"{path}:{number}")
        if question.id in questions:
            raise ConfigError(f"{path}:{number}: id {question.id!r} is taken by an earlier question; ids are unique")
        questions[question.id] = question
    if not questions:
        raise ConfigError(f"{path}: holds 0 questions")
    return list(questions.values())


def _question(line: str, number: int, where: str) -> Question:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {type(value).__name__} instead of an object with question and answers")
    text, answers, name = value.get("question"), value.get("answers"), value.get("id", f"q{number}")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: question is {text!r:.40}, but has to be a text that is not blank")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise ConfigError(f"{where}: answers is {answers!r:.40}, but has to be a list of at least 1 text")
    if not isinstance(name, str | int) or isinstance(name, bool) or ATTEMPT in str(name) or name == "":
        raise ConfigError(f"{where}: id is {name!r:.40}, but has to be a name or a number without {ATTEMPT!r}")
    return Question(str(name), text, tuple(answers))
