"""BM25 against the formula, written out with dictionaries; and corpora that are none."""

from __future__ import annotations

import asyncio
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slime_plugin.config import tools as config
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.tools import open_tools
from slime_plugin.rollout.tools.bm25 import Bm25, words


def corpus(path: Path, documents: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents), encoding="utf-8")
    return path


async def texts(settings: config.Bm25, queries: Sequence[str], count: int) -> list[list[str]]:
    async with Bm25(settings, "test") as index:
        found = await asyncio.gather(*(index.find(query, count) for query in queries))
    return [[document.text for document in documents] for documents in found]


def split(text: str) -> list[str]:
    """Words as the oracle sees them: characters one by one."""
    result, word = [], ""
    for character in unicodedata.normalize("NFKC", text).casefold() + " ":
        if "\u3040" <= character <= "\u30ff" or "\u3400" <= character <= "\u9fff":
            result += [word, character]
            word = ""
        elif character.isalnum() or character == "_":
            word += character
        else:
            result.append(word)
            word = ""
    return [word for word in result if word]


def oracle(documents: Sequence[str], query: str, count: int, k1: float, b: float) -> list[str]:
    counts = [Counter(split(document)) for document in documents]
    average = sum(sum(bag.values()) for bag in counts) / len(counts)
    scored = []
    for position, bag in enumerate(counts):
        score = 0.0
        for word in split(query):
            holders = sum(1 for other in counts if other[word])
            rarity = math.log(1 + (len(counts) - holders + 0.5) / (holders + 0.5))
            length = 1 - b + b * sum(bag.values()) / average
            if bag[word]:
                score += rarity * bag[word] / (bag[word] + k1 * length)
        if round(score, 9) > 0:
            scored.append((-round(score, 9), position))
    return [documents[position] for _, position in sorted(scored)[:count]]


WORDS = st.sampled_from(["the", "a", "Paris", "paris,", "is", "in", "FRANCE", "x", "7", "東京", "naïve", "ﬁn", "it's"])
TEXTS = st.lists(WORDS, min_size=1, max_size=8).map(" ".join)


@given(
    st.lists(TEXTS, min_size=1, max_size=12),
    st.lists(TEXTS, min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from([0.0, 1.2, 1.5]),
    st.sampled_from([0.0, 0.75, 1.0]),
)
@example(["x"] * 9 + ["x 7"], ["x"], 3, 1.5, 0.75)  # ties at the last place
@example(["a b c", "d e f", *["a f z"] * 2, "c d z", *["z z z"] * 3], ["a c b e f d"], 1, 1.5, 0.75)  # a rounded tie
def test_documents_come_as_the_formula_says(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], queries: list[str], count: int, k1: float, b: float
) -> None:
    path = corpus(tmp_path_factory.getbasetemp() / "oracle.jsonl", [{"text": text} for text in documents])
    found = asyncio.run(texts(config.Bm25(corpus=path, k1=k1, b=b), queries, count))
    assert found == [oracle(documents, query, count, k1, b) for query in queries]


@given(st.text(max_size=30))
def test_words_are_those_of_the_oracle(text: str) -> None:
    assert words(text) == split(text)


def test_common_words_and_single_letters_count(tmp_path: Path) -> None:
    path = corpus(tmp_path / "c.jsonl", [{"text": "The Who"}, {"text": "vitamin C"}, {"text": "it is what it is"}])
    found = asyncio.run(texts(config.Bm25(corpus=path), ["the", "c", "what is it", "nothing", "?!"], 3))
    assert found == [["The Who"], ["vitamin C"], ["it is what it is"], [], []]


def test_titles_are_searched_and_shown(tmp_path: Path) -> None:
    documents: list[dict[str, Any]] = [
        {"id": 7, "title": "Paris", "text": "A city."},
        {"title": None, "text": "Paris in spring.", "more": 1},
    ]
    backend = config.Bm25(corpus=corpus(tmp_path / "c.jsonl", documents))

    async def run(search: config.Search) -> str:
        async with open_tools([search], {}) as tools:
            return await tools["search"]({"query": "paris"})

    assert asyncio.run(run(config.Search(backend=backend))) == "[1] Paris: A city.\n[2] Paris in spring."
    assert asyncio.run(run(config.Search(backend=backend, numbered=False, top_k=1))) == "A city."


def test_rollouts_do_not_disturb_each_other(tmp_path: Path) -> None:
    documents = [f"{i % 7} {i % 5} {i % 3} even" for i in range(200)]
    path = corpus(tmp_path / "c.jsonl", [{"text": text} for text in documents])
    queries = [f"{i % 7} {i % 5} even" for i in range(100)]
    together = asyncio.run(texts(config.Bm25(corpus=path), queries, 10))
    assert together == [oracle(documents, query, 10, 1.5, 0.75) for query in queries]


@pytest.mark.parametrize(
    ("lines", "words_of_the_error"),
    [
        ('{"text": "a"}\n\n{"text": 3}\n', ":3: text is 3, but must be a non-blank string"),
        ('{"text": " "}\n', ":1: text is ' '"),
        ('{"title": "a"}\n', ":1: text is None"),
        ('{"text": "a", "title": ["b"]}\n', ":1: title is ['b']"),
        ('{"text": "a"}\n["a"]\n', ":2: list instead of an object"),
        ('{"text": "a"\n', ":1: not JSON"),
        ('{"text": "\udcff"}\n', ":1: not JSON"),
        ("\n", ": there are no words in its 0 documents"),
        ('{"text": "?!"}\n', ": there are no words in its 1 documents"),
    ],
)
def test_a_corpus_that_is_none(lines: str, words_of_the_error: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(lines.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        asyncio.run(texts(config.Bm25(corpus=path), ["a"], 1))
    assert str(caught.value).startswith(f"{path}{words_of_the_error}")


def test_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    async def run(configs: Sequence[config.ToolSettings]) -> None:
        async with open_tools(configs, {}):
            raise AssertionError

    missing = config.Search(backend=config.Bm25(corpus=tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"tools.0.backend.corpus: there is no file"):
        asyncio.run(run([missing]))
