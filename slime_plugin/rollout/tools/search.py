"""The search tool: documents for a query, formatted the same for every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, Self

from slime_plugin.config import tools as config
from slime_plugin.rollout.tools.tool import Parameter, Schema, ToolError

NO_RESULTS = "no results"


@dataclass(frozen=True, slots=True)
class Document:
    """A search result."""

    text: str
    title: str | None = None
    url: str | None = None


class Backend(Protocol):
    """Finds documents, for many rollouts at once."""

    async def find(self, query: str, count: int) -> Sequence[Document]:
        """Return at most ``count`` documents, best first. Raises :class:`ToolError`."""
        ...


class SearchTool:
    """Takes ``{"query": ...}``."""

    def __init__(self, settings: config.Search, backend: Backend) -> None:
        self._settings = settings
        self._backend = backend
        self._open = AsyncExitStack()
        query = Parameter("string", "What to search for.")
        self.schema = Schema(settings.name, settings.description, {"query": query})

    async def __aenter__(self) -> Self:
        if isinstance(self._backend, AbstractAsyncContextManager):
            await self._open.enter_async_context(self._backend)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        query = str(arguments["query"]).strip()
        if not query:
            raise ToolError("the query is blank; say what to search for")
        documents = await self._backend.find(query, self._settings.top_k)
        return show(documents[: self._settings.top_k], self._settings)


def show(documents: Sequence[Document], settings: config.Search) -> str:
    """Format one line per document.

    >>> found = [Document("Paris is the\\ncapital.", "France"), Document("Rome.", None, "http://a.it")]
    >>> print(show(found, config.Search()))
    [1] France: Paris is the capital.
    [2] http://a.it: Rome.
    >>> print(show(found, config.Search(numbered=False)))
    Paris is the capital.
    Rome.
    """
    lines = []
    for number, document in enumerate(documents, start=1):
        text = cut(one_line(document.text), settings.max_chars)
        if settings.numbered:
            title, url = one_line(document.title or ""), one_line(document.url or "")
            head = f"{title} ({url})" if title and url else title or url
            text = f"[{number}] {head}: {text}" if head else f"[{number}] {text}"
        lines.append(text)
    return "\n".join(lines) or NO_RESULTS


def one_line(text: str) -> str:
    """Collapse whitespace, and replace lone surrogates, which UTF-8 cannot encode."""
    return " ".join(text.encode("utf-8", "replace").decode().split())


def cut(text: str, size: int) -> str:
    """Truncate to ``size`` characters.

    >>> cut("a long text", 9), cut("short", 9)
    ('a long...', 'short')
    """
    return text if len(text) <= size else text[: max(0, size - 3)].rstrip() + "..."[:size]
