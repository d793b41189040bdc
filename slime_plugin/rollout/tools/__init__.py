"""Tools the policy may call: opened once per process, shared by all its rollouts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from slime_plugin.config import tools as config
from slime_plugin.config.custom import load_custom
from slime_plugin.errors import ConfigError
from slime_plugin.rollout.retry import Timing
from slime_plugin.rollout.tools.bm25 import Bm25
from slime_plugin.rollout.tools.search import Backend, SearchTool
from slime_plugin.rollout.tools.search_services import DashScopeSearch, Retriever
from slime_plugin.rollout.tools.tool import Parameter, Schema, Tool, ToolError
from slime_plugin.rollout.tools.visit import REFUSALS, VisitTool

if TYPE_CHECKING:
    from slime_plugin.rollout.tools.http_service import RemoteServices

__all__ = ["BACKENDS", "TOOLS", "Parameter", "Schema", "Tool", "ToolError", "open_tools"]


def _search(settings: config.Search, services: RemoteServices, where: str) -> Tool:
    backend = BACKENDS[settings.backend.type](settings.backend, services, f"{where}.backend")
    return SearchTool(settings, backend)


def _visit(settings: config.Visit, services: RemoteServices, where: str) -> Tool:
    remote = settings.firecrawl
    pages = services.open(settings.name, f"{remote.url.rstrip('/')}/v2/scrape", remote, f"{where}.firecrawl", REFUSALS)
    if settings.summariser is None:
        return VisitTool(settings, pages, None)
    chat = f"{settings.summariser.url.rstrip('/')}/chat/completions"
    return VisitTool(settings, pages, services.open(settings.name, chat, settings.summariser, f"{where}.summariser"))


def _retriever(settings: config.HttpRetriever, services: RemoteServices, where: str) -> Backend:
    return Retriever(services.open("search", settings.url, settings, where))


def _dashscope(settings: config.DashScope, services: RemoteServices, where: str) -> Backend:
    return DashScopeSearch(services.open("search", settings.url, settings, where), settings.parameters)


def _bm25(settings: config.Bm25, services: RemoteServices, where: str) -> Backend:
    return Bm25(settings, where)


TOOLS: dict[str, Callable[[Any, RemoteServices, str], Tool]] = {"search": _search, "visit": _visit}
BACKENDS: dict[str, Callable[[Any, RemoteServices, str], Backend]] = {
    "bm25": _bm25,
    "http": _retriever,
    "dashscope": _dashscope,
}


@asynccontextmanager
async def open_tools(
    configs: Sequence[config.ToolSettings], env: Mapping[str, str] = os.environ, timing: Timing | None = None
) -> AsyncIterator[dict[str, Tool]]:
    """Open the tools, by name. All invalid settings and missing API keys are reported before anything starts."""
    from slime_plugin.rollout.tools.http_service import RemoteServices  # aiohttp

    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(RemoteServices(env, timing or Timing()))
        tools = _build(configs, services)
        for tool in tools.values():
            if isinstance(tool, AbstractAsyncContextManager):
                await stack.enter_async_context(tool)
        yield tools


def _build(configs: Sequence[config.ToolSettings], services: RemoteServices) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    mistakes: list[str] = []
    for i, settings in enumerate(configs):
        where = f"tools.{i}"
        try:
            if isinstance(settings, config.CustomTool):
                tool = _custom(settings, where)
            else:
                tool = TOOLS[settings.type](settings, services, where)
        except ConfigError as error:
            mistakes.append(str(error))
            continue
        if tools.setdefault(tool.schema.name, tool) is not tool:
            mistakes.append(f"{where}: there are two tools named {tool.schema.name!r}; give one another name")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return tools


def _custom(settings: config.CustomTool, where: str) -> Tool:
    tool = load_custom(settings, where)
    if not (isinstance(getattr(tool, "schema", None), Schema) and callable(tool)):
        raise ConfigError(
            f"{where}: {settings.type} is not a tool: it needs a schema (rollout.tools.Schema) and __call__"
        )
    checked: Tool = tool
    return checked
