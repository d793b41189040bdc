"""The tools that the policy may call: the ``tools:`` list of a configuration.

Every remote service has limits and a cache of its own. API keys are named by the environment variable that holds them
and are never part of a configuration.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slime_plugin.config.custom import BY_TYPE, Custom
from slime_plugin.config.frozen import File, Frozen, Url

Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
KeyVariable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Remote(Frozen):
    """A service behind HTTP, and the limits on requests to it."""

    timeout: float = Field(default=20.0, gt=0)
    """Time-out of one request, in seconds. A request that timed out is not retried."""
    rate: float | None = Field(default=None, gt=0)
    """Limit on requests per second, of all rollouts of a process together. Unlimited if not set."""
    retries: int = Field(default=3, ge=0)
    """Retries after 429, 5xx or a broken connection, with exponential, jittered back-off."""
    cache: File | None = None
    """Folder that caches responses, shared by any number of processes. No cache if not set."""
    max_bytes: int = Field(default=8_000_000, ge=1)
    """Limit on the bytes of a response; a longer one is refused."""
    key_variable: KeyVariable | None = None
    """Environment variable that holds the API key. Requests have no key if not set."""


class Bm25(Frozen):
    """A corpus in memory, searched by words. Needs no network; results are the same in every run."""

    type: Literal["bm25"] = "bm25"
    corpus: File
    """JSON lines with ``text`` and, optionally, ``title`` and ``id``."""
    k1: float = Field(default=1.5, ge=0)
    """Saturation of the term frequency: higher values count repeated words more."""
    b: float = Field(default=0.75, ge=0, le=1)
    """Penalty on long documents, from 0 (none) to 1."""


class HttpRetriever(Remote):
    """A retrieval server with the API of Search-R1's."""

    type: Literal["http"] = "http"
    url: Url
    """The complete URL, such as http://127.0.0.1:8000/retrieve."""


class DashScope(Remote):
    """The web search of the paper: Alibaba Cloud's DashScope."""

    type: Literal["dashscope"] = "dashscope"
    url: Url = "https://dashscope.aliyuncs.com/api/v1/indices/plugin/web_search"
    """Its endpoint."""
    key_variable: KeyVariable | None = "DASHSCOPE_API_KEY"
    """Environment variable that holds the API key."""
    parameters: dict[str, Any] = Field(default={})
    """Further fields of the request, such as ``scene`` or ``uid``."""


SearchBackend = Annotated[Bm25 | HttpRetriever | DashScope, Field(discriminator="type")]


class Search(Frozen):
    """Finds documents for a query."""

    type: Literal["search"] = "search"
    name: Name = "search"
    """Name of the tool for the policy."""
    description: str = "Search for documents that answer a query."
    """Description of the tool for the policy."""
    backend: SearchBackend = DashScope()
    """The search engine or corpus."""
    top_k: int = Field(default=3, ge=1)
    """Documents per call."""
    max_chars: int = Field(default=2000, ge=1)
    """Limit on the characters of a document; a longer one is cut, and ends in dots."""
    numbered: bool = True
    """One line ``[1] title (address): text`` per document; otherwise only the texts, one per line."""


class Firecrawl(Remote):
    """Firecrawl returns pages as Markdown."""

    url: Url = "https://api.firecrawl.dev"
    """Base URL of ``/v2/scrape``."""
    key_variable: KeyVariable | None = "FIRECRAWL_API_KEY"
    """Environment variable that holds the API key. Requests have no key if not set."""
    timeout: float = Field(default=30.0, gt=0)
    """Time-out of one request, in seconds. A request that timed out is not retried."""
    retries: int = Field(default=1, ge=0)
    """Retries. Few, because a page that no longer exists is answered with 500 too."""
    parameters: dict[str, Any] = Field(default={})
    """Further fields of the request, such as ``maxAge`` or ``proxy``."""


class Summariser(Remote):
    """A model behind an OpenAI-compatible server that summarises a page with respect to a goal."""

    url: Url = "https://dashscope.aliyuncs.com/compatible-mode/v1"
    """Base URL of ``/chat/completions``."""
    model: str = "qwen-turbo"
    """Qwen3-Turbo in the paper; this is how DashScope calls it."""
    key_variable: KeyVariable | None = "DASHSCOPE_API_KEY"
    """Environment variable that holds the API key. Requests have no key if not set."""
    timeout: float = Field(default=30.0, gt=0)
    """Time-out of one request, in seconds. A request that timed out is not retried."""
    max_tokens: int = Field(default=1024, ge=1)
    """Limit on the tokens of a summary."""
    parameters: dict[str, Any] = Field(default={"temperature": 0})
    """Further fields of the request, such as ``enable_thinking``."""


class Visit(Frozen):
    """Reads a page and reports what is relevant to a goal."""

    type: Literal["visit"] = "visit"
    name: Name = "visit"
    """Name of the tool for the policy."""
    description: str = "Read a web page and report what is relevant to a goal."
    """Description of the tool for the policy."""
    firecrawl: Firecrawl = Firecrawl()
    """The service that fetches the page."""
    summariser: Summariser | None = Summariser()
    """If null, the page itself is the result, cut to max_chars."""
    max_page_chars: int = Field(default=60_000, ge=1)
    """Limit on the characters of a page that the summariser gets."""
    max_chars: int = Field(default=8000, ge=1)
    """Limit on the characters of the result; a longer one is cut, and ends in dots."""


class CustomTool(Custom):
    """A class of your own with ``schema`` and ``async __call__``, as in :mod:`slime_plugin.rollout.tools.tool`."""


ToolSettings = Annotated[Search | Visit | CustomTool, BY_TYPE]
Tools = Annotated[tuple[ToolSettings, ...], Field(strict=False)]  # YAML has lists, and a strict tuple refuses them
