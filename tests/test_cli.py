"""What a user sees: output, exit codes, pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click
import pytest

from slime_plugin.record import Meta, Record, StoreWriter, dump_record
from tests.cli import INTERRUPTIBLE, run
from tests.conftest import ROOT

RUNNING = str(ROOT / "examples/records/running_example.json")
WEATHER = str(ROOT / "examples/records/weather.json")
MEMEX = str(ROOT / "examples/records/offload_and_restore.json")


def layout_json(*arguments: str) -> dict[str, Any]:
    result = run("layout", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def test_valid_records_print_nothing_but_their_number() -> None:
    result = run("record", "check", RUNNING, WEATHER, MEMEX)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "3 valid records, no defects\n")


def test_layout_json_has_the_documented_form() -> None:
    value = layout_json(RUNNING, "--method", "sdcc")
    assert list(value) == ["method", "packing", "rows", "teachers", "counts"]
    assert (value["method"], value["packing"]) == ("sdcc", None)
    (row,) = value["rows"]
    assert list(row) == ["tokens", "tape", "parent", "position", "loss_mask", "rollout_logprobs"]
    assert row["tape"] == [0, 1, 2, 3, 4, 6, 7, 9, 10, 12, 13]
    assert row["tokens"] == [100 + p for p in row["tape"]]
    assert row["parent"] == list(range(-1, 10))
    assert row["position"] == list(range(11))
    assert row["loss_mask"] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert row["rollout_logprobs"] == [None] * 5 + [-0.2, -0.3, -0.5, -0.6, -0.8, -0.9]
    (teacher,) = value["teachers"]
    assert list(teacher) == ["tokens", "tape", "parent", "position", "leaves"]
    pairs = [(row["tape"][leaf["student"]], teacher["tape"][leaf["teacher"]]) for leaf in teacher["leaves"]]
    assert pairs == [(p, p) for p in (6, 7, 9, 10, 12)]
    counts = value["counts"]
    assert (counts["K"], counts["D"], counts["L"], counts["C"]) == (3, 5, 14, 11)
    assert counts["lost"] == {"evicted by pop": 3}
    assert counts["trained"] + sum(counts["lost"].values()) == counts["R"]


@pytest.mark.parametrize("packing", ["trie", "replicated", "union"])
def test_layout_json_of_the_packings(packing: str) -> None:
    value = layout_json(RUNNING, "--method", "mask4d", "--packing", packing)
    assert (value["method"], value["packing"], value["teachers"]) == ("mask4d", packing, [])
    (row,) = value["rows"]
    assert len(row["tokens"]) == {"trie": 19, "replicated": 40, "union": 14}[packing]
    assert sum(row["loss_mask"]) == 9
    if packing == "union":
        assert [sum(rank >= 0 for rank in view) for view in row["rank"]] == [8, 10, 11, 11]
        assert row["rank"][1][:9] == [0, 1, 2, 3, 4, -1, 5, 6, 7], "without y5, y6 is the sixth"
        assert row["layer"] == [0] * 8 + [1] * 3 + [2] * 2 + [3]
        assert row["position"][8] == 7, "y8 follows seven live tokens, though eight tape tokens precede it"


def test_layout_takes_a_method_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name = "examples.methods.last_branch:LastBranch"
    value = layout_json(RUNNING, "--method", name)
    assert (value["method"], [len(row["tokens"]) for row in value["rows"]]) == (name, [11])
    assert value["counts"]["lost"] == {"before the last edit": 8}
    refused = run("layout", RUNNING, "--method", name, "--budget", "9")
    assert (refused.exit_code, "--budget: not a setting of" in refused.stderr) == (2, True)
    assert "no method 'mask4'; use 'mask4d'" in run("layout", RUNNING, "--method", "mask4").stderr


def test_layout_takes_a_configuration_or_options_but_not_both() -> None:
    config = str(ROOT / "configs/methods/mask4d.yaml")
    assert layout_json(RUNNING, "--config", config) == layout_json(RUNNING, "--method", "mask4d")
    assert layout_json(RUNNING, "--method", "mask4d", "--budget", "11")["counts"]["duplicated"] == 40 - 19
    split = layout_json(RUNNING, "--method", "mask4d", "--budget", "12")
    assert [len(row["tokens"]) <= 12 for row in split["rows"]] == [True] * len(split["rows"])
    for wrong in (
        ["--method", "sdcc", "--packing", "trie"],
        ["--method", "logittree", "--budget", "9"],
        ["--config", config, "--packing", "trie"],
        ["--config", config, "--method", "sdcc"],
        ["--method", "tree"],
        [],
    ):
        result = run("layout", RUNNING, *wrong)
        assert result.exit_code == 2, wrong
        assert "Error" in result.stderr


def test_layout_summary_says_what_is_lost() -> None:
    result = run("layout", RUNNING, "--method", "naive_compressed")
    assert "trained 6 of 9 sampled tokens; not trained: 3 evicted by pop" in result.stdout


def test_a_budget_too_small_is_one_clear_line() -> None:
    result = run("layout", RUNNING, "--method", "mask4d", "--budget", "5", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "11 tokens, the budget is 5; raise the budget to at least 11" in result.stderr


def test_choosing_a_record(running: Record, weather: Record, tmp_path: Path) -> None:
    path = tmp_path / "run.records"
    with StoreWriter(path) as store:
        store.append(running)
        store.append(weather)
        store.append(Record(running.tokens[:1], [0], [None], [[(0, 1)]], meta=Meta(id=7)))
    by_id = layout_json(str(path), "--method", "mask4d", "--record", "weather")
    assert by_id == layout_json(str(path), "--method", "mask4d", "--record", "1")
    for last in ("7", "2", "-1"):
        assert layout_json(str(path), "--method", "mask4d", "--record", last)["rows"] == []
    result = run("record", "show", str(path))
    assert result.exit_code == 1
    assert "holds 3 records; choose one with --record: running-example, weather, 7 (" in result.stderr
    assert "no record 'x' among 3" in run("record", "show", str(path), "--record", "x").stderr
    with StoreWriter(tmp_path / "other.records") as store:
        store.append(weather)
    several = run("record", "show", str(tmp_path), "--record", "0")
    assert several.exit_code == 1
    assert f"record 0 is in several files: {tmp_path}/other.records#0, {path}#0; name the file" in several.stderr


def test_the_staircase_names_every_token_where_they_fit() -> None:
    lines = run("record", "show", RUNNING, "--width", "110").stdout.splitlines()
    assert lines[1].split()[2:10] == [">s", ">y1", ">y2", ">y3", ">y4", "xy5", "+y6", "+y7"]
    assert lines[2].strip() == "└ pop by policy after 8 tokens: evicts 1"
    assert lines[3].split()[2:9] == [">s", ">y1", ">y2", ">y3", ">y4", "y6", "y7"]
    assert lines[3].index("y6") == lines[1].index("y6"), "the evicted column stays a hole"


def test_the_staircase_scales_to_any_width() -> None:
    for width in (60, 80):
        lines = run("record", "show", RUNNING, "--width", str(width)).stdout.splitlines()
        assert max(map(len, lines)) <= width
        strips = [line for line in lines if line.startswith("layer")]
        assert ["▒" in strip for strip in strips] == [True] * 4
        assert ["▓" in strip for strip in strips] == [True, True, True, False], "sampled, evicted next"
        assert ["█" in strip for strip in strips] == [True] * 4
    lines = run("record", "show", MEMEX, "--width", "60").stdout.splitlines()
    strips = [line for line in lines if line.startswith("layer")]
    assert ["▚" in strip for strip in strips] == [True, False, True, False]
    assert ["▲" in strip for strip in strips] == [False, False, True, False]
    assert ["reordered" in strip for strip in strips] == [False, True, True, False]


def test_no_generated_or_evicted_run_is_lost_in_a_long_tape(tmp_path: Path) -> None:
    """3,000 tokens in 40 columns: one token of a role still shows in the row where it has it."""
    n = 3_000
    generated = [int(p in (1_000, 2_000, n - 1)) for p in range(n)]
    logprobs = [-1.0 if flag else None for flag in generated]
    views = [[(0, 2_500)], [(0, 2_000), (2_001, 2_200), (2_201, n)]]
    file = tmp_path / "long.json"
    file.write_text(dump_record(Record([0] * n, generated, logprobs, views, [{"kind": "pop"}])))
    first, _, second = run("record", "show", str(file), "--width", "80").stdout.splitlines()[2:5]
    assert [first.count(sign) for sign in "█▓▚"] == [1, 1, 1]
    assert [second.count(sign) for sign in "█▓▚"] == [1, 0, 0]


class _Page(HTMLParser):
    """Collects tags and checks that they are closed in order."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(path: Path) -> _Page:
    parser = _Page()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_self_contained_and_draws_every_live_token(tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    assert run("record", "show", RUNNING, "--html", str(html)).exit_code == 0
    parsed = page(html)
    assert not [tag for tag, attrs in parsed.tags if "src" in attrs or "href" in attrs or tag == "link"]
    assert "url(" not in html.read_text()
    assert "@import" not in html.read_text()
    classes = [attrs.get("class") for tag, attrs in parsed.tags if tag == "rect"][6:]  # without the legend
    assert len(classes) == 8 + 10 + 11 + 11
    assert classes.count("prompt") == 4 * 5
    assert classes.count("sampled evicted") == 3
    assert classes.count("sampled") == 2 + 2 + 1 + 1


def test_text_from_a_record_cannot_become_markup(running: Record, tmp_path: Path) -> None:
    value = json.loads(dump_record(running))
    value["meta"] |= {"id": "<script>alert(1)</script>", "harness": '"><img src=x>', "note": "<b>&"}
    value["pieces"] = ["</svg><script>", "$title", *value["pieces"][2:]]
    value["edits"][0]["author"] = "</text><script>"
    file, html = tmp_path / "hostile.json", tmp_path / "page.html"
    file.write_text(json.dumps(value))
    assert run("record", "show", str(file), "--html", str(html)).exit_code == 0
    assert [tag for tag, _ in page(html).tags].count("script") == 1
    assert "img" not in [tag for tag, _ in page(html).tags]


def test_a_page_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    result = run("record", "show", RUNNING, "--html", str(tmp_path / "no" / "page.html"))
    assert result.exit_code == 1
    assert "cannot be written: No such file or directory" in result.stderr


def test_stats_json(running: Record, weather: Record, memex: Record, tmp_path: Path) -> None:
    path = tmp_path / "run.records"
    aborted = Record(
        weather.tokens, weather.generated, weather.logprobs, weather.views, weather.edits, Meta(id=9, status="aborted")
    )
    control = Record([1, 2], [0, 1], [None, -1.0], [[(0, 2)]], meta=Meta(harness="search_r1", reward=0.0))
    with StoreWriter(path) as store:
        for record in (running, weather, memex, aborted, control):
            store.append(record)
    value = json.loads(run("record", "stats", str(path), "--json").stdout)
    total, harnesses = value["total"], value["harnesses"]
    assert sorted(harnesses) == ["memexrl", "search_r1", "tc_rag", "unnamed"]
    assert total["statuses"] == {"completed": 4, "aborted": 1}
    assert total["frequency"] == 4 / 5
    assert harnesses["search_r1"]["depth"] is None, "undefined, not 0"
    assert harnesses["search_r1"]["frequency"] == 0
    assert harnesses["tc_rag"]["depth"] == pytest.approx((3 / 14 + 3 / 32) / 2)
    assert harnesses["tc_rag"]["E"] == (1 + 1 + 1 + 3) / 4
    assert total["edits"] == {"pop": 5, "offload": 1, "retrieve": 1, "restore": 1}
    assert total["trie_tokens"] == 19 + 42 + 23 + 42 + 2
    for name, method in total["methods"].items():
        assert method["trained"] + sum(method["lost"].values()) == total["sampled"] == 9 + 20 + 8 + 20 + 1
        assert method["lost"]["aborted"] == 20
        assert ("evicted by pop" in method["lost"]) == (name in ("naive_compressed", "sdcc"))


def test_stats_table_and_no_records(tmp_path: Path) -> None:
    table = run("record", "stats", RUNNING, MEMEX).stdout
    assert "compression depth of those" in table
    assert re.search(r"evicted by pop +3 +0 +0 +0 +3", table)
    empty = tmp_path / "empty.records"
    StoreWriter(empty).close()
    result = run("record", "stats", str(empty), "--json")
    assert result.exit_code == 0
    total = json.loads(result.stdout)["total"]
    assert (total["records"], total["frequency"], total["longest_view"], total["K"]) == (0, None, None, None)
    assert run("record", "stats", str(empty)).stdout == "no records\n"


def test_a_torn_store_still_has_its_statistics(running: Record, weather: Record, tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    with StoreWriter(path) as store:
        store.append(running)
        store.append(weather)
    os.truncate(path, path.stat().st_size - 1)
    result = run("record", "stats", str(path), "--json")
    assert (result.exit_code, json.loads(result.stdout)["total"]["records"]) == (1, 1)
    assert "torn tail" in result.stderr
    assert run("record", "show", str(path)).exit_code == 0, "there is one record to show"


def test_list_has_a_line_per_record(
    running: Record, weather: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "a.records"
    with StoreWriter(path) as store:
        store.append(running)
        store.append(weather)
    os.truncate(path, path.stat().st_size - 1)
    result = run("record", "list", str(path), WEATHER)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    told = [line.split() for line in lines if ".records" in line or ".json" in line]
    assert told[0] == [f"{path}#0", "running-example", "tc_rag", "paper", "1.0", "completed", "3", "14", "11", "9"]
    assert told[1][:2] == [str(path), "damaged:"]
    assert told[2][0] == WEATHER


HOSTILE = ["\x1b[2J", "[/x]", "[red]", "\ud800", "a\nb", "<b>", "\u202e"]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_a_record_cannot_harm_a_terminal(text: str, tmp_path: Path) -> None:
    """Valid records with any text in them: every command works, and no control character comes out."""
    n = 4
    value = {
        "version": 1, "tokens": [1] * n, "generated": [0, 1, 1, 1], "logprobs": [None, -1, -1, -1],
        "views": [[[0, 3]], [[0, 1], [2, 4]]], "edits": [{"kind": "pop", "author": text}], "pieces": [text] * n,
        "meta": {"id": text, "harness": text, "group": text, "note": text},
    }  # fmt: skip
    file, html = str(tmp_path / "hostile.json"), str(tmp_path / "page.html")
    Path(file).write_text(json.dumps(value))
    for command in (
        ["record", "check"], ["record", "list"], ["record", "show"], ["record", "stats"], ["record", "stats", "--json"],
        ["record", "show", "--html", html], ["layout", "--method", "mask4d"], ["layout", "--method", "sdcc", "--json"],
    ):  # fmt: skip
        done = memorywalker(*command, file)
        assert done.returncode == 0, done.stderr
        assert not set(done.stdout + done.stderr) & {"\x1b", "\u202e"}
        assert "Traceback" not in done.stderr


def memorywalker(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """The installed console script, in a process of its own."""
    script = Path(sys.executable).parent / "memorywalker"
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False, **settings)


def test_records_may_come_through_a_pipe(running: Record, tmp_path: Path) -> None:
    store = tmp_path / "a.records"
    with StoreWriter(store) as writer:
        writer.append(running)
    for path, records in ((Path(RUNNING), 1), (store, 1)):
        with open(path, "rb") as file:
            done = memorywalker("record", "check", "-", stdin=file)
        assert (done.returncode, done.stderr) == (0, f"{records} valid record, no defects\n")
        script = f"cat '{path}' | '{Path(sys.executable).parent}/memorywalker' record check /dev/stdin"
        piped = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        assert (piped.returncode, piped.stderr) == (0, f"{records} valid record, no defects\n")


def test_a_terminal_without_unicode_gets_ascii() -> None:
    for file in (RUNNING, MEMEX):
        done = memorywalker("record", "show", file, "--width", "70", env={**os.environ, "PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        assert ">" in done.stdout.splitlines()[1]


def test_output_that_cannot_be_written_is_one_clear_line() -> None:
    with open("/dev/full", "w") as full:
        script = Path(sys.executable).parent / "memorywalker"
        for command in (["record", "show"], ["record", "stats", "--json"], ["layout", "--method", "mask4d", "--json"]):
            done = subprocess.run(
                [script, *command, RUNNING], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
            assert (done.returncode, done.stderr) == (1, "Error: cannot write the output: No space left on device\n")


def test_a_reader_that_stops_early_is_no_error() -> None:
    script = f"'{Path(sys.executable).parent}/memorywalker' record stats --json '{RUNNING}' | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_an_interrupt_ends_a_command_at_once() -> None:
    pipe = subprocess.PIPE
    command = [*INTERRUPTIBLE, "record", "check", "-"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(" " * 1_000_000)  # more than a pipe holds: once it is written, the command is reading
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error.strip()) == (130, "", "Interrupted")


def test_an_empty_name_is_not_this_folder() -> None:
    result = run("record", "check", "")
    assert result.exit_code == 2
    assert "the name is empty" in result.stderr


def test_folders(running: Record, tmp_path: Path) -> None:
    assert run("record", "check", str(ROOT / "examples/records")).exit_code == 0
    result = run("record", "check", str(tmp_path))
    assert result.exit_code == 1
    assert "a folder without records" in result.stdout
    (tmp_path / "metrics.jsonl").write_text("{}")
    with StoreWriter(tmp_path / "a.records") as store:
        store.append(running)
    assert run("record", "check", str(tmp_path)).exit_code == 0, "what lies beside the stores of a run is not a record"


def test_the_console_script_reports_errors_without_a_traceback(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    done = memorywalker("layout", str(bad), "--method", "mask4d")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: {bad}: record without id: version: missing")
    assert memorywalker("--version").stdout.startswith("memorywalker, version ")


def test_help_needs_neither_numpy_nor_torch() -> None:
    """What keeps ``--help`` fast; how fast it is is measured, not asserted."""
    code = (
        "import sys; from slime_plugin.cli.main import cli; cli(['--help'], standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "click" in loaded
    assert not loaded & {"numpy", "pydantic", "rich", "torch", "yaml"}


def test_every_command_and_option_explains_itself() -> None:
    from slime_plugin.cli.layout import layout
    from slime_plugin.cli.record import record

    for command in (record, layout, *record.commands.values()):
        assert command.help
        for option in command.params:
            assert isinstance(option, click.Argument) or getattr(option, "help", None), (command.name, option.name)
