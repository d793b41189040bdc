"""Search on the web, by DashScope's text search.

Sent:     {"uq": "...", "page": 1, "rows": 10}
Expected: {"status": 0, "data": {"docs": [{"title": "...", "url": "...", "snippet": "..."}, ...]}}
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_plugin.bridge.tools.base import ToolError
from slime_plugin.bridge.tools.search import Document
from slime_plugin.errors import printable

if TYPE_CHECKING:
    from slime_plugin.bridge.tools.service import Service

ROWS = 10  # what one request brings at its price, so that a cached answer serves every smaller top_k
_MARKUP = re.compile(r"</?(?:em|b|strong|span|a|br|p)\b[^>]*>", re.IGNORECASE)  # of the words that were found


class DashScopeSearch:
    """One query per request."""

    def __init__(self, service: Service, parameters: Mapping[str, Any]) -> None:
        self._service = service
        self._parameters = parameters

    async def find(self, query: str, count: int) -> Sequence[Document]:
        """What the web search holds for best."""
        body = {"uq": query, "page": 1, "rows": max(ROWS, count), **self._parameters}
        return (await self._service.ask(body, read_documents))[:count]


def read_documents(answer: Any) -> list[Document]:
    """The documents in an answer. Those without a text say nothing and are left out.

    >>> read_documents({"status": 0, "data": {"docs": [{"title": "A", "url": "http://a", "snippet": "an <em>a</em>"}]}})
    [Document(text='an a', title='A', url='http://a')]
    """
    match answer:
        case {"status": 0, "data": {"docs": [*found]}}:
            documents = [_document(entry) for entry in found if isinstance(entry, dict)]
            return [document for document in documents if document.text.strip()]
        case {"status": 0, "data": {"docs": None} | None}:
            return []
    said = answer.get("message", "no reason given") if isinstance(answer, dict) else "not an object"
    raise ToolError(f"search failed: the service gives no results: {printable(said, 200)}")


def _document(entry: dict[str, Any]) -> Document:
    title, url = entry.get("title"), entry.get("url")
    return Document(_plain(entry.get("snippet")), _plain(title) or None, url if isinstance(url, str) else None)


def _plain(value: object) -> str:
    return html.unescape(_MARKUP.sub("", value)) if isinstance(value, str) else ""
