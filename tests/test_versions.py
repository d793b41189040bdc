"""docker/versions.env is where versions are written down; every other file that names one agrees with it."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = {
    "TORCH": "torch",
    "MEGATRON_CORE": "megatron-core",
    "SGLANG": "sglang",
    "SGLANG_ROUTER": "sglang-router",
    "RAY": "ray",
    "TRANSFORMERS": "transformers",
    "BM25S": "bm25s",
    "TENSORBOARDX": "tensorboardx",
}
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


VERSIONS = dict(line.split("=", 1) for line in text("docker/versions.env").splitlines() if line and line[0] != "#")


def test_every_line_is_a_version_or_says_what_they_are() -> None:
    for line in text("docker/versions.env").splitlines():
        assert re.fullmatch(r"|# .*|[A-Z0-9_]+=[A-Za-z0-9./_-]+", line), line


@pytest.mark.parametrize(("key", "package"), PACKAGES.items())
def test_requirements(key: str, package: str) -> None:
    pinned = "".join(text(f"requirements.{name}") for name in ("lock", "torch", "sglang"))
    assert re.findall(rf"^{package}==(\S+)", pinned, re.MULTILINE) == [VERSIONS[key]]
    assert version(package).partition("+")[0] == VERSIONS[key]


def test_python() -> None:
    project = text("pyproject.toml")
    assert f'requires-python = ">={VERSIONS["PYTHON"]}"' in project
    assert f"Python :: {VERSIONS['PYTHON']}" in project
    assert f'target-version = "py{VERSIONS["PYTHON"].replace(".", "")}"' in project
    assert f"version_info < ({VERSIONS['PYTHON'].replace('.', ', ')})" in text("launch/setup.sh")


def test_changelog() -> None:
    newest = re.split(r"^## ", text("CHANGELOG.md"), flags=re.MULTILINE)[1]
    verified = " ".join(re.findall(r"^Verified with .*?(?=\n\n|\Z)", newest, re.MULTILINE | re.DOTALL))
    named = {"PYTHON": "Python", **PACKAGES}
    found = {
        key: re.findall(rf"(?<![\w-]){re.escape(name)} (\d[\w.]*\w)", verified, re.IGNORECASE)
        for key, name in named.items()
    }
    assert found["TORCH"], "the newest section says what was run"
    for key, versions in found.items():
        accepted = {VERSIONS[key], VERSIONS.get(f"SLIME_{key}")}
        assert set(versions) <= accepted, f"CHANGELOG.md has {named[key]} {versions}, versions.env {VERSIONS[key]}"
    for commit in re.findall(r"commit ([0-9a-f]{7,40})", verified):
        assert any(VERSIONS[key].startswith(commit) for key in ("SLIME_COMMIT", "MEGATRON_COMMIT"))


def test_flags_were_read_from_these_versions() -> None:
    first = text("slime_plugin/cluster/flags.txt").splitlines()[0]
    assert first == (
        f"# slime {VERSIONS['SLIME_COMMIT']}, Megatron-LM {VERSIONS['MEGATRON_COMMIT']}, SGLang {VERSIONS['SGLANG']}, "
        f"sglang-router {VERSIONS['SGLANG_ROUTER']}"
    )


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_name_no_versions(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    arguments = [line.split()[1] for line in lines if line.startswith("ARG ")]
    body = "\n".join(lines)
    assert not re.findall(r"\d+\.\d+|[0-9a-f]{7,}", body)
    assert set(arguments) <= {*VERSIONS, "PIP_EXTRA_INDEX_URL", "HARNESSES"}, "none has a default; versions are here"
    assert all(re.search(rf"\$\{{?{name}\b", body) for name in arguments if name in VERSIONS), "and each is used"


def test_the_image_is_slimes_own() -> None:
    """Stable images have slime's numpy, which is below 2, because slime refuses to start with any other."""
    assert VERSIONS["SLIME_NUMPY"].startswith("1.")
    assert re.fullmatch(r"[\w.-]+-cu\d+", VERSIONS["SLIME_IMAGE_TAG"]), "a version and a CUDA, not a tag that moves"
    assert not VERSIONS["SLIME_IMAGE_TAG"].startswith("latest")
