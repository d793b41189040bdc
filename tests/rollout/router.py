"""SGLang's router over running servers: what a job under slime puts in front of its engines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from slime_plugin.rollout.server.ports import free_port
from slime_plugin.rollout.server.server_process import ServerProcess


class Router(ServerProcess):
    """Requests with the same ``X-SMG-Routing-Key`` go to the same server."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(f"router over {len(urls)} servers")
        self.urls = tuple(urls)

    def command(self, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "tests.rollout.router"),
            *("--host", self.host, "--port", str(port), "--worker-urls", *self.urls),
            # A new rollout goes to the server with the fewest, and stays there.
            *("--policy", "manual", "--assignment-mode", "min_group"),
            "--disable-retries",  # the client retries
            *("--log-level", "warn"),
            *("--prometheus-host", self.host, "--prometheus-port", str(free_port(self.host))),
        ]

    def healthy(self) -> bool:
        """Whether it knows all servers; before that it refuses requests, or sends them all to one."""
        answer = self._get("/readiness")
        return answer is not None and json.loads(answer)["healthy_workers"] == len(self.urls)


def main(arguments: list[str]) -> None:
    """Its own launcher imports the engine for a mode that is not used here, which fails without CUDA."""
    from sglang_router.router import Router as SglangRouter
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(prog="router")
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    settings = RouterArgs.from_cli_args(parser.parse_args(arguments), use_router_prefix=False)
    settings._validate_router_args()
    SglangRouter.from_args(settings).start()


if __name__ == "__main__":
    main(sys.argv[1:])
