"""What the policy may call: the ``tools:`` list of a configuration.

Every remote service has its own limits and its own cache, because services differ in both. Keys are named by the
environment variable that holds them and are never part of a configuration.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from slime_plugin.config.custom import CUSTOM, Custom, type_of
from slime_plugin.config.frozen import File, Frozen, Url

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
KeyVariable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Remote(Frozen):
    """A service behind HTTP, and how much of it is asked."""

    timeout: float = Field(default=20.0, gt=0)
    """Seconds one request may take. One that takes longer is not repeated."""
    rate: float | None = Field(default=None, gt=0)
    """Requests per second, of all sessions of a process together. Unlimited if not set."""
    retries: int = Field(default=3, ge=0)
    """How often a request is repeated after 429, 5xx or a broken connection, with growing, jittered pauses."""
    cache: File | None = None
    """Folder of answers that were given before, shared by any number of processes. Nothing is kept if not set."""
    max_bytes: int = Field(default=8_000_000, ge=1)
    """Most bytes of an answer; a longer one is refused."""
    key_variable: KeyVariable | None = None
    """Environment variable that holds the key. Asked without a key if not set."""


class Bm25(Frozen):
    """A corpus in memory, searched by words. Needs no network; results are the same in every run."""

    type: Literal["bm25"] = "bm25"
    corpus: File
    """JSON lines with ``text`` and, if you like, ``title`` and ``id``."""
    k1: float = Field(default=1.5, ge=0)
    """How soon further occurrences of a word stop counting."""
    b: float = Field(default=0.75, ge=0, le=1)
    """How much long documents are marked down."""


class HttpRetriever(Remote):
    """A retrieval server that speaks as the one of Search-R1 does."""

    type: Literal["http"] = "http"
    url: Url
    """The whole address, such as http://127.0.0.1:8000/retrieve."""


class DashScope(Remote):
    """The web search of the paper: Alibaba Cloud's DashScope."""

    type: Literal["dashscope"] = "dashscope"
    url: Url = "https://dashscope.aliyuncs.com/api/v1/indices/plugin/web_search"
    """Where it is asked."""
    key_variable: KeyVariable | None = "DASHSCOPE_API_KEY"
    """Environment variable that holds the key."""
    parameters: dict[str, Any] = Field(default={})
    """Further fields of the request, such as ``scene`` or ``uid``."""


SearchBackend = Annotated[Bm25 | HttpRetriever | DashScope, Field(discriminator="type")]


class Search(Frozen):
    """Finds documents for a query."""

    type: Literal["search"] = "search"
    name: Name = "search"
    """What the policy calls it."""
    description: str = "Search for documents that answer a query."
    """What the policy is told about it."""
    backend: SearchBackend = DashScope()
    """What is searched."""
    top_k: int = Field(default=3, ge=1)
    """Documents per call."""
    max_chars: int = Field(default=2000, ge=1)
    """Most characters of one document; a longer one is cut, and ends in dots."""
    numbered: bool = True
    """One line ``[1] title (address): text`` per document. If not, only the texts, one per line."""


class Firecrawl(Remote):
    """Fetches pages as Markdown."""

    url: Url = "https://api.firecrawl.dev"
    """Where ``/v2/scrape`` is."""
    key_variable: KeyVariable | None = "FIRECRAWL_API_KEY"
    """Environment variable that holds the key. Asked without a key if not set."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds one request may take. One that takes longer is not repeated."""
    retries: int = Field(default=1, ge=0)
    """Pages that are gone answer 500 too, so that many repetitions are wasted."""
    parameters: dict[str, Any] = Field(default={})
    """Further fields of the request, such as ``maxAge`` or ``proxy``."""


class Summariser(Remote):
    """A model behind an OpenAI-compatible server that reads a page with a goal in mind."""

    url: Url = "https://dashscope.aliyuncs.com/compatible-mode/v1"
    """Where ``/chat/completions`` is."""
    model: str = "qwen-turbo"
    """Qwen3-Turbo in the paper; this is how DashScope calls it."""
    key_variable: KeyVariable | None = "DASHSCOPE_API_KEY"
    """Environment variable that holds the key. Asked without a key if not set."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds one request may take. One that takes longer is not repeated."""
    max_tokens: int = Field(default=1024, ge=1)
    """Most tokens of a summary."""
    parameters: dict[str, Any] = Field(default={"temperature": 0})
    """Further fields of the request, such as ``enable_thinking``."""


class Visit(Frozen):
    """Reads a page, and tells what is in it for a goal."""

    type: Literal["visit"] = "visit"
    name: Name = "visit"
    """What the policy calls it."""
    description: str = "Read a web page and report what is relevant to a goal."
    """What the policy is told about it."""
    firecrawl: Firecrawl = Firecrawl()
    """What is asked for the page."""
    summariser: Summariser | None = Summariser()
    """Null: the page itself is the result, cut to max_chars."""
    max_page_chars: int = Field(default=60_000, ge=1)
    """Most characters of a page that the summariser is shown."""
    max_chars: int = Field(default=8000, ge=1)
    """Most characters of the result; a longer one is cut, and ends in dots."""


class CustomTool(Custom):
    """A class of your own with ``schema`` and ``async __call__``, as in :mod:`slime_plugin.bridge.tools.base`."""


Tool = Annotated[
    Annotated[Search, Tag("search")] | Annotated[Visit, Tag("visit")] | Annotated[CustomTool, Tag(CUSTOM)],
    Discriminator(type_of),
]

Tools = Annotated[tuple[Tool, ...], Field(strict=False)]  # YAML has lists, and a strict tuple refuses them
