"""Backends of the search tool that ask a remote service, one query per request."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_plugin.errors import printable
from slime_plugin.rollout.tools.search import Document
from slime_plugin.rollout.tools.tool import ToolError

if TYPE_CHECKING:
    from slime_plugin.rollout.tools.http_service import RemoteService

ROWS = 10  # included in the price of a request; the cached answer serves every smaller top_k
_MARKUP = re.compile(r"</?(?:em|b|strong|span|a|br|p)\b[^>]*>", re.IGNORECASE)  # around matched words


class DashScopeSearch:
    """Web search with DashScope's text search.

    Sent:     {"uq": "...", "page": 1, "rows": 10}
    Expected: {"status": 0, "data": {"docs": [{"title": "...", "url": "...", "snippet": "..."}, ...]}}
    """

    def __init__(self, service: RemoteService, parameters: Mapping[str, Any]) -> None:
        self._service = service
        self._parameters = parameters

    async def find(self, query: str, count: int) -> Sequence[Document]:
        body = {"uq": query, "page": 1, "rows": max(ROWS, count), **self._parameters}
        return (await self._service.ask(body, read_dashscope))[:count]


def read_dashscope(answer: Any) -> list[Document]:
    """Parse an answer. Documents without a text are left out.

    >>> read_dashscope({"status": 0, "data": {"docs": [{"title": "A", "url": "http://a", "snippet": "an <em>a</em>"}]}})
    [Document(text='an a', title='A', url='http://a')]
    """
    match answer:
        case {"status": 0, "data": {"docs": [*found]}}:
            documents = [_snippet(entry) for entry in found if isinstance(entry, dict)]
            return [document for document in documents if document.text.strip()]
        case {"status": 0, "data": {"docs": None} | None}:
            return []
    reason = answer.get("message", "no reason given") if isinstance(answer, dict) else "not an object"
    raise ToolError(f"search failed: the service gives no results: {printable(reason, 200)}", "unavailable")


def _snippet(entry: dict[str, Any]) -> Document:
    title, url = entry.get("title"), entry.get("url")
    return Document(_plain(entry.get("snippet")), _plain(title) or None, url if isinstance(url, str) else None)


def _plain(value: object) -> str:
    return html.unescape(_MARKUP.sub("", value)) if isinstance(value, str) else ""


class Retriever:
    """A retrieval server that speaks Search-R1's protocol.

    Sent:     {"queries": ["..."], "topk": 3, "return_scores": true}
    Expected: {"result": [[{"document": {"contents": "title\\ntext"}, "score": 0.9}, ...]]}
    """

    def __init__(self, service: RemoteService) -> None:
        self._service = service

    async def find(self, query: str, count: int) -> Sequence[Document]:
        body = {"queries": [query], "topk": count, "return_scores": True}
        return await self._service.ask(body, read_retrieved)


def read_retrieved(answer: Any) -> list[Document]:
    """Parse an answer.

    >>> read_retrieved({"result": [[{"document": {"contents": '"France"\\nParis is its capital.'}, "score": 2.5}]]})
    [Document(text='Paris is its capital.', title='France', url=None)]
    """
    match answer:
        case {"result": [[*found]]}:
            return [_passage(entry) for entry in found]
    raise ToolError("search failed: the server answered without a list of results for the query", "unavailable")


def _passage(entry: Any) -> Document:
    match entry:
        case {"document": {"contents": str(contents)}} | {"contents": str(contents)}:  # the latter without scores
            title, newline, text = contents.strip().partition("\n")
            return Document(text, title.strip('"')) if newline else Document(title)
    raise ToolError("search failed: the server answered with a document that has no contents", "unavailable")
