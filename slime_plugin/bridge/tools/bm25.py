"""A corpus in memory, searched by BM25 as Lucene scores it.

Results are the same on every machine and in every run: no stop words, no stemming, and documents that score alike come
in the order of the corpus.
"""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from slime_plugin.bridge.tools.search import Document
from slime_plugin.config import tools as config
from slime_plugin.errors import ConfigError

# Chinese and Japanese are written without spaces: there each character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def words(text: str) -> list[str]:
    """What documents and queries are compared by.

    >>> words("Ｔhe O'Neill's 2-hop 東京")
    ['the', 'o', 'neill', 's', '2', 'hop', '東', '京']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class Bm25:
    """An index, built once and only read from then on, so that threads may share it."""

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._index = None

    async def find(self, query: str, count: int) -> Sequence[Document]:
        """The best documents that share a word with the query."""
        return [self._documents[i] for i in await asyncio.to_thread(self._best, query, count)]

    def _build(self) -> None:
        import bm25s  # type: ignore[import-untyped]  # and it takes a second

        self._documents = list(read_corpus(self._settings.corpus))
        rows = []
        for document in self._documents:
            found = words(f"{document.title or ''} {document.text}")
            rows.append([self._vocabulary.setdefault(word, len(self._vocabulary)) for word in found])
        if not self._vocabulary:
            raise ConfigError(f"{self._settings.corpus}: there is not a word in its {len(rows)} documents")
        index = bm25s.BM25(k1=self._settings.k1, b=self._settings.b, method="lucene", dtype="float64")
        index.index((rows, self._vocabulary), create_empty_token=False, show_progress=False)
        self._index = index

    def _best(self, query: str, count: int) -> list[int]:
        known = [self._vocabulary[word] for word in words(query) if word in self._vocabulary]
        if not known:
            return []
        # Rounded, so that documents tie that score alike but for the order of a sum.
        scores = np.round(self._index.get_scores_from_ids(known), 9)
        best = np.flatnonzero(scores > 0)
        if len(best) > count:
            least = np.partition(scores[best], -count)[-count]
            best = best[scores[best] >= least]  # with all that tie for the last place
        order: list[int] = best[np.argsort(-scores[best], kind="stable")][:count].tolist()
        return order


def read_corpus(path: Path) -> Iterator[Document]:
    """The documents of a corpus, or a :class:`ConfigError` that names the line."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _document(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _document(line: bytes, where: str) -> Document:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {type(value).__name__} instead of an object with text, title and id")
    text, title = value.get("text"), value.get("title")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: text is {text!r:.40}, but has to be a text that is not blank")
    if not isinstance(title, str | None):
        raise ConfigError(f"{where}: title is {title!r:.40}, but has to be a text")
    return Document(text, title)
