"""Search of a corpus in memory, with Lucene's BM25.

Results are the same on every machine and in every run: no stop words, no stemming, ties in the order of the corpus.
"""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from slime_plugin.config import tools as config
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.json_lines import read_json_lines
from slime_plugin.rollout.tools.search import Document

# Chinese and Japanese are written without spaces: there each character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def words(text: str) -> list[str]:
    """Tokenize a document or a query.

    >>> words("Ｔhe O'Neill's 2-hop 東京")
    ['the', 'o', 'neill', 's', '2', 'hop', '東', '京']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class Bm25:
    """An index that is read-only once built, so threads may share it."""

    def __init__(self, settings: config.Bm25, where: str) -> None:
        if not settings.corpus.is_file():
            raise ConfigError(f"{where}.corpus: there is no file {settings.corpus}")
        self._settings = settings
        self._documents: list[Document] = []
        self._vocabulary: dict[str, int] = {}
        self._index: Any = None

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._build)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._index = None

    async def find(self, query: str, count: int) -> Sequence[Document]:
        """Return the best documents that share a word with the query."""
        return [self._documents[i] for i in await asyncio.to_thread(self._best, query, count)]

    def _build(self) -> None:
        import bm25s  # type: ignore[import-untyped]  # takes a second

        self._documents = list(read_corpus(self._settings.corpus))
        rows = []
        for document in self._documents:
            found = words(f"{document.title or ''} {document.text}")
            rows.append([self._vocabulary.setdefault(word, len(self._vocabulary)) for word in found])
        if not self._vocabulary:
            raise ConfigError(f"{self._settings.corpus}: there are no words in its {len(rows)} documents")
        index = bm25s.BM25(k1=self._settings.k1, b=self._settings.b, method="lucene", dtype="float64")
        index.index((rows, self._vocabulary), create_empty_token=False, show_progress=False)
        self._index = index

    def _best(self, query: str, count: int) -> list[int]:
        known = [self._vocabulary[word] for word in words(query) if word in self._vocabulary]
        if not known:
            return []
        # Rounded, so that scores that differ only by the order of summation tie.
        scores = np.round(self._index.get_scores_from_ids(known), 9)
        best = np.flatnonzero(scores > 0)
        if len(best) > count:
            least = np.partition(scores[best], -count)[-count]
            best = best[scores[best] >= least]  # with all ties for the last place
        order: list[int] = best[np.argsort(-scores[best], kind="stable")][:count].tolist()
        return order


def read_corpus(path: Path) -> Iterator[Document]:
    """Yield the documents of a corpus, or raise :class:`ConfigError`."""
    for _, where, value in read_json_lines(path, "text, title and id"):
        text, title = value.get("text"), value.get("title")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}: text is {text!r:.40}, but must be a non-blank string")
        if not isinstance(title, str | None):
            raise ConfigError(f"{where}: title is {title!r:.40}, but must be a string")
        yield Document(text, title)
