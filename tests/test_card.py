"""The card: its figures are the result files', in words, in two languages, and inert."""

from __future__ import annotations

import ast
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from result_cases import NAMES, machine, place

from fusion_evidence.lib import paths
from fusion_evidence.lib.cli import main
from fusion_evidence.lib.measure import machine as machine_module
from fusion_evidence.lib.notebook import read_cells
from fusion_evidence.lib.report import card, labels, summary
from fusion_evidence.lib.report.evidence import Measurement, evidence_path, read_evidence

FIRST, FOURTH, SIXTH = NAMES[0], NAMES[3], NAMES[5]
CHINESE = re.compile(r"[\u4e00-\u9fff]")
REAL = paths.ACCEPTED / "h200"

SPEED = Measurement(
    metric="speedup", labels={"over": "compiled", "T": 1}, value=6.0888, low=6.0844, high=6.1092
)
TEXTS = [
    Measurement(metric="texts_changed", labels={"arm": arm}, value=value, n=10)
    for arm, value in (("control", 0), ("own", 9))
]
TPOT = Measurement(
    metric="tpot",
    labels={"arm": "own", "run": "free", "stat": "mean"},
    value=0.455,
    unit="ms",
    n=10,
    not_comparable="9 of 10 texts changed",
)


@pytest.fixture
def collection(tmp_path, monkeypatch, write_notebook):
    """An empty collection: six tiny notebooks and no results."""
    monkeypatch.setattr(machine_module, "detect", lambda: machine("cpu"))
    for name, folder in (("ROOT", "."), ("NOTEBOOKS", "notebooks"), ("RUNS", "runs")):
        monkeypatch.setattr(paths, name, (tmp_path / folder).resolve())
    monkeypatch.setattr(paths, "ACCEPTED", tmp_path.resolve() / "data" / "runs")
    for name in NAMES:
        write_notebook(paths.NOTEBOOKS / f"{name}.ipynb", "pass", parameters="n: int = 1")
    return tmp_path


def lines_with(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


# --- figures


@pytest.mark.parametrize("lang", labels.LANGUAGES)
def test_a_number_on_the_card_is_the_one_in_the_result(lang):
    """On the real results of an H200, fresh or not."""
    evidence = read_evidence(evidence_path(REAL, FIRST))
    (speedup,) = evidence.select("speedup", over="compiled", T=1)
    times = evidence.select("time", impl="fused", T=1, cache="cold", positions="3d")
    (time,) = (m for m in times if m.labels["shape"] == evidence.parameters["shape_name"])
    text = card.card("h200", lang, [REAL])
    (row,) = [cells(line) for line in lines_with(text, labels.figure("speedup", lang), "[`01")]
    interval = f"{speedup.value:#.4g}× [{speedup.low:#.4g}, {speedup.high:#.4g}]"
    assert row[1].startswith(interval)
    assert f"n = {time.n}" in row[1]
    assert row[2] == "2.978873×"
    (row,) = [cells(line) for line in lines_with(text, labels.figure("time_fused", lang))]
    assert row[1].startswith(f"{time.value:#.4g} µs [{time.low:#.4g}, {time.high:#.4g}]")
    assert row[2] == "22.72 µs"


def test_the_data_hold_the_values_and_where_they_are_from():
    data = card.card_data("h200", [REAL])
    json.dumps(data, allow_nan=False)
    figures = [
        figure
        for part, sections in summary.PARTS.items()
        for section in sections
        for figure in data[part][section]["figures"]
    ]
    assert [f["key"] for f in figures] == [
        f.key for f in summary.facts(summary.results("h200", [REAL]))
    ]
    plain = [f for f in figures if f["value"] is not None and f["unit"] in ("x", "%")]
    assert len(plain) >= 2
    for figure in plain:
        evidence = read_evidence(paths.ROOT / figure["link"])
        found = evidence.select(figure["metric"], **figure["labels"])
        assert figure["value"] in [m.value for m in found]
    claims = [c for part in summary.PARTS for s in data[part].values() for c in s["claims"]]
    held = [read_evidence(path) for path in REAL.glob("0[1-7]_*.json")]
    assert len(claims) == sum(len(evidence.claims) for evidence in held)


def test_speed_alone_stays_beside_an_integration_that_failed(collection):
    place(FIRST, "h200", {"faster_than_compiled": "PASS"}, [SPEED])
    place(FOURTH, "h200", {"texts_unchanged/own": "FAIL"}, [*TEXTS, TPOT])
    text = card.card("h200")
    (row,) = [cells(line) for line in lines_with(text, "**speed**")]
    assert row[1] == "6.089× [6.084, 6.109] (published, gfx936: 2.978873×)"
    (row,) = [cells(line) for line in lines_with(text, "**bits, texts**")]
    assert row[2] == "9 of 10 (published, gfx936: 3 of 10)"
    assert row[3] == "NOT_RUN: no result"
    assert lines_with(text, "**FAIL**", "the texts do not change [own]")
    assert "stale" not in text
    assert "**Verdicts that count:** 1 PASS, 1 FAIL" in text


@pytest.mark.parametrize(
    ("lang", "said"), [("en", "not comparable: "), ("zh", "不可比（not_comparable）：")]
)
def test_what_must_not_be_compared_says_so(collection, lang, said):
    place(FOURTH, "h200", {}, [*TEXTS, TPOT])
    (row,) = [
        cells(line)
        for line in lines_with(card.card("h200", lang), labels.figure("tpot_candidate", lang))
    ]
    assert row[1].startswith("0.4550 ms")
    assert row[1].endswith(f"{said}9 of 10 texts changed")
    bars = card.beside_published(summary.facts(summary.results("h200")))
    (bar,) = bars[(bars.source == "h200") & bars.text.str.contains("0.4550")].to_dict("records")
    assert (bar["text"], bar["value"] != bar["value"]) == ("0.4550 ms, not comparable", True)


def test_counts_are_drawn_as_shares(collection):
    place(FOURTH, "h200", {}, TEXTS)
    bars = card.beside_published(summary.facts(summary.results("h200")))
    texts = bars[bars.figure == labels.figure("texts_candidate")].set_index("source")
    assert texts.value.to_dict() == {"published, gfx936": 0.3, "h200": 0.9}


# --- what does not count


@pytest.mark.parametrize("lang", labels.LANGUAGES)
def test_a_damaged_result_is_named_and_the_others_are_shown(collection, lang):
    place(FIRST, "h200", {"faster_than_compiled": "PASS"}, [SPEED])
    evidence_path(paths.ACCEPTED / "h200", FOURTH).write_text('{"claims": [')
    text = card.card("h200", lang)
    (line,) = lines_with(text, "- [`04_text_regression`]")
    assert "data/runs/h200/04_text_regression.json" in line
    assert labels.word("unreadable", lang) in line
    assert "not readable" in line
    assert lines_with(text, "6.089×")
    assert all(name in text for name in NAMES if name not in (FIRST, FOURTH))


@pytest.mark.parametrize(("lang", "stale"), [("en", "stale"), ("zh", "已过期")])
def test_a_stale_figure_and_verdict_say_so(collection, lang, stale):
    place(FIRST, "h200", {"faster_than_compiled": "PASS"}, [SPEED], fingerprint="0")
    text = card.card("h200", lang)
    (row,) = [cells(line) for line in lines_with(text, "[`01 speedup`]")]
    assert row[1].endswith(stale)
    (row,) = [cells(line) for line in lines_with(text, "[`01 faster_than_compiled`]")]
    assert stale in row[0]
    assert labels.word("handed_in", lang) not in text


def test_someone_elses_kernel_and_someone_elses_run_are_said_to_be_that(collection, write_notebook):
    source = 'candidate: str = ""\n'
    write_notebook(paths.NOTEBOOKS / f"{FIRST}.ipynb", "pass", parameters=source)
    place(
        FIRST, "gfx936", parameters={"candidate": "mine:kernel"}, folder=paths.ACCEPTED / "friend"
    )
    (paths.ACCEPTED / "friend" / "archive.json").write_text('{"machine": "gfx936"}')
    text = card.card("friend")
    assert "The kernel is not the project's but `mine:kernel`." in text
    assert labels.word("handed_in") in text


# --- words


def declared(notebook):
    """Names of the claims that a notebook declares, also those it makes up in a loop over texts."""
    code = "\n".join(cell.source for cell in read_cells(notebook) if cell.kind == "code")
    tree = ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", code))
    names = set()

    def visit(node, known):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            try:
                values = ast.literal_eval(node.iter)
            except ValueError:
                values = ()
            for value in values:
                for child in node.body:
                    visit(child, known | {node.target.id: value})
            if values:
                return
        call = node.func if isinstance(node, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr == "declare":
            first = ast.unparse(node.args[0])
            names.add(eval(first, {"__builtins__": {}}, known))
        for child in ast.iter_child_nodes(node):
            visit(child, known)

    visit(tree, {})
    return names


SOURCES = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


def test_declared_claims_are_found_also_in_loops(tmp_path, write_notebook):
    code = 'for s in ("a", "b"):\n    book.declare(f"x_{s}", "arm", rule="")\n'
    path = write_notebook(tmp_path / "n.ipynb", code, 'book.declare("y", rule="")')
    assert declared(path) == {"x_a", "x_b", "y"}


@pytest.mark.parametrize("notebook", SOURCES, ids=[path.stem for path in SOURCES])
def test_every_claim_has_a_name_in_both_languages(notebook):
    names = declared(notebook)
    assert len(names) >= 5
    assert names - labels.CLAIMS.keys() == set(), "add them to lib/report/labels.py"


def test_english_is_english_and_chinese_is_chinese():
    for table in (labels.CLAIMS, labels.FIGURES):
        for name, (english, chinese) in table.items():
            assert not CHINESE.search(english), name
            assert CHINESE.search(chinese), name
        for texts in zip(*table.values(), strict=True):
            assert len(set(texts)) == len(texts), "two are called the same"


def test_a_claim_without_a_label_shows_its_own_name():
    assert labels.claim("a_new_claim", "arm") == "a_new_claim [arm]"
    assert labels.claim("fixed_point", "compact", "zh") == "基线重新编译后比特不变（compact）"


def test_the_chinese_card_has_no_english_prose():
    """Outside code font, which holds names and what the result files say in their own words."""
    text = re.sub(r"`[^`]*`", "", card.card("h200", "zh", [REAL]))
    words = set(
        re.findall(r"(?<![\w/._])[a-z]{3,}(?![\w/._-])", re.sub(r"\(data[^)]*\)", "", text))
    )
    known = {"kernel", "prologue", "attention", "token", "prefill", "decode", "eager", "guard"}
    arms = {claim.arm for path in REAL.glob("0*.json") for claim in read_evidence(path).claims}
    known |= {word for arm in arms if arm for word in re.findall("[a-z]+", arm)}
    reasons = {
        "cache",
        "opcheck",
        "primitive",
        "integration",
        "torch",
        "triton",
        "cuda",
        "vllm",
        "aiter",
    }
    foreign = words - known - reasons
    allowed = lines_with(text, "不可比") + lines_with(text, "NOT_RUN")  # a reason, as recorded
    assert {word for word in foreign if not any(word in line for line in allowed)} == set()


# --- the page


@pytest.mark.parametrize("lang", labels.LANGUAGES)
def test_every_link_leads_to_a_result(lang):
    text = card.card("h200", lang)
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert len(targets) > 50
    found = {path.stem for path in REAL.glob("0*.json")}
    for target in set(targets):
        assert (paths.ROOT / target).is_file() or Path(target).stem not in found


@pytest.mark.parametrize("lang", labels.LANGUAGES)
def test_every_row_of_a_table_has_the_cells_of_its_header(lang):
    text = card.card("h200", lang, [REAL])
    checked = 0
    for above, below in pairwise(text.splitlines()):
        if above.startswith("|") and below.startswith("|"):
            assert len(cells(above)) == len(cells(below)), below
            checked += 1
    assert checked > 50


def test_what_a_result_says_stays_text(collection):
    markdown_it = pytest.importorskip("markdown_it")
    evil = (
        "<script>alert(1)</script> | [x](javascript:alert(2)) `c` *b* ![i](http://e) &lt; $x$\n# h"
    )
    place(FIRST, "h200", {"faster_than_compiled": "FAIL", "<b>new</b>|/<i>": "FAIL"},
          whys={"faster_than_compiled": evil, "<b>new</b>|/<i>": evil},
          machine=machine("h200").model_copy(update={"device_name": evil, "arch": evil}),
          reason=None, commit="`<script>`|")  # fmt: skip
    for lang in labels.LANGUAGES:
        html = markdown_it.MarkdownIt("gfm-like", {"linkify": False}).render(
            card.card("h200", lang)
        )
        for tag in ("<script", "<img", "<b>", "<i>", "<em", 'href="javascript', 'http://e"'):
            assert tag not in html, tag
        assert html.count("<h1") == 1
        assert html.count("alert(1)") >= 3
        widths = [
            len(re.findall("<t[hd][ >]", row)) for row in re.findall("(?s)<tr>.*?</tr>", html)
        ]
        assert set(widths) == {4}


# --- the command


def invoke(*arguments):
    return CliRunner().invoke(main, ["card", *arguments])


def test_the_command_prints_or_writes(collection, tmp_path):
    place(FIRST, "h200", {"faster_than_compiled": "PASS"}, [SPEED])
    printed = invoke("--machine", "h200", "--lang", "zh")
    assert printed.exit_code == 0
    assert printed.output == card.card("h200", "zh")
    done = invoke("--machine", "h200", "--out", str(tmp_path / "cards"))
    assert done.exit_code == 0
    folder = tmp_path / "cards"
    assert {p.name for p in folder.iterdir()} == {"card-en.md", "card-zh.md", "card.json"}
    assert (folder / "card-en.md").read_text() == card.card("h200", "en")
    assert json.loads((folder / "card.json").read_text()) == card.card_data("h200")


def test_a_run_that_is_not_accepted_yet_has_a_card_too(collection):
    place(FIRST, "cpu", {"faster_than_compiled": "NOT_RUN"}, folder=paths.RUNS / "cpu")
    assert "runs/cpu/01_primitive_benchmark.json" in invoke("--machine", "cpu").output
    elsewhere = invoke("--machine", "cpu", "--from", str(paths.RUNS / "cpu"))
    assert elsewhere.output == invoke("--machine", "cpu").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machine", "nowhere"], "error: no results of nowhere; there are h200\n"),
        (["--machine", "../runs"], "error: no results of ../runs; there are h200\n"),
        (
            ["--machine", "h200", "--out", "/dev/null/x"],
            "error: cannot write /dev/null/x: Not a dir",
        ),
    ],
)
def test_bad_input_is_one_line(collection, arguments, said):
    place(FIRST, "h200")
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.output.startswith(said)
    assert done.output.count("\n") == 1
