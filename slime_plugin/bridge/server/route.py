"""Runs SGLang's router alone: python -m slime_plugin.bridge.server.route ROUTER_ARGUMENTS

Its own launcher imports the whole engine first, for a mode that is not used here; that takes ten seconds, and fails
where there is no CUDA.
"""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str]) -> None:
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(prog="route")
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    settings = RouterArgs.from_cli_args(parser.parse_args(arguments), use_router_prefix=False)
    settings._validate_router_args()
    Router.from_args(settings).start()


if __name__ == "__main__":
    from slime_plugin.bridge.server.process import end_with_parent

    end_with_parent()
    main(sys.argv[1:])
