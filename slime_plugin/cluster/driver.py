"""slime's own training loop, behind a check of its arguments: python -m slime_plugin.cluster.driver FLAGS...

slime ignores unknown flags, sets the keys of a YAML file on its arguments unchecked, and calls any hooks that it is
given. So before any GPU is used, this checks the flags, the parsed arguments, and the source of the installed slime and
Megatron; then it calls slime's ``train``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slime_plugin.cluster.flags import check_command_line
from slime_plugin.cluster.job_problems import missing_here
from slime_plugin.errors import ConfigError, MemoryWalkerError, refuse
from slime_plugin.slime.args import cell_of
from slime_plugin.slime.contract import contract_problems
from slime_plugin.slime.refusals import check_args


def main(words: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if words is None else words)
    try:
        check_command_line(words)
        refuse(contract_problems())
        train = slime_train()
        args = parsed(words)
        check_args(args)
        # The launch may have been typed on another machine.
        refuse([*allocator_problems(args, os.environ), *missing_here(cell_of(args))])
    except MemoryWalkerError as error:
        for line in str(error).splitlines():
            print(f"Error: {line}", file=sys.stderr)
        sys.exit(1)
    train(args)


def allocator_problems(args: Namespace, environment: Mapping[str, str]) -> Iterator[str]:
    """Ranks could not free their GPU memory for the engines: torch_memory_saver does not see expandable segments."""
    if not getattr(args, "offload_train", False):
        return
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower():
            yield f"{name}: expandable segments do not work with --offload-train; leave them out"
    if environment.get("SLIME_ENABLE_EXPANDABLE_SEGMENTS") == "1":
        yield (
            "SLIME_ENABLE_EXPANDABLE_SEGMENTS: is 1, which does not work with --offload-train; unset it, or let the "
            "ranks keep their memory"
        )


def parsed(words: Sequence[str]) -> Namespace:
    """The arguments as slime's parser returns them."""
    from slime.utils.arguments import parse_args

    before, sys.argv = sys.argv, ["train.py", *words]
    try:
        args: Namespace = parse_args()
    finally:
        sys.argv = before
    return args


def slime_train() -> Callable[[Namespace], None]:
    """The function ``train`` of slime's ``train.py``, which lies beside its package, or in SLIME_DIR."""
    package = importlib.util.find_spec("slime")
    if package is None or package.origin is None:
        raise ConfigError("slime: not installed; use the image of docker/slime.Dockerfile")
    folder = Path(os.environ.get("SLIME_DIR") or Path(package.origin).parent.parent)
    path = folder / "train.py"
    if not path.is_file():
        raise ConfigError(f"there is no {path}; set SLIME_DIR to the folder of slime's repository")
    spec = importlib.util.spec_from_file_location("slime_train", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    train: Callable[[Namespace], None] = module.train
    return train


if __name__ == "__main__":
    main()
