"""A run's page: the numbers it was made from stand in it, in words, in plots and in trees."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.config.method import Distillation, NaiveCompressed
from slime_plugin.errors import MemoryWalkerError
from slime_plugin.methods.naive_compressed import NaiveCompressedMethod
from slime_plugin.report.charts import (
    PALETTE,
    Chart,
    Colours,
    Series,
    bar_chart,
    column_chart,
    dot_chart,
    line_chart,
    plotly_script,
)
from slime_plugin.report.matrix_table import legend
from slime_plugin.report.matrix_table import methods_of as matrix_methods
from slime_plugin.report.run_data import read_runs
from slime_plugin.report.run_page import run_page
from slime_plugin.run.folder import RunFolder
from tests.cli import run
from tests.conftest import ROOT, example
from tests.run_folders import COSTS, LOGDIFFS, REWARDS, TRAINED, compare, iteration, make_run, running, step

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>\u2028"\'&'


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its data, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._inside: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style" and data.strip():
            self.text.append(data.strip())

    @property
    def data(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.scripts[0])
        return value

    def figure(self, title: str) -> dict[str, Any]:
        (chart,) = [a["data-chart"] for tag, a in self.tags if tag == "div" and a.get("aria-label") == title]
        found: dict[str, Any] = self.data["charts"][int(chart or "")]
        return found

    def series(self, title: str) -> dict[str, list[tuple[float, float | None]]]:
        """The lines of a chart, by name."""
        return {one["name"]: list(zip(one["x"], one["y"], strict=True)) for one in self.figure(title)["data"]}


@pytest.fixture
def quick(tmp_path: Path) -> RunFolder:
    """Three iterations, of which the first was compared."""
    records = [running("a"), running("b", reward=0.5)]
    lines = [line for i in range(3) for line in (step(2 * i), step(2 * i + 1), iteration(i))]
    folder = make_run(tmp_path / "quick", lines=lines, rollouts={0: records, 2: [running("c")]})
    compare(folder, records, {"mask4d": [1e-7] * 9, "naive_compressed": [-0.5, 0.25, -1.0, 2.0, -0.125, 0.0]})
    return folder


def one(charts: Sequence[Chart]) -> dict[str, Any]:
    (chart,) = charts
    return chart.figure


def test_a_line_chart_has_its_values_its_axes_and_its_levels() -> None:
    series = [Series("a", [(0, 0.5), (5, 1.0)], "#123456", "dash"), Series("b", [(0, 2.0)], background=True)]
    figure = one(line_chart("t", series, x="iteration", y="nats", levels={"limit": 1.5}, marks={"off": 5}, zero=True))
    a, b = figure["data"]
    assert (a["name"], a["x"], a["y"]) == ("a", [0, 5], [0.5, 1.0])
    assert (a["marker"]["color"], a["line"]["dash"]) == ("#123456", "dash")
    assert b["showlegend"] is False
    layout = figure["layout"]
    assert [layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis")] == ["iteration", "nats"]
    assert (layout["yaxis"]["type"], layout["yaxis"]["rangemode"]) == ("linear", "tozero")
    assert [(shape["x0"], shape["y0"]) for shape in layout["shapes"]] == [(0, 1.5), (5, 0)]
    assert [(note["text"], note.get("y")) for note in layout["annotations"]] == [("limit", 1.5), ("off", 1)]


def test_a_level_stands_at_its_height_on_a_logarithmic_axis() -> None:
    layout = one(
        line_chart("t", [Series("a", [(0, 1e-6)])], x="", y="", log=True, levels={"floor": 1e-7, "none": 0.0})
    )["layout"]
    assert layout["yaxis"]["type"] == "log"
    assert [shape["y0"] for shape in layout["shapes"]] == [1e-7], "plotly takes a shape's value as it is,"
    assert [note["y"] for note in layout["annotations"]] == pytest.approx([-7]), "and an annotation's logarithm"


def test_a_gap_is_not_a_zero() -> None:
    values = [(0, 1.0), (1, 0.0), (2, None), (3, math.nan), (4, 2.0)]
    (line,) = one(line_chart("t", [Series("a", values)], x="", y=""))["data"]
    assert line["y"] == [1.0, 0.0, None, None, 2.0]
    (line,) = one(line_chart("t", [Series("a", values)], x="", y="", log=True))["data"]
    assert line["y"] == [1.0, None, None, None, 2.0], "0 has no place on a logarithmic axis"
    assert line_chart("t", [Series("a", [(0, None), (1, 0.0)])], x="", y="", log=True) == []


def test_dots_share_a_logarithmic_axis() -> None:
    rows: dict[str, dict[str, float | None]] = {"near": {"a": 1e-4, "b": 1.0}, "far": {"a": 1e-2, "b": None}}
    figure = one(dot_chart("t", rows, Colours(["a", "b"]), x="nats"))
    assert {dots["name"]: (dots["y"], dots["x"]) for dots in figure["data"]} == {
        "a": (["near", "far"], [1e-4, 1e-2]),
        "b": (["near", "far"], [1.0, None]),
    }
    assert figure["layout"]["xaxis"]["type"] == "log"
    assert figure["layout"]["xaxis"]["title"]["text"] == "nats"


def test_bars_are_stacked_from_their_parts() -> None:
    bars = {"a": {"x": 2.0, "y": 1.0}, "b": {"x": 1.0}}
    figure = one(bar_chart("t", bars, Colours(["x", "y"]), x="tokens", text="{:.1f}!".format))
    assert [(part["name"], part["y"], part["x"], part["text"]) for part in figure["data"]] == [
        ("x", ["a", "b"], [2.0, 1.0], ["2.0!", "1.0!"]),
        ("y", ["a", "b"], [1.0, None], ["1.0!", ""]),
    ]
    assert figure["layout"]["barmode"] == "stack"
    single = one(bar_chart("t", {"a": {"": 1.0}, "b": {"": 2.0}}, Colours(["a", "b"]), x=""))["data"][0]
    assert single["marker"]["color"] == list(PALETTE[:2]), "bars without parts have colours of their own"
    assert bar_chart("t", {"a": {"x": 0.0}}, Colours(), x="") == []


def test_columns_are_stacked_in_one_order() -> None:
    columns = {0: {"b": 3.0}, 1: {"a": 4.0, "b": 1.0, "none": 0.0}}
    figure = one(column_chart("t", columns, Colours(["a", "b"]), x="iteration", y="seconds"))
    assert [(part["name"], part["x"], part["y"]) for part in figure["data"]] == [
        ("a", [0, 1], [None, 4.0]),
        ("b", [0, 1], [3.0, 1.0]),
    ]
    assert figure["layout"]["barmode"] == "stack"


def test_colours_differ_and_are_legible_on_both_pages() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(factor * part for factor, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    assert len(set(PALETTE)) == len(PALETTE)
    for colour in PALETTE:
        for page in ("#ffffff", "#12161c"):
            dark, light = sorted((luminance(colour), luminance(page)))
            assert (light + 0.05) / (dark + 0.05) >= 3, (colour, page)
    colours = Colours()
    assert len({colours[str(i)] for i in range(40)}) == 40, "also of more names than the palette has"


def test_what_was_written_stands_in_the_page(quick: RunFolder) -> None:
    page = Page(run_page([quick]))
    assert page.series("Mean reward") == {"quick": [(i, REWARDS[i]) for i in range(3)]}
    assert page.series("Loss") == {"quick": [(i, 0.5 - i / 16) for i in range(6)]}
    assert page.series("The same rollouts under every method") == {name: [(0, d)] for name, d in LOGDIFFS.items()}
    assert page.series("The trained method, mask4d")["mean"] == [(i, 4e-7) for i in range(3)]
    assert page.series("By the number of edits before the token")["naive_full"] == [(0, 0.25), (1, 0.25)]
    text = " ".join(page.text)
    assert "Reward rises from 0.12 to 0.50 in 3 iterations." in text
    assert "Mean |logdiff| in nats per token: at most 4e-7 with logittree and mask4d" in text
    assert "; 0.62 with sdcc, 0.62 with naive_compressed and 0.25 with naive_full." in text
    assert "naive_compressed trains 67 % of the sampled tokens" in text
    for cost in COSTS.values():
        assert f"{cost:.2f}x" in text
    assert page.series("Seconds of an iteration, by phase") == {
        name: [(i, seconds) for i in range(3)] for name, seconds in (("generate", 3.0), ("train", 1.5))
    }
    logdiff = page.figure("The same rollouts under every method")["layout"]
    assert (logdiff["xaxis"]["title"]["text"], logdiff["yaxis"]["title"]["text"]) == ("iteration", "nats per token")
    assert logdiff["yaxis"]["type"] == "log"
    assert [(note["text"], note["y"]) for note in logdiff["annotations"]] == [
        ("floor", pytest.approx(math.log10(3e-7)))
    ]


def test_trees_have_what_each_method_does_to_each_token(quick: RunFolder) -> None:
    rollouts = Page(run_page([quick])).data["rollouts"]
    assert [row[1:4] for row in rollouts["rows"]] == [[0, "a", 1.0], [0, "b", 0.5], [2, "c", 1.0]]
    tree = rollouts["trees"][rollouts["rows"][0][-1]]
    record = example("running_example")
    assert tree["tokens"] == record.tokens.tolist()
    assert tree["pieces"][5:8] == ["y5", "y6", "y7"]
    assert [layer["view"] for layer in tree["layers"]] == [[list(span) for span in view] for view in record.views]
    naive, exact = tree["methods"]["naive_compressed"], tree["methods"]["mask4d"]
    assert naive["trained"] == [[6, 8], [9, 11], [12, 14]]
    assert naive["off"] == [[6, 8], [9, 11], [12, 13]], "the five tokens that were sampled with a token that is gone"
    assert naive["lost"] == {"evicted by pop": 3}
    assert naive["delta"] == pytest.approx([-0.5, 0.25, -1.0, 2.0, -0.125, 0.0], abs=1e-6)
    assert exact["trained"] == [[5, 14]]
    assert exact["off"] == []
    assert len(exact["delta"]) == len(TRAINED["mask4d"])
    assert "delta" not in tree["methods"]["logittree"], "it was not compared"
    last = rollouts["trees"][rollouts["rows"][2][-1]]
    assert "delta" not in last["methods"]["mask4d"], "iteration 2 was not compared"


def test_roles_are_those_of_the_staircase(quick: RunFolder) -> None:
    tree = Page(run_page([quick])).data["rollouts"]["trees"][0]
    first = tree["layers"][0]["roles"]
    # s to y4 are prompt; y5 is sampled and popped; y6 and y7 are sampled and stay. Nothing else is there yet.
    assert [first[i : i + 3] for i in range(0, len(first), 3)] == [[0, 5, 2], [5, 1, 6], [6, 2, 3]]


def test_the_page_loads_nothing_and_runs_only_its_own_script(quick: RunFolder) -> None:
    page = Page(run_page([quick]))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert not {"src", "srcset", "onclick", "onload", "onerror"} & set(attributes)
        assert not (attributes.get("href") or "#").startswith(("http", "//", "javascript"))
    (policy,) = [a["content"] or "" for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'")
    ours = run_page([quick]).replace(plotly_script(), "")
    assert "url(" not in ours.replace("url(#untrained)", "")


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    record = running(HOSTILE, status=HOSTILE, harness=HOSTILE)
    record = type(record)(
        record.tokens,
        record.generated,
        record.logprobs,
        record.views,
        [{"kind": "pop", "author": HOSTILE}] * 3,
        record.meta,
        {"pieces": [HOSTILE] * len(record)},
    )
    lines = [iteration(0, lost={HOSTILE: 3}, places={HOSTILE: {"logdiff": 1.0}, "start": {"logdiff": 1.0}})]
    folder = make_run(tmp_path / "a&b<i>", lines=lines, harness=HOSTILE, method=HOSTILE, rollouts={0: [record]})
    html = run_page([folder])
    page = Page(html)
    assert len(page.scripts) == 3, "the data, plotly and the script"
    assert "img" not in [tag for tag, _ in page.tags]
    tree = page.data["rollouts"]["trees"][0]
    assert (tree["key"], tree["pieces"][0]) == (HOSTILE, HOSTILE)
    assert "\u2028" not in page.scripts[0]


def test_parts_that_were_not_measured_say_how_to_get_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "bare", lines=[iteration(0, K=0.0, seconds=None)], harness="search_r1")
    text = " ".join(Page(run_page([folder])).text)
    assert f"memorywalker compare {folder.path} does" in text
    assert "No rollout was edited" in text
    assert "no update steps yet" in text
    assert "Distillation" not in text
    assert "mask4d: every sampled token was trained" in text


def test_sdcc_says_when_it_was_switched_off(tmp_path: Path) -> None:
    reason = "mean KL per leaf 12 where 10 is the limit in 3 steps in a row"
    lines = [step(i, leaf_kl=[2.0, None, 12.0, None][i], sdcc_weight=0.1, leaves=5) for i in range(4)]
    lines[3] |= {"sdcc_off": reason, "sdcc_weight": 0.0}
    folder = make_run(tmp_path / "soft", lines=[*lines, iteration(0)], method="sdcc")
    page = Page(run_page([folder]))
    assert page.series("KL at diverging leaves")["KL per leaf"] == [(0, 2.0), (1, None), (2, 12.0), (3, None)]
    assert page.series("Coefficient of the KL")["coefficient"][-1] == (3, 0.0)
    assert f"The KL was switched off at step 3: {reason}." in page.text
    layout = page.figure("KL at diverging leaves")["layout"]
    assert [(note["text"], note["x"]) for note in layout["annotations"] if "off" in note["text"]] == [
        ("switched off", 3)
    ]


class OwnDistillation(NaiveCompressedMethod[Distillation]):
    """A distilling method of a user's own."""

    Settings = Distillation

    @property
    def distillation(self) -> Distillation:
        return self.settings


def test_a_distilling_method_of_ones_own_has_its_section(tmp_path: Path) -> None:
    own = f"{__name__}:OwnDistillation"
    waiting = make_run(tmp_path / "waiting", lines=[iteration(0)], method=own)
    assert "No step had a diverging leaf so far: the teacher had nothing to do." in Page(run_page([waiting])).text
    lines = [step(0, leaf_kl=2.0, leaves=5), step(1, leaf_kl=0.5, leaves=5, sdcc_off="a reason"), iteration(0)]
    page = Page(run_page([make_run(tmp_path / "done", lines=lines, method=own)]))
    assert "Distillation" in page.text
    assert "The KL at diverging leaves goes from 2 to 0.5 nats." in page.text
    assert "The KL was switched off at step 1: a reason." in page.text


@pytest.mark.parametrize("written", ["logittree", None], ids=["as written", "version 0.6"])
def test_costs_are_against_the_denominator_of_the_comparison(quick: RunFolder, written: str | None) -> None:
    value = json.loads(quick.comparison.read_text())
    del value["denominator"]
    quick.comparison.write_text(json.dumps(value | ({} if written is None else {"denominator": written})))
    base = written or "naive_compressed"
    text = " ".join(Page(run_page([quick])).text)
    assert f"training on a batch, against {base}" in text
    assert f"multiples of {base}" in text
    runs = read_runs([quick])
    assert f"measured, against {base} on" in legend(runs)
    assert "19 (1.00x)" in text


def test_several_runs_share_plots_and_have_a_matrix(tmp_path: Path) -> None:
    folders = [
        make_run(
            tmp_path / f"{method}-{seed}",
            lines=[iteration(0), iteration(1 + seed)],
            method=method,
            rollouts={0: [running("a")]},
        )
        for method in ("mask4d", "naive_full")
        for seed in (0, 1)
    ]
    page = Page(run_page(folders))
    assert page.series("Mean reward") == {
        folder.path.name: [(0, 0.125), (n, REWARDS[n])] for folder, n in zip(folders, (1, 2, 1, 2), strict=True)
    }
    assert [row[0] for row in page.data["rollouts"]["rows"]] == [0, 1, 2, 3]
    assert page.data["runs"] == ["mask4d-0", "mask4d-1", "naive_full-0", "naive_full-1"]
    text = " ".join(page.text)
    assert "0.12 → 0.25" in text
    assert "0.12 → 0.50" in text
    assert "Reward rises in 4 of 4 runs" in text


class LastBranch(NaiveCompressedMethod[NaiveCompressed]):
    """A method of a user's own; only its name differs."""


def test_a_method_of_ones_own_is_in_every_chart_table_and_tree(tmp_path: Path) -> None:
    own = f"{__name__}:LastBranch"
    ours = make_run(tmp_path / "ours", lines=[iteration(0), iteration(1)])
    theirs = make_run(tmp_path / "theirs", lines=[iteration(0), iteration(1)], method=own, rollouts={0: [running("a")]})
    for folder in (ours, theirs):
        compare(folder, [running("a")], {})
        value = json.loads(folder.comparison.read_text())
        value["methods"][own] = {**value["methods"]["mask4d"], "cost": 1.375}
        value["by_iteration"][0]["methods"][own] = {"mean": 5e-7}
        folder.comparison.write_text(json.dumps(value))
    page = Page(run_page([ours, theirs]))
    lines = page.figure("The same rollouts under every method, theirs")["data"]
    colours = {line["name"]: line["marker"]["color"] for line in lines}
    assert list(colours) == [*LOGDIFFS, own]
    assert len(set(colours.values())) == 6
    bars = page.figure("Measured cost of training on a batch, theirs")["data"][0]
    assert dict(zip(bars["y"], bars["marker"]["color"], strict=True)) == colours, "the same in every chart"
    rewards = {line["name"]: line["marker"]["color"] for line in page.figure("Mean reward")["data"]}
    assert rewards == {"ours": colours["mask4d"], "theirs": colours[own]}
    assert f"{own} (trained)" in page.text
    assert list(page.data["rollouts"]["trees"][0]["methods"]) == [*LOGDIFFS, own]
    assert matrix_methods(read_runs([theirs, ours])) == ["mask4d", own]


def test_a_users_metrics_have_charts(tmp_path: Path) -> None:
    lines = [iteration(0, user={"folds": 2.0}), iteration(1, user={"folds": None, "<b>late": 0.5})]
    page = Page(run_page([make_run(tmp_path / "own", lines=lines)]))
    assert "Metrics of your own" in page.text
    assert page.series("folds") == {"own": [(0, 2.0), (1, None)]}
    assert page.series("<b>late") == {"own": [(0, None), (1, 0.5)]}


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / part / "fold", lines=[iteration(0)]) for part in ("one", "two")]
    assert Page(run_page(folders)).data["runs"] == ["one/fold", "two/fold"]
    with pytest.raises(MemoryWalkerError, match="given twice"):
        run_page([folders[0], folders[0]])


def test_the_budget_takes_compared_rollouts_first_and_then_the_latest(quick: RunFolder) -> None:
    whole = Page(run_page([quick])).data["rollouts"]["trees"]
    sizes = {tree["key"]: len(json.dumps(tree, separators=(",", ":"))) for tree in whole}
    html = run_page([quick], budget=sizes["a"] + sizes["b"] + 100)
    assert [row[-1] for row in Page(html).data["rollouts"]["rows"]] == [0, 1, -1]
    assert "3 rollouts, 2 of them with their tree" in html
    assert Page(run_page([quick], budget=0)).data["rollouts"]["trees"] == []


def test_tokens_have_their_text_where_the_model_has_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = ROOT / "examples/small_world/model"
    ids = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode("What is Jack's pet?").ids
    record = type(running("a"))(ids, [0] * len(ids), [None] * len(ids), [[(0, len(ids))]])
    folder = make_run(tmp_path / "worded", lines=[iteration(0)], rollouts={0: [record]})
    settings = json.loads(folder.settings.read_text())
    settings["cell"]["model"] = str(model)
    folder.settings.write_text(json.dumps(settings))
    rollouts = Page(run_page([folder])).data["rollouts"]
    assert "".join(rollouts["vocabularies"][0][str(i)] for i in ids) == "What is Jack's pet?"
    assert rollouts["rows"][0][2] == "0:0", "a record without an id is named by its place"


def test_what_a_crash_cut_short_is_left_out(quick: RunFolder) -> None:
    with open(quick.metrics, "a", encoding="utf-8") as file:
        file.write('{"kind": "iteration", "iteration": 3, "rew')
    with open(quick.rollouts(2), "ab") as store:
        store.write(b"\xf5mwr")
    html = run_page([quick])
    assert Page(html).series("Mean reward") == {"quick": [(i, REWARDS[i]) for i in range(3)]}
    assert f"Some records of {quick.rollouts(2)} cannot be read" in html


def test_scores_of_other_tokens_are_refused(quick: RunFolder) -> None:
    other = running("a")
    other = type(other)(other.tokens[:8], other.generated[:8], other.logprobs[:8], [[(0, 8)]], (), other.meta)
    quick.rollouts(0).unlink()
    make = make_run(quick.path.parent / "other", rollouts={0: [other]})
    make.rollouts(0).rename(quick.rollouts(0))
    with pytest.raises(
        MemoryWalkerError, match=r"naive_compressed\.npz: 6 scored tokens of record a .* has 3 to train"
    ):
        run_page([quick])


def test_errors_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    empty = make_run(tmp_path / "empty")
    with pytest.raises(MemoryWalkerError, match=r"nothing to report yet.*memorywalker train --resume"):
        run_page([empty])
    with pytest.raises(MemoryWalkerError, match=r"no run\.json; memorywalker train"):
        run_page([RunFolder(tmp_path)])
    old = make_run(tmp_path / "old", lines=[iteration(0)])
    old.comparison.write_text('{"version": 7}')
    with pytest.raises(MemoryWalkerError, match="version 7, this release reads 1"):
        run_page([old])
    old.comparison.write_text("[")
    with pytest.raises(MemoryWalkerError, match=r"comparison\.json: cannot be read.*memorywalker compare"):
        run_page([old])
    old.comparison.unlink()
    old.comparison_arrays.mkdir()
    (old.comparison_arrays / "mask4d.npz").write_bytes(b"PK")
    with pytest.raises(MemoryWalkerError, match=r"mask4d\.npz: cannot be read"):
        run_page([old])


def test_the_command_writes_beside_the_run_or_where_it_is_told(quick: RunFolder) -> None:
    result = run("report", str(quick.path))
    assert (result.exit_code, result.stdout) == (0, f"wrote {quick.path / 'report.html'}\n")
    assert (quick.path / "report.html").read_text(encoding="utf-8") == run_page([quick])
    other = make_run(quick.path.parent / "other", lines=[iteration(0)])
    assert run("report", str(quick.path), str(other.path)).exit_code == 0
    assert (quick.path.parent / "report.html").exists()
    assert run("report", str(quick.path), "--out", str(quick.path / "x.html")).exit_code == 0
    assert (quick.path / "x.html").exists()
    failed = run("report", str(quick.path), "--out", str(quick.path / "no" / "x.html"))
    assert (failed.exit_code, len(failed.stderr.splitlines())) == (1, 1)
    assert run("report", str(quick.path.parent)).stderr.startswith("Error: ")
