"""Questions for training and for evaluation: python -m slime_plugin.cluster.prepare FILE... --out data

No question is in both, and one that is in the evaluation stays there: which side a question is on follows from its
text alone, whatever else is asked and in whatever order. A file that is there already is never changed; the same
command again finds that there is nothing to do, and one that was interrupted is done again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_plugin.bridge.messages import Question
from slime_plugin.bridge.questions import read_questions
from slime_plugin.errors import ConfigError, MemoryWalkerError

ANSWERS = ("answers", "golden_answers", "answer", "label")
"""Names under which data sets keep the answers of a question: a list of texts, or one text."""
TRAIN, DEV = "train.jsonl", "dev.jsonl"


@dataclass(frozen=True, slots=True)
class Split:
    """Questions by what they are for, and those that were left out because they had been asked before."""

    train: list[Question]
    dev: list[Question]
    repeated: list[Question]
    contradicted: list[Question]
    """Those of the repeated ones whose answers are others than the first time."""


def prepare(files: Sequence[Path], out: Path, share: float = 0.02, answers: str = "answers") -> Split:
    """Write ``train.jsonl`` and ``dev.jsonl`` into a folder, unless they are there."""
    split = split_questions(read_all(files, answers), share)
    for name, questions in (("evaluation", split.dev), ("training", split.train)):
        if not questions:
            count = len(split.dev) + len(split.train)
            raise ConfigError(
                f"--dev {share:g}: of {count} questions 0 are for {name}; choose another share, or take more questions"
            )
    texts = {out / TRAIN: _text(split.train), out / DEV: _text(split.dev)}
    for path, text in texts.items():
        if path.exists() and path.read_bytes() != text:
            raise ConfigError(
                f"{path}: is there, and made from other questions or with another --dev; move it away, or name "
                "another --out"
            )
    out.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        if not path.exists():
            draft = path.with_name(f".{path.name}.part")
            draft.write_bytes(text)
            draft.replace(path)
    return split


def read_all(files: Sequence[Path], answers: str = "answers") -> list[Question]:
    """Of several files, each question goes by the name of its file and its own."""
    names = [path.stem for path in files]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{twice}: two files have this name, by which their questions are told apart; rename one")
    found = []
    for path in files:
        questions = read_questions(path) if answers == "answers" else _read_renamed(path, answers)
        found += (
            [Question(f"{path.stem}-{q.id}", q.text, q.answers) for q in questions] if len(files) > 1 else questions
        )
    return found


def split_questions(questions: Sequence[Question], share: float) -> Split:
    """The share of the dev set is one of all possible questions, so it is met only about."""
    if not 0 < share < 1:
        raise ConfigError(f"--dev: {share:g} is no share between 0 and 1")
    seen: dict[str, Question] = {}
    split = Split([], [], [], [])
    for question in questions:
        key = normalised(question.text)
        first = seen.setdefault(key, question)
        if first is not question:
            split.repeated.append(question)
            if set(first.answers) != set(question.answers):
                split.contradicted.append(question)
        else:
            (split.dev if _place(key) < share else split.train).append(question)
    return split


def normalised(text: str) -> str:
    """Two questions are the same if they differ in case, blanks and the encoding of characters alone."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _place(key: str) -> float:
    """Somewhere from 0 to 1, evenly."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def _text(questions: Sequence[Question]) -> bytes:
    lines = ({"id": q.id, "question": q.text, "answers": list(q.answers)} for q in questions)
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode("utf-8", "surrogatepass")


def _read_renamed(path: Path, answers: str) -> list[Question]:
    """The format is checked in one place, so the names that it has are put in before, line by line."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from error
        draft.write_text("\n".join(_renamed(line, answers, f"{path}:{n}") for n, line in enumerate(lines, 1)), "utf-8")
        try:
            return read_questions(draft)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(draft), str(path))) from None


def _renamed(line: str, answers: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        return line  # refused by who checks the format
    if not isinstance(value, dict):
        return line
    if answers not in value:
        there = ", ".join(sorted(map(str, value)))
        raise ConfigError(f"{where}: has no {answers}, but {there:.80}; --answers names where the answers are")
    given = value[answers]
    return json.dumps({**value, "answers": [given] if isinstance(given, str) else given})


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="prepare", description="Split questions into those to train on and a dev set."
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON lines with question, answers and id")
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for train.jsonl and dev.jsonl")
    parser.add_argument(
        "--dev", type=float, default=0.02, metavar="SHARE", help="of the dev set (default: %(default)s)"
    )
    parser.add_argument("--answers", choices=ANSWERS, default=ANSWERS[0], help="name of the answers in the files")
    args = parser.parse_args(words)
    try:
        split = prepare(args.files, args.out, args.dev, args.answers)
    except MemoryWalkerError as error:
        sys.exit(f"Error: {error}")
    print(f"{args.out / TRAIN}: {len(split.train):,} questions")
    print(f"{args.out / DEV}: {len(split.dev):,} questions")
    if split.repeated:
        some = ", ".join(question.id for question in split.repeated[:5]) + (", ..." if len(split.repeated) > 5 else "")
        print(
            f"left out: {len(split.repeated):,} that had been asked before ({some}), {len(split.contradicted):,} of "
            "them with other answers"
        )


if __name__ == "__main__":
    main()
