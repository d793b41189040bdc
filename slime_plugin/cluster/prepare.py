"""Split questions for training and evaluation: python -m slime_plugin.cluster.prepare FILE... --out data

The side of a question depends on its text alone, not on other questions or their order: no question is on both sides,
and none moves when files are added. Existing files are never changed, so the command can be repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slime_plugin.errors import ConfigError, MemoryWalkerError
from slime_plugin.files import write_atomically
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.questions import read_questions

ANSWERS = ("answers", "golden_answers", "answer", "label")
"""Names of the field with the answers in common data sets: a list of texts, or one text."""
TRAIN, DEV = "train.jsonl", "dev.jsonl"


@dataclass(frozen=True, slots=True)
class Split:
    """Both sides, and the questions that were dropped as repetitions of earlier ones."""

    train: list[Question]
    dev: list[Question]
    repeated: list[Question]
    contradicted: list[Question]
    """The repeated ones with other answers than the first time."""


def prepare(files: Sequence[Path], out: Path, share: float = 0.02, answers: str = "answers") -> Split:
    """Write ``train.jsonl`` and ``dev.jsonl`` into a folder, unless they exist."""
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
                f"{path}: exists, from other questions or another --dev; move it away, or name another --out"
            )
    out.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        if not path.exists():
            write_atomically(path, text)
    return split


def read_all(files: Sequence[Path], answers: str = "answers") -> list[Question]:
    """All questions; with several files, the name of its file is put before the id of a question."""
    names = [path.stem for path in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice}: two files have this name, which has to identify their questions; rename one")
    questions = []
    for path in files:
        prefix = f"{path.stem}-" if len(files) > 1 else ""
        questions += [replace(found, id=f"{prefix}{found.id}") for found in read_questions(path, answers)]
    return questions


def split_questions(questions: Sequence[Question], share: float) -> Split:
    """Split by a hash of the text, so that the share of the dev set is approximate."""
    if not 0 < share < 1:
        raise ConfigError(f"--dev: {share:g} is not a share between 0 and 1")
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
            (split.dev if _fraction(key) < share else split.train).append(question)
    return split


def normalised(text: str) -> str:
    """Questions that differ only in case, blanks and the encoding of characters are the same."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _fraction(key: str) -> float:
    """A hash, uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def _text(questions: Sequence[Question]) -> bytes:
    lines = ({"id": q.id, "question": q.text, "answers": list(q.answers)} for q in questions)
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode("utf-8", "surrogatepass")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="prepare", description="Split questions into a training and a dev set.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON lines with question, answers and id")
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for train.jsonl and dev.jsonl")
    parser.add_argument("--dev", type=float, default=0.02, metavar="SHARE", help="of the dev set (default: 0.02)")
    parser.add_argument("--answers", choices=ANSWERS, default=ANSWERS[0], help="field with the answers")
    args = parser.parse_args(words)
    try:
        split = prepare(args.files, args.out, args.dev, args.answers)
    except MemoryWalkerError as error:
        sys.exit(f"Error: {error}")
    print(f"{args.out / TRAIN}: {len(split.train):,} questions")
    print(f"{args.out / DEV}: {len(split.dev):,} questions")
    if split.repeated:
        some = ", ".join(question.id for question in split.repeated[:5]) + (", ..." if len(split.repeated) > 5 else "")
        others = f"{len(split.contradicted):,} of them with other answers"
        print(f"skipped {len(split.repeated):,} duplicates ({some}), {others}")


if __name__ == "__main__":
    main()
