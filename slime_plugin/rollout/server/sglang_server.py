"""An SGLang server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from slime_plugin.rollout.server.server_process import ServerProcess
from slime_plugin.rollout.server.sglang_flags import Flags


class Server(ServerProcess):
    """SGLang with one model: ``with Server(Flags(model, "cpu")) as server: ...`` serves it at ``server.url``."""

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
        # SGLang takes 15 s to shut down in order, which only GPUs need.
        grace_s = 0.5 if flags.device == "cpu" else 30.0
        super().__init__(f"server of {flags.model}", host=host, port=port, log=log, grace_s=grace_s)
        self.flags = flags

    def command(self, port: int) -> list[str]:
        return self.flags.command(self.host, port)

    def env(self) -> Mapping[str, str]:
        return self.flags.env()

    def check(self) -> None:
        self.flags.check()
        super().check()
