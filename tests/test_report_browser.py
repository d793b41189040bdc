"""The page in a real browser: its script runs, and a link to a rollout shows its tokens."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from slime_plugin.report.folder import RunFolder
from slime_plugin.report.run_page import run_page
from tests.run_folders import compare, iteration, make_run, running, step

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--dump-dom"),
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


def shown_by_browser(folder: RunFolder, place: str, profile: Path) -> str:
    """The document after its script has run."""
    page = folder.path / "report.html"
    page.write_text(run_page([folder]), encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", f"{page.resolve().as_uri()}{place}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 'data-ready="yes"' in done.stdout, "the script did not come to its end"
    assert "data-error" not in done.stdout
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    records = [running("a"), running("7/b c&d")]
    lines = [line for i in range(2) for line in (step(i), iteration(i))]
    made = make_run(tmp_path / "run", lines=lines, rollouts={0: records, 1: [running("later", status="<b>odd</b>")]})
    compare(made, records, {"naive_compressed": [-0.5, 0.25, -1.0, 2.0, -0.125, 0.0], "mask4d": [1e-7] * 9})
    return made


def test_the_list_has_every_rollout_as_text(folder: RunFolder, tmp_path: Path) -> None:
    dom = shown_by_browser(folder, "", tmp_path / "profile")
    body = re.findall(r'<table id="list">.*?</table>', dom, re.DOTALL)[0]
    cells = [unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td>(.*?)</td>", body)]
    assert cells[::6] == ["a", "7/b c&d", "later"]
    assert cells[3::6] == ["completed", "completed", "<b>odd</b>"]
    assert 'href="#rollout=7%2Fb%20c%26d"' in body
    assert '<main id="tree" hidden' in dom


def test_a_link_opens_the_tree_with_its_tokens(folder: RunFolder, tmp_path: Path) -> None:
    dom = shown_by_browser(folder, "#rollout=7%2Fb%20c%26d&method=naive_compressed", tmp_path / "profile")
    assert re.search(r'<main id="top" hidden', dom)
    tokens = re.findall(r'<span class="([^"]*)" data-p="(\d+)"([^>]*)>([^<]*)</span>', dom)
    assert [text for _, _, _, text in tokens] == ["s", "y1", "y2", "y3", "y4", "y5", "y6", "y7"], "layer 0"
    classes = {text: names.split() for names, _, _, text in tokens}
    assert classes["y4"] == []
    assert classes["y5"] == ["sampled", "gone", "lost"]
    assert classes["y6"] == ["sampled", "off"]
    colours = {text: style for _, _, style, text in tokens}
    assert "--lower" in colours["y6"], "the trainer finds it less likely by half a nat"
    assert "--higher" in colours["y7"], "and this one more likely"
    assert "background" not in colours["y5"], "what is not trained has no difference"
    strips = re.findall(r'<div class="strip( chosen)?">', dom)
    assert strips == [" chosen", "", "", ""], "four live contexts"
    assert dom.count('class="edit"') == 3
    assert "mean |Δ log p| 0.375" in dom, "of y6 and y7, which were sampled there"


def test_a_link_to_nowhere_says_so(folder: RunFolder, tmp_path: Path) -> None:
    assert "There is no such rollout in this page." in shown_by_browser(folder, "#rollout=x", tmp_path / "profile")
