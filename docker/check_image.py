"""Refuse an image whose packages are not those of docker/versions.env: ``check_image.py numpy=1.26.4 ...``."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version


def found(package: str) -> str:
    try:
        return version(package).partition("+")[0]  # a build such as +cu129 is the same version
    except PackageNotFoundError:
        return "missing"


def main() -> None:
    expected = dict(word.split("=", 1) for word in sys.argv[1:])
    wrong = [f"{name} is {found(name)}, not {right}" for name, right in expected.items() if found(name) != right]
    if wrong:
        sys.exit("; ".join(wrong) + "; docker/versions.env names the versions")


if __name__ == "__main__":
    main()
