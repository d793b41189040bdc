"""Refuse an image whose packages are not those of docker/versions.env: ``check_image.py numpy=1.26.4 ... --extra tap``.

A local build (``+cu129``) is the same version, and a development build of the same minor version is accepted with a
note: slime's image installs SGLang from its source, whose version then has a suffix. ``--extra`` checks what an extra
of this package requires, since it is installed without its dependencies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pins", nargs="*", metavar="NAME=VERSION")
    parser.add_argument("--extra", action="append", default=[], help="extra of memorywalker whose requirements count")
    args = parser.parse_args()
    problems = [problem for pin in args.pins for problem in _wrong_version(*pin.split("=", 1))]
    if problems:
        sys.exit("; ".join(problems) + "; docker/versions.env names the versions")
    problems = [problem for extra in args.extra for problem in _unmet(extra)]
    if problems:
        sys.exit("; ".join(problems) + "; install them in docker/slime.Dockerfile")


def _wrong_version(name: str, wanted: str) -> Iterator[str]:
    found = _version(name)
    if found is None:
        yield f"{name} is missing, not {wanted}"
    elif Version(found.public) == Version(wanted):
        return
    elif found.is_devrelease and found.release[:2] == Version(wanted).release[:2]:
        print(f"check_image: {name} is {found}, a build between releases, in place of {wanted}", file=sys.stderr)
    else:
        yield f"{name} is {found}, not {wanted}"


def _unmet(extra: str) -> Iterator[str]:
    for line in requires("memorywalker") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            found = _version(requirement.name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                yield f"{requirement.name} is {found or 'missing'}, and {extra} needs {requirement.specifier}"


def _version(name: str) -> Version | None:
    try:
        return Version(version(name))
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
