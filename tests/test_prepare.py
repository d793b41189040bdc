from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugin.cluster.prepare import main, prepare, split_questions
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.messages import Question
from slime_plugin.rollout.questions import read_questions

QUESTIONS = [f"Which river flows through town {number}?" for number in range(400)]


def write(path: Path, texts: list[str], **fields: object) -> Path:
    lines = [{"question": text, **(fields or {"answers": [f"River {n}"]})} for n, text in enumerate(texts)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def texts(path: Path) -> list[str]:
    return [question.text for question in read_questions(path)]


def test_every_question_is_on_one_side(tmp_path: Path) -> None:
    prepare([write(tmp_path / "all.jsonl", QUESTIONS)], tmp_path / "data", share=0.1)
    train, dev = texts(tmp_path / "data" / "train.jsonl"), texts(tmp_path / "data" / "dev.jsonl")
    assert sorted(train + dev) == sorted(QUESTIONS)
    assert 20 < len(dev) < 70  # 40 expected, with a standard deviation of 6


def test_the_side_follows_from_the_text_alone(tmp_path: Path) -> None:
    prepare([write(tmp_path / "all.jsonl", QUESTIONS)], tmp_path / "one", share=0.1)
    other = [
        write(tmp_path / "b.jsonl", QUESTIONS[200:][::-1]),
        write(tmp_path / "a.jsonl", [*QUESTIONS[:200], "New?"]),
    ]
    prepare(other, tmp_path / "two", share=0.1)
    before, after = (set(texts(tmp_path / name / "dev.jsonl")) for name in ("one", "two"))
    assert before == after - {"New?"}


@given(st.lists(st.text(max_size=3)), st.floats(0.05, 0.95))
def test_repeated_questions_are_reported_and_never_split(asked: list[str], share: float) -> None:
    split = split_questions([Question(str(n), text, ("x",)) for n, text in enumerate(asked)], share)
    assert len(split.train) + len(split.dev) + len(split.repeated) == len(asked)
    sides = [{text.text.strip().lower() for text in side} for side in (split.train, split.dev)]
    assert not sides[0] & sides[1]


def test_repeated_questions_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "first.jsonl", QUESTIONS, answers=["Elbe"])
    second = write(tmp_path / "second.jsonl", [QUESTIONS[0].upper()], answers=["Elbe"])
    third = write(tmp_path / "third.jsonl", [f"  {QUESTIONS[1]}"], answers=["Oder"])
    main([*map(str, (first, second, third)), "--out", str(tmp_path / "data")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "skipped 2 duplicates (second-q1, third-q1), 1 of them with other answers"


@pytest.mark.parametrize(
    ("name", "value"),
    [("golden_answers", ["Elbe", "Labe"]), ("answer", "Elbe"), ("label", ["Elbe"]), ("label", "Elbe")],
)
def test_answers_under_other_names(tmp_path: Path, name: str, value: object) -> None:
    path = write(tmp_path / "all.jsonl", QUESTIONS, **{name: value})
    prepare([path], tmp_path / "data", answers=name)
    expected = tuple(value) if isinstance(value, list) else (value,)
    assert {question.answers for question in read_questions(tmp_path / "data" / "train.jsonl")} == {expected}


def test_a_wrong_line_is_named_as_it_is_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", QUESTIONS[:1], answer="Elbe")
    path.write_text(path.read_text() + '{"question": "Why?", "answer": 3}\n')
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}:2: answer is 3, but must be a list"):
        prepare([path], tmp_path / "data", answers="answer")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}:1: label is None, but must be a list"):
        prepare([path], tmp_path / "data", answers="label")


def test_done_work_is_left_alone_and_interrupted_work_done_again(tmp_path: Path) -> None:
    path, out = write(tmp_path / "all.jsonl", QUESTIONS), tmp_path / "data"
    prepare([path], out)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.iterdir()}
    prepare([path], out)
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.iterdir()} == before
    (out / "dev.jsonl").unlink()
    prepare([path], out)
    assert (out / "dev.jsonl").read_bytes() == before["dev.jsonl"][0]


def test_a_frozen_set_is_not_changed(tmp_path: Path) -> None:
    out = tmp_path / "data"
    prepare([write(tmp_path / "all.jsonl", QUESTIONS)], out)
    before = (out / "dev.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="exists, from other questions or another --dev; move it away"):
        prepare([tmp_path / "all.jsonl"], out, share=0.5)
    assert (out / "dev.jsonl").read_bytes() == before


def test_a_side_without_questions_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", QUESTIONS[:3])
    with pytest.raises(ConfigError, match=r"^--dev 1e-09: of 3 questions 0 are for evaluation"):
        prepare([path], tmp_path / "data", share=1e-9)
    assert not (tmp_path / "data").exists()
    with pytest.raises(SystemExit, match=r"^Error: --dev: 2 is not a share between 0 and 1$"):
        main([str(path), "--out", str(tmp_path / "data"), "--dev", "2"])
