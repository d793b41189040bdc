"""The page in a real browser: charts are drawn, a link to a rollout shows its tokens, and nothing is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from threading import Timer
from typing import Any, BinaryIO

import pytest

from slime_plugin.report.run_page import run_page
from slime_plugin.run.folder import RunFolder
from tests.run_folders import compare, iteration, make_run, running, step

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
DRAW_ALL = """
new Promise(done => {
  dispatchEvent(new Event("beforeprint"));
  setTimeout(() => done(document.documentElement.outerHTML), 0);
})
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


class Browser:
    """Chromium's remote debugging protocol over a pipe: JSON objects, each ended by a zero byte."""

    def __init__(self, commands: BinaryIO, replies: BinaryIO) -> None:
        self._commands, self._replies = commands, replies
        self._sent = 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (reply := self._read()).get("id") != self._sent:
            self.events.append(reply)
        assert "error" not in reply, reply
        result: dict[str, Any] = reply["result"]
        return result

    def wait_for(self, event: str) -> None:
        while not any(message["method"] == event for message in self.events):
            self.events.append(self._read())

    def attach(self) -> None:
        """To a new page; everything it logs and requests is in the events."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.events.clear()

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._replies.read(1)) != b"\0":
            assert byte, "chromium has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    (its_end, commands), (replies, other_end) = os.pipe(), os.pipe()
    command = ["bash", "-c", f'exec "$@" 3<&{its_end} 4>&{other_end}', "-", str(CHROMIUM), *FLAGS]
    with (
        open(commands, "wb", buffering=0) as to,
        open(replies, "rb") as back,
        subprocess.Popen(
            [*command, f"--user-data-dir={profile}"], pass_fds=(its_end, other_end), stderr=subprocess.DEVNULL
        ) as process,
    ):
        os.close(its_end)
        os.close(other_end)
        too_long = Timer(120, process.kill)
        too_long.start()
        try:
            yield Browser(to, back)
        finally:
            too_long.cancel()
            process.terminate()


def shown_by_browser(folder: RunFolder, place: str, profile: Path) -> str:
    """The document when all charts are drawn. Nothing was loaded or logged on the way."""
    page = folder.path / "report.html"
    page.write_text(run_page([folder]), encoding="utf-8")
    address = f"{page.resolve().as_uri()}{place}"
    with chromium(profile) as browser:
        browser.attach()
        browser.call("Page.navigate", url=address)
        browser.wait_for("Page.loadEventFired")
        result = browser.call("Runtime.evaluate", expression=DRAW_ALL, awaitPromise=True)["result"]
        seen = browser.events
    requests = [event["params"]["request"]["url"] for event in seen if event["method"] == "Network.requestWillBeSent"]
    assert [url.partition("#")[0] for url in requests] == [page.resolve().as_uri()]
    complaints = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert [event["params"] for event in seen if event["method"] in complaints] == []
    dom = str(result["value"])
    assert 'data-ready="yes"' in dom, "the script did not come to its end"
    assert "data-error" not in dom
    return dom


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
    assert "mean |logdiff| 0.375" in dom, "of y6 and y7, which were sampled there"


def test_a_link_to_nowhere_says_so(folder: RunFolder, tmp_path: Path) -> None:
    assert "There is no such rollout in this page." in shown_by_browser(folder, "#rollout=x", tmp_path / "profile")


def test_every_chart_is_drawn(folder: RunFolder, tmp_path: Path) -> None:
    dom = shown_by_browser(folder, "", tmp_path / "profile")
    plots = re.findall(r'<div class="plot([^"]*)" data-chart="\d+" role="img" aria-label="([^"]*)"', dom)
    assert "Mean reward" in [unescape(title) for _, title in plots]
    assert [title for classes, title in plots if "js-plotly-plot" not in classes] == []
    assert dom.count('class="main-svg"') >= len(plots)
    axes = set(re.findall(r'<text class="[xy]title"[^>]*>([^<]*)</text>', dom))
    assert {"iteration", "nats per token", "reward"} <= axes
    assert {"naive_compressed", "mask4d"} <= set(re.findall(r'<text class="legendtext"[^>]*>([^<]*)</text>', dom))
