"""Search by a retrieval server of one's own, in the words of Search-R1's.

Sent:     {"queries": ["..."], "topk": 3, "return_scores": true}
Expected: {"result": [[{"document": {"contents": "title\\ntext"}, "score": 0.9}, ...]]}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime_plugin.bridge.tools.base import ToolError
from slime_plugin.bridge.tools.search import Document

if TYPE_CHECKING:
    from slime_plugin.bridge.tools.service import Service


class Retriever:
    """One query per request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def find(self, query: str, count: int) -> Sequence[Document]:
        """What the server holds for best."""
        body = {"queries": [query], "topk": count, "return_scores": True}
        return await self._service.ask(body, read_documents)


def read_documents(answer: Any) -> list[Document]:
    """The documents in an answer.

    >>> read_documents({"result": [[{"document": {"contents": '"France"\\nParis is its capital.'}, "score": 2.5}]]})
    [Document(text='Paris is its capital.', title='France', url=None)]
    """
    match answer:
        case {"result": [[*found]]}:
            return [_document(entry) for entry in found]
    raise ToolError("search failed: the server answered without a list of results for the query")


def _document(entry: Any) -> Document:
    match entry:
        case {"document": {"contents": str(contents)}} | {"contents": str(contents)}:  # the latter without scores
            title, newline, text = contents.strip().partition("\n")
            return Document(text, title.strip('"')) if newline else Document(title)
    raise ToolError("search failed: the server answered with a document that has no contents")
