"""An SGLang server, and the router that several of them stand behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from slime_plugin.bridge.server.flags import Flags
from slime_plugin.bridge.server.process import Service, free_port
from slime_plugin.errors import ConfigError


class Server(Service):
    """SGLang with one model.

    ``with Server(Flags(model, "cpu")) as server: ...`` has it at ``server.url``.
    """

    STAGES: ClassVar[tuple[tuple[str, str], ...]] = (
        ("server_args=", "starting the scheduler"),
        ("Init parallel begin", "importing models"),
        ("Load weight begin", "loading weights"),
        ("Load weight end", "allocating the KV cache"),
        ("Uvicorn running on", "generating a first token"),
    )

    def __init__(
        self, flags: Flags, *, host: str = "127.0.0.1", port: int | None = None, log: Path | None = None
    ) -> None:
        # On a CPU nothing is worth the quarter of a minute that SGLang takes to end by itself; GPUs are left in order.
        grace = 1.0 if flags.device == "cpu" else 30.0
        super().__init__(f"server of {flags.model}", host=host, port=port, log=log, grace=grace)
        self.flags = flags

    def command(self, port: int) -> list[str]:
        return self.flags.command(self.host, port)

    def environment(self) -> Mapping[str, str]:
        return self.flags.environment()

    def check(self) -> None:
        self.flags.check()
        super().check()


class Router(Service):
    """SGLang's router over servers that run. Requests with the same ``X-SMG-Routing-Key`` go to the same server."""

    def __init__(
        self, urls: Sequence[str], *, host: str = "127.0.0.1", port: int | None = None, log: Path | None = None
    ) -> None:
        super().__init__(f"router over {len(urls)} servers", host=host, port=port, log=log)
        self.urls = tuple(urls)

    def command(self, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "slime_plugin.bridge.server.route"),
            *("--host", self.host, "--port", str(port), "--worker-urls", *self.urls),
            # New sessions go to the server with the fewest, and stay there.
            *("--policy", "manual", "--assignment-mode", "min_group"),
            "--disable-retries",  # whoever asks decides whether to ask again
            *("--log-level", "warn"),
            *("--prometheus-host", self.host, "--prometheus-port", str(free_port(self.host))),
        ]

    def healthy(self) -> bool:
        """Once it knows all servers; before that it refuses requests, or sends them all to one."""
        answer = self._get("/readiness")
        return answer is not None and json.loads(answer)["healthy_workers"] == len(self.urls)

    def check(self) -> None:
        if not self.urls:
            raise ConfigError("a router needs the URL of at least 1 server, it has 0")
        if importlib.util.find_spec("sglang_router") is None:
            raise ConfigError("the router needs sglang_router: run launch/setup.sh, or pip install sglang-router")
        super().check()
