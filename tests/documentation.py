"""The commands that README.md and docs show, and what they print.

python -m tests.documentation       # run them again and write down what they print now
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.cli import run

ROOT = Path(__file__).parent.parent
WIDTH = "100"
_BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
_COMMAND = re.compile(r"^\$ (memorywalker .*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown_commands() -> list[tuple[str, str, str]]:
    """(page, command, output) of every ``$ memorywalker`` line in a console block."""
    return [
        (page.name, command, output)
        for page in pages()
        for block in _BLOCK.findall(page.read_text(encoding="utf-8"))
        for command, output in _COMMAND.findall(block)
    ]


def printed(command: str) -> str:
    """What a command prints; it is shown as run in the project's folder on a terminal of ``WIDTH`` columns."""
    result = run(*command.split()[1:])
    assert result.exit_code == 0, result.stderr
    return "".join(f"{line.rstrip()}\n" for line in (result.stdout + result.stderr).splitlines())


def main() -> None:
    os.chdir(ROOT)
    os.environ["COLUMNS"] = WIDTH
    for page in pages():
        text = page.read_text(encoding="utf-8")
        fresh = _BLOCK.sub(lambda block: _COMMAND.sub(lambda m: f"$ {m[1]}\n{printed(m[1])}", block[0]), text)
        if fresh != text:
            page.write_text(fresh, encoding="utf-8")
            print(f"updated {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
