"""``memorywalker engine``."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import click

from slime_plugin.cli.output import shown_stages
from slime_plugin.rollout.server import Flags, Server, chosen_device
from slime_plugin.run.signals import StopSignals

_COUNT = click.IntRange(min=1)


@click.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    metavar="HF_DIR",
    help="Folder of a Hugging Face checkpoint.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve on.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to serve on.  [default: a free one]")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU if there is one.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="Data type to compute in.  [default: float32 on a CPU, that of the checkpoint on a GPU]",
)
@click.option("--tp", type=_COUNT, default=1, show_default=True, help="Tensor-parallel ranks, a GPU each.")
@click.option("--max-total-tokens", type=_COUNT, help="Tokens in the KV cache.  [default: 65536 on a CPU]")
@click.option("--context-length", type=_COUNT, help="Maximum tokens of a request.  [default: that of the checkpoint]")
@click.option(
    "--seeded/--unseeded",
    default=None,
    help="Sample deterministically by the seed of each request, which then needs one.  [default: on a CPU only]",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Log file of SGLang.  [default: a temporary file]",
)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG_ARGUMENTS]")
def engine(
    model: Path,
    host: str,
    port: int | None,
    device: Literal["auto", "cpu", "cuda"],
    dtype: str | None,
    tp: int,
    max_total_tokens: int | None,
    context_length: int | None,
    seeded: bool | None,
    log: Path | None,
    extra: tuple[str, ...],
) -> None:
    """Serve a model with SGLang until you stop it.

    Starts a real SGLang server with the flags that rollouts need: prefix caching on, and on a CPU the backends that
    work there. Ends, with everything it started, on Ctrl-C or SIGTERM.
    """
    flags = Flags(
        model.absolute(), chosen_device(device), dtype, tp, max_total_tokens, context_length, seeded=seeded, extra=extra
    )
    server = Server(flags, host=host, port=port, log=log)
    with StopSignals(_leave, always=(signal.SIGINT, signal.SIGTERM)):
        try:
            server.start()
            with shown_stages() as on_progress:
                server.wait(on_progress)
            click.echo(f"serving {model} at {server.url} (pid {server.pid}, log {server.log}); Ctrl-C ends it")
            sys.stdout.flush()
            while True:
                server.check_alive()
                time.sleep(1)
        finally:
            server.stop()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Raise on every signal, so that the server is stopped."""
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
