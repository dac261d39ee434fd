"""The site: what is refused, what is made harmless, and every page as a browser shows it."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import json
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import nbformat
import pytest
from bs4 import BeautifulSoup
from click.testing import CliRunner

from fusion_evidence.lib import batch, cli, paths
from fusion_evidence.lib.batch import BatchError
from fusion_evidence.lib.report.evidence import freshness_hash
from fusion_evidence.lib.report.handed_in import HandedIn
from fusion_evidence.lib.report.publish import publish
from fusion_evidence.lib.report.site import collect as collect_module
from fusion_evidence.lib.report.site import links
from fusion_evidence.lib.report.site.build import MARK
from fusion_evidence.lib.report.site.collect import collect
from fusion_evidence.lib.report.site.inert import inert_html, inert_markdown, inert_outputs
from fusion_evidence.lib.report.site.sources import Sources

ROOT = Path(__file__).resolve().parent.parent
OPEN = """
from fusion_evidence.lib.measure import machine
tiny = machine.Machine(name="cpu", profile="cpu", device="cpu", device_name="tiny <i>machine</i>",
                       arch="x86_64", cpu_cores=1, versions={"torch": "2.<b>13"})
machine.detect = lambda: tiny
from IPython.display import HTML, Markdown, display
from fusion_evidence.lib.report import Recorder, Verdict
book = Recorder.open('01_first', globals())
book.declare('counts', rule='it counts "to" count')
book.verdict_box()
"""
SHOW = """
import pandas as pd
print('\\x1b[31mplain\\x1b[0m text')
display(Markdown('*words* <script>alert(1)</script>'))
pd.DataFrame({f'column number {i}': [i, 10**9] for i in range(14)})
"""
FINISH = "book.conclude('counts', Verdict.PASS, why='3 < 4 & counted')\nbook.finish()"
PLAIN = "pages: int = 1"


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_notebook) -> Path:
    """A repository in small: notebooks, really executed and accepted, and what a site needs."""
    root = tmp_path_factory.mktemp("made")
    path = root / "notebooks" / "01_first.ipynb"
    write_notebook(path, OPEN, SHOW, FINISH, parameters=PLAIN)
    book = nbformat.read(path, as_version=4)
    book.cells[0].source += "\n\n[next](02_second.ipynb), [third](03_third.ipynb)"
    nbformat.write(book, path)
    write_notebook(root / "notebooks" / "03_third.ipynb", parameters=PLAIN)
    (root / "README.md").write_text(
        "# Read me\n\n[中文](README.zh-CN.md) [results](data/runs/cpu) [code](kernels/a.py)\n\n"
        '```mermaid\nflowchart TB\n  n01["<b>01 first</b><br/>Is it?"]\n```\n'
    )
    (root / "README.zh-CN.md").write_text("# 说明\n\n[English](README.md)\n")
    (root / "kernels").mkdir()
    (root / "kernels" / "a.py").write_text("a = 1\n")
    assert batch.run([path], root / "runs", profile_file=root / "no.yaml", report=print) == 0
    assert batch.accept([path], root / "runs", root / "data" / "runs", report=print) == 0
    twin(root, "02_second")
    return root


def twin(root: Path, name: str) -> None:
    """Give ``01_first`` a second name, as though that had been executed, too."""
    for folder in (root / "notebooks", root / "data" / "runs" / "cpu"):
        for path in folder.glob("01_first.*"):
            path.with_stem(name).write_text(path.read_text().replace("01_first", name))
    source = root / "notebooks" / f"{name}.ipynb"
    fresh = freshness_hash(source, {"pages": 1})
    edit(root / "data/runs/cpu" / f"{name}.json", lambda d: d.update(fingerprint=fresh))


@pytest.fixture
def repository(made, tmp_path) -> Path:
    """A copy of the small repository that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "repository"))


def site_of(root: Path, out: Path, **options) -> Path:
    results, notebooks = root / "data" / "runs", root / "notebooks"
    publish(out, results, notebooks=notebooks, root=root, report=lambda line: None, **options)
    return out


def edit(path: Path, change) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


HOSTILE = """
<script>document.title = 'owned'</script><img src=x onerror="document.title='owned'">
<a href="javascript:document.title='owned'">go</a><a href="https://example.org/x">out</a>
<iframe src="https://example.org"></iframe><object data="x"></object><embed src="x">
<svg onload="document.title='owned'"><script>document.title='owned'</script></svg>
<style>body { display: none }</style><link rel="stylesheet" href="https://example.org/a.css">
<form action="https://example.org"><input name="q"><button>send</button></form>
<div id="searchbox" class="sidebar-drawer" style="position:fixed;top:0;left:0">over</div>
<div style="background:url(https://example.org/a.png)">loads</div>
<img src="https://example.org/pixel.png"><meta http-equiv="refresh" content="0;url=https://x.org">
<math><mtext><table><mglyph><style><img src=x onerror=alert(1)></style></mglyph></table></mtext></math>
<base href="https://example.org/"><video src="https://example.org/v"></video>
<table border="1" class="dataframe"><tr><td onclick="alert(1)" colspan="2">kept cell</td></tr></table>
"""
INJECTED = (
    "x ``` \n\n```{raw} html\n<script>document.title='owned'</script>\n```\n <img src=x onerror=1>"
)


@pytest.fixture(scope="module")
def handed_in(made, tmp_path_factory) -> Path:
    """The small repository with results of another machine whose every text is hostile."""
    root = Path(shutil.copytree(made, tmp_path_factory.mktemp("handed") / "repository"))
    folder = Path(shutil.copytree(root / "data/runs/cpu", root / "data/runs/gfx936"))

    def change_evidence(document):
        document["machine"] |= {"name": "gfx936", "device_name": INJECTED, "driver": INJECTED}
        document["machine"]["versions"] = {INJECTED: INJECTED}
        document["commit"] = INJECTED
        for claim in document["claims"]:
            claim["why"] = claim["rule"] = claim["arm"] = INJECTED

    def change_copy(document):
        outputs = document["cells"][3]["outputs"]
        outputs += [
            {"output_type": "display_data", "metadata": {}, "data": data}
            for data in (
                {"text/html": HOSTILE},
                {"text/markdown": INJECTED + HOSTILE},
                {"application/javascript": "document.title='owned'"},
                {"image/svg+xml": "<svg onload=\"document.title='owned'\"/>"},
                {"image/png": base64.b64encode(b"<script>1</script>").decode()},
            )
        ]
        outputs.append({"output_type": "stream", "name": "stdout", "text": HOSTILE})
        document["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}
        document["cells"][3]["metadata"]["mystnb"] = {"image": {"alt": HOSTILE}}

    for name in ("01_first", "02_second"):
        edit(folder / f"{name}.json", change_evidence)
        edit(folder / f"{name}.ipynb", change_copy)
    record(folder)
    return root


def record(folder: Path) -> None:
    """Say of a folder of results what `import` says of those that it lets in."""
    digest = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    said = HandedIn(
        sha256="ab" * 32,
        imported="2026-01-01T00:00:00+00:00",
        machine="gfx936",
        created="2026-01-01T00:00:00+00:00",
        commit=None,
        dirty=None,
        versions={},
        packages=None,
        clocks=None,
        stale=[],
        absent={},
        files=digest,
    )
    (folder / batch.ARCHIVE_RECORD).write_text(said.model_dump_json())


@pytest.fixture(scope="module")
def site(handed_in, tmp_path_factory) -> Path:
    """The site of the small repository with the hostile machine."""
    return site_of(handed_in, tmp_path_factory.mktemp("site") / "site")


def soup(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


# --- what is refused


def test_results_of_other_sources_are_refused_with_what_to_run(repository, tmp_path):
    source = repository / "notebooks" / "01_first.ipynb"
    source.write_text(source.read_text().replace("10**9", "10**8"))
    edit(repository / "data/runs/cpu/02_second.json", lambda d: d.update(run="incomplete"))
    with pytest.raises(BatchError) as refusal:
        site_of(repository, tmp_path / "site")
    lines = str(refusal.value).splitlines()
    assert lines[0].startswith("2 accepted results")
    assert "cpu/01_first: stale" in lines[1]
    assert "cpu/02_second: run is incomplete" in lines[2]
    assert "on cpu: fusion-evidence run --only 01_first --only 02_second" in lines
    assert "    then fusion-evidence accept --only 01_first --only 02_second" in lines
    assert not (tmp_path / "site").exists()


def test_left_out_when_asked_and_said_so(repository, tmp_path):
    results, notebooks = repository / "data/runs", repository / "notebooks"
    edit(results / "cpu/01_first.json", lambda document: document.update(fingerprint="0"))
    machines = collect(results, notebooks, skip_stale=True)
    assert [page.notebook for page in machines[0].pages] == ["02_second"]
    sources = Sources(repository, machines, tmp_path)
    sources.write()
    assert "<code>cpu/01_first</code>: stale" in (tmp_path / "tree/index.md").read_text()
    assert not list((tmp_path / "tree").rglob("01_first*"))
    edit(results / "cpu/02_second.json", lambda document: document.update(fingerprint="0"))
    with pytest.raises(BatchError, match="nothing left to show"):
        collect(results, notebooks, skip_stale=True)


def spoil_json(folder: Path) -> None:
    (folder / "01_first.json").write_text("{")


def lose_copy(folder: Path) -> None:
    (folder / "01_first.ipynb").unlink()


def add_cell(folder: Path) -> None:
    cell = {"cell_type": "markdown", "source": "<b>mine</b>", "id": "a"}
    cell["metadata"] = {"tags": ["injected-parameters"]}
    edit(folder / "01_first.ipynb", lambda d: d["cells"].insert(1, cell))


def test_code_of_a_result_stays_code_wherever_it_stands(repository, tmp_path):
    cell = {"cell_type": "code", "source": "<script>1</script>", "id": "a", "outputs": []}
    cell |= {"execution_count": 1, "metadata": {"tags": ["injected-parameters"]}}

    def put_first(document):
        for number, other in enumerate(c for c in document["cells"] if c["cell_type"] == "code"):
            other["execution_count"] = number + 2
        document["cells"].insert(0, cell)

    edit(repository / "data/runs/cpu/01_first.ipynb", put_first)
    machines = collect(repository / "data/runs", repository / "notebooks")
    Sources(repository, machines, tmp_path).write()
    page = nbformat.read(tmp_path / "tree/data/runs/cpu/01_first.ipynb", as_version=4)
    assert [(c.cell_type, c.source) for c in page.cells[:1]] == [("code", "<script>1</script>")]
    assert "Measured by this project" in page.cells[1].source
    assert all("<script>" not in c.source for c in page.cells if c.cell_type == "markdown")


def rename_machine(folder: Path) -> None:
    edit(folder / "01_first.json", lambda d: d["machine"].update(name="h200"))


def break_output(folder: Path) -> None:
    output = {"output_type": "display_data", "metadata": {}, "data": {"text/html": {"a": 1}}}
    edit(folder / "01_first.ipynb", lambda d: d["cells"][3]["outputs"].append(output))


def half_character(folder: Path) -> None:
    output = {"output_type": "stream", "name": "stdout", "text": "\ud800"}
    edit(folder / "01_first.ipynb", lambda d: d["cells"][3]["outputs"].append(output))


def link_out(folder: Path) -> None:
    (folder / "01_first.json").rename(folder.parent / "elsewhere")
    (folder / "01_first.json").symlink_to(folder.parent / "elsewhere")


def unknown_notebook(folder: Path) -> None:
    shutil.copy(folder / "01_first.json", folder / "09_ninth.json")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_json, "is not readable"),
        (lose_copy, "the executed notebook is missing"),
        (add_cell, "cells that the source has not"),
        (rename_machine, "measured on h200, not on cpu"),
        (break_output, "the executed notebook is not valid"),
        (half_character, "the executed notebook is not valid"),
        (link_out, "a link, not a file"),
        (unknown_notebook, "no such notebook in this version"),
    ],
)
def test_spoiled_results_are_named_and_refused(repository, spoil, reason):
    spoil(repository / "data/runs/cpu")
    with pytest.raises(BatchError) as refusal:
        collect(repository / "data/runs", repository / "notebooks")
    (line,) = (line for line in str(refusal.value).splitlines() if line.startswith("  cpu/"))
    assert reason in line


def test_a_handed_in_file_that_was_changed_since_is_refused(repository):
    """Its folder may have any name; its files have to be those of the archive."""
    results = repository / "data/runs"
    shutil.copytree(results / "cpu", results / "gfx936-of-a-friend")
    for name in ("01_first", "02_second"):
        file = results / "gfx936-of-a-friend" / f"{name}.json"
        edit(file, lambda document: document["machine"].update(name="gfx936"))
    record(results / "gfx936-of-a-friend")
    _, theirs = collect(results, repository / "notebooks")
    assert (theirs.name, len(theirs.pages)) == ("gfx936-of-a-friend", 2)
    file.write_text(file.read_text() + " ")
    with pytest.raises(BatchError, match="no longer the file handed in") as refusal:
        collect(results, repository / "notebooks")
    assert "by who handed it in" in str(refusal.value)


def test_the_command_says_what_is_wrong_in_one_error(repository, tmp_path):
    call = CliRunner().invoke
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, message in (
        (["--from", str(empty)], "no accepted results"),
        (["--from", str(repository / "data/runs"), "--only", "h300"], "there are cpu"),
        (["--out", str(repository)], "holds something else than a site"),
        (["--out", str(repository / "README.md")], "is not a folder"),
    ):
        done = call(cli.main, ["publish", *arguments])
        assert done.exit_code == 2, done.output
        assert done.output.startswith("error: ")
        assert message in done.output
    assert (repository / "README.md").is_file()


def test_a_missing_sphinx_is_named(repository, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BatchError, match=r"fusion-evidence\[site\]"):
        site_of(repository, tmp_path / "site")


def test_a_summary_older_than_its_own_machines_results_is_stale(repository):
    """Its own hash does not see the results that it read; those of others it may lag behind."""
    results, notebooks = repository / "data/runs", repository / "notebooks"
    twin(repository, "00_summary")
    run_ids = {
        name: json.loads((results / f"cpu/{name}.json").read_text())["run_id"]
        for name in ("01_first", "02_second")
    }

    def read(document):
        fields = {"metric": "result", "unit": None, "n": None}
        document["measurements"] = [
            {**fields, "value": value, "labels": {"notebook": name, "machine": "cpu"}}
            for name, value in run_ids.items()
        ]

    edit(results / "cpu/00_summary.json", read)
    (machine,) = collect(results, notebooks)
    assert [page.notebook for page in machine.pages] == ["00_summary", "01_first", "02_second"]
    other = shutil.copytree(
        results / "cpu", results / "h200", ignore=lambda *_: ["00_summary.json", "00_summary.ipynb"]
    )
    for path in Path(other).glob("*.json"):
        edit(path, lambda document: document["machine"].update(name="h200"))
    machine, _ = collect(results, notebooks)
    assert machine.pages[0].since == ("01_first on h200", "02_second on h200")
    run_ids["01_first"] = "another"
    edit(results / "cpu/00_summary.json", read)
    with pytest.raises(
        BatchError, match="cpu/00_summary: stale: accepted since it ran: 01_first on cpu"
    ):
        collect(results, notebooks)


# --- whole or not at all


@pytest.fixture
def old_site(tmp_path) -> Path:
    """A site of earlier days."""
    out = tmp_path / "site"
    out.mkdir()
    (out / MARK).touch()
    (out / "index.html").write_text("old")
    return out


def untouched(out: Path) -> bool:
    hidden = [path for path in out.parent.iterdir() if path.name.startswith(".")]
    return (out / "index.html").read_text() == "old" and not hidden


def test_a_site_that_sphinx_warns_about_does_not_replace_the_old(repository, old_site):
    (repository / "README.md").write_text("# One\n\n[nowhere](#no-such-place)\n")
    with pytest.raises(BatchError, match=r"(?s)Sphinx did not build.*README\.md.*no-such-place"):
        site_of(repository, old_site)
    assert untouched(old_site)


def test_a_link_that_leads_nowhere_is_named(repository, tmp_path):
    for target in ("kernels/b.py", "../secret.txt", ".git/config"):
        (repository / "README.md").write_text(f"# One\n\n[x]({target})\n")
        with pytest.raises(BatchError, match=re.escape(f"README.md: the link to {target} leads")):
            site_of(repository, tmp_path / "site")


def test_a_full_disk_leaves_the_old_site(repository, old_site):
    code = (
        "import sys; from pathlib import Path; from fusion_evidence.lib.batch import BatchError\n"
        "from fusion_evidence.lib.report.publish import publish\n"
        "root, out = map(Path, sys.argv[1:])\n"
        "try: publish(out, root / 'data/runs', notebooks=root / 'notebooks', root=root)\n"
        "except BatchError as error: sys.exit(str(error))"
    )

    def limit() -> None:  # no file beyond this, as on a disk without room
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [sys.executable, "-B", "-c", code, str(repository), str(old_site)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.search(r"cannot write .*File too large; nothing changed", done.stderr)
    assert untouched(old_site)


def test_nothing_but_a_site_is_replaced(repository, tmp_path):
    out = tmp_path / "site"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(BatchError, match="something else"):
        site_of(repository, out)
    assert (out / "thesis.txt").read_text() == "years of work"


# --- what is made harmless

ALLOWED_SCRIPTS = re.compile(r"(\.\./)*_static/[\w./-]+\.js(\?v=\w+)?|(\.\./)*searchindex\.js")


def test_html_keeps_what_is_read_and_loses_what_acts():
    html = inert_html(HOSTILE)
    page = BeautifulSoup(html, "html.parser")
    assert not page.find_all(
        "script style iframe object embed svg form input link meta base math video".split()
    )
    for tag in page.find_all(True):
        assert not [name for name in tag.attrs if name.startswith("on") or name == "id"]
        assert "url" not in tag.get("style", "")
        assert "position" not in tag.get("style", "")
        assert "sidebar-drawer" not in tag.get("class", [])
    assert [a.get("href") for a in page.find_all("a")] == ["https://example.org/x"]
    assert not [img for img in page.find_all("img") if img.get("src")]
    assert "javascript" not in html
    assert page.find("table", class_="dataframe").find("td")["colspan"] == "2"
    assert "kept cell" in page.get_text()
    assert "over" in page.get_text()


def test_our_own_outputs_survive():
    figure = (
        '<figure style="margin:0.5em 0;max-width:720px"><img alt="a &lt; b" '
        'src="data:image/png;base64,iVBORw0KGgo=" style="width:100%;height:auto;border-radius:6px">'
        '<figcaption style="font-size:0.92em">what it shows</figcaption></figure>'
    )
    page = BeautifulSoup(inert_html(figure), "html.parser")
    image = page.find("img")
    assert image["alt"] == "a < b"
    assert image["src"].startswith("data:image/png;base64,iVBOR")
    assert "width:100%" in image["style"]
    assert page.find("figcaption").get_text() == "what it shows"
    box = '<div style="padding:.45em 0;border-top:1px solid rgba(128,128,128,.35)">x</div>'
    assert "border-top" in inert_html(box)


def test_markdown_of_a_result_is_no_html():
    html = inert_markdown(
        f"# Title\n\n| a | b |\n|---|---|\n| {'<i>c</i>'} | [d](e.json) |\n\n{HOSTILE}"
    )
    page = BeautifulSoup(html, "html.parser")
    assert not page.find_all(["script", "img", "iframe", "i", "a"])
    assert "<i>c</i>" in page.find("td").get_text()
    code = BeautifulSoup(inert_markdown("```python\nif x: '<b>'\n```"), "html.parser")
    assert code.get_text() == "if x: '<b>'\n\n"
    assert code.find("span", class_="k").get_text() == "if"


def test_outputs_show_one_form_and_only_real_images():
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n rest").decode()
    new = functools.partial(nbformat.v4.new_output, "display_data")
    shown = inert_outputs(
        [
            new(data={"image/png": png, "text/plain": "figure"}),
            new(data={"image/png": "PHNjcmlwdD4=", "text/plain": "no figure"}),
            new(data={"application/javascript": "alert(1)"}),
            new(data={"text/latex": "x", "text/html": "<b>y</b>"}, metadata={"isolated": True}),
        ]
    )
    assert [dict(output.data) for output in shown] == [
        {"image/png": png},
        {"text/plain": "no figure"},
        {"text/plain": "[not shown: application/javascript]"},
        {"text/html": "<b>y</b>"},
    ]
    assert not any(output.metadata for output in shown)


def test_no_page_of_the_site_runs_or_loads_what_a_result_brought(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 8
    for page in pages:
        document = soup(page)
        for script in document.find_all("script"):
            own = script.get("src") or script.get_text()
            assert ALLOWED_SCRIPTS.fullmatch(own) or "document.body.dataset.theme" in own, own
        for tag in document.find_all(True):
            assert not [name for name in tag.attrs if name.lower().startswith("on")], tag
            for name in ("src", "href", "action", "data"):
                assert not str(tag.get(name, "")).lower().startswith("javascript:")
            loads = tag.get("src") if tag.name != "a" else None
            assert not loads or not re.match("(https?:)?//", loads), tag
            if tag.name == "link":
                assert not re.match("(https?:)?//", tag.get("href", "")), tag
        assert not document.find_all(["iframe", "object", "embed", "base", "form input[name=x]"])
        assert not document.find_all("div", id="searchbox", string="over")


def test_a_page_of_another_machine_says_that_it_was_handed_in(site):
    theirs = soup(site / "data/runs/gfx936/01_first.html").get_text()
    ours = soup(site / "data/runs/cpu/01_first.html").get_text()
    assert "Handed in, verified, not run by this project" in theirs
    assert "Handed in" not in ours
    assert "Measured by this project" in ours
    assert "ab" * 32 in theirs
    assert "document.title='owned'" in theirs, "their text is shown, as text"


# --- what is on it


def test_pages_have_what_the_results_have(site):
    page = soup(site / "data/runs/cpu/01_first.html")
    text = page.get_text()
    assert page.find("h1").get_text().startswith("01_first")
    assert "tiny <i>machine</i>" in text
    assert "2.<b>13" in text
    assert "3 < 4 & counted" in text
    assert "pages: int = 1" in text, "the parameters' cell is shown"
    assert page.find("table", class_="dataframe") is not None
    assert json.loads((site / "data/runs/cpu/01_first.json").read_text())["run"] == "complete"
    assert not list(site.rglob("*.ipynb"))


def test_the_summary_is_first_and_in_two_languages(site):
    english, chinese = soup(site / "index.html"), soup(site / "index.zh-CN.html")
    assert english.find("html")["lang"] == "en"
    assert chinese.find("html")["lang"] == "zh-CN"
    for page in (english, chinese):
        targets = {a.get("href") for a in page.find("article").find_all("a")}
        assert {"data/runs/cpu/01_first.html", "data/runs/gfx936/02_second.html"} <= targets
        assert {section["id"] for section in page.find_all("section")} >= {"cpu", "gfx936"}
        assert "1 PASS" in page.get_text()
    assert soup(site / "README.zh-CN.html").find("html")["lang"] == "zh-CN"


def test_links_between_notebooks_stay_on_their_machine(site):
    for machine in ("cpu", "gfx936"):
        page = soup(site / f"data/runs/{machine}/01_first.html").find("article")
        (link,) = page.find_all("a", string="next")
        assert link["href"] == "02_second.html"
        assert "next, third" in page.get_text(), "03 has no page here: words, no link"
        assert not page.find_all("a", string="third")


def test_readme_links_to_what_the_site_has(site):
    links_found = {
        a.get_text(): a["href"] for a in soup(site / "README.html").article.find_all("a")
    }
    assert links_found["results"] == "index.html#cpu"
    assert re.fullmatch(r"_downloads/\w+/a\.py", links_found["code"])
    assert links_found["中文"] == "README.zh-CN.html"
    assert "01 first: Is it?" in soup(site / "README.html").get_text()


def test_links_are_rewritten_outside_code_only():
    text = (
        "[a [b]](x.md) ![c](d.png)\n\n```\n[e](f.md)\n```\n`[g](h.md)` [i](https://j.org) [k](#l)"
    )
    assert links.links(text) == ["x.md", "d.png", "https://j.org", "#l"]
    new = links.rewrite(text, lambda target: None if target == "d.png" else f"../{target}")
    assert new.startswith("[a [b]](../x.md) c\n")
    assert new[new.index("```") :] == text[text.index("```") :]
    assert links.below("lib/a/NOTES.md", "../../README.md#x") == ("README.md", "#x")
    assert links.from_page("data/runs/cpu/01", "index.md") == "../../../index.md"


@pytest.mark.slow  # two more builds
def test_the_same_results_give_the_same_pages(repository, tmp_path):
    first = site_of(repository, tmp_path / "a")
    second = site_of(repository, tmp_path / "b")
    pages = sorted(path.relative_to(first) for path in first.rglob("*.html"))
    assert pages == sorted(path.relative_to(second) for path in second.rglob("*.html"))
    assert all((first / page).read_bytes() == (second / page).read_bytes() for page in pages)


# --- the README in Chinese says what the English one says


def skeleton(readme: str) -> dict[str, object]:
    """What both READMEs have in common: all but the words."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    plain = [re.sub(r'\s*#.*|\["[^"]*"\]', "", block, flags=re.MULTILINE) for block in blocks]
    targets = links.links(text)
    return {
        "headings": re.findall("^#+ ", prose, flags=re.MULTILINE),
        "commands": plain,
        "links": [re.sub(r"README.*", "the other", target) for target in targets],
        "code": sorted(set(re.findall(r"`([^`\n]+)`", prose))),
        "tables": [line.count("|") for line in prose.splitlines() if line.startswith("|")],
    }


def test_the_chinese_readme_is_in_step():
    english, chinese = skeleton("README.md"), skeleton("README.zh-CN.md")
    assert len(english["commands"]) > 2
    for name, found in english.items():
        assert chinese[name] == found, f"{name}: README.zh-CN.md and README.md differ"


# --- every page, as a browser shows it

WIDTHS = {"desktop": 1280, "phone": 390}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments) -> None:
        pass


@pytest.fixture(scope="module")
def real_site(tmp_path_factory) -> Path:
    """All that was ever accepted: how a page looks does not depend on whether it is fresh."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect_module, "verify", lambda notebook, results: [])
        out = tmp_path_factory.mktemp("real") / "site"
        publish(out, paths.ACCEPTED, skip_stale=True, report=print)
    return out


@pytest.fixture(scope="module", params=["hostile", "real"])
def served(request) -> Iterator[tuple[Path, str]]:
    """(folder, address) of a site behind a server of this machine."""
    folder = request.getfixturevalue({"hostile": "site", "real": "real_site"}[request.param])
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def addresses(folder: Path, base: str) -> list[str]:
    return [urljoin(base, str(page.relative_to(folder))) for page in sorted(folder.rglob("*.html"))]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_without_a_fault(served, browser, width, scheme):
    folder, base = served
    faults: list[str] = []
    view = {"width": WIDTHS[width], "height": 900}
    with browser.new_context(viewport=view, color_scheme=scheme) as context:
        page = context.new_page()
        page.on("console", lambda said: said.type == "error" and faults.append(said.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append("a dialog"), dialog.dismiss()))
        page.on(
            "requestfailed",  # what the next page interrupts has not failed
            lambda request: (
                request.failure == "net::ERR_ABORTED" or faults.append(f"failed: {request.url}")
            ),
        )
        page.on(
            "request",
            lambda request: (
                request.url.startswith((base, "data:")) or faults.append(f"asks for {request.url}")
            ),
        )
        page.on("response", lambda r: r.status >= 400 and faults.append(f"{r.status} {r.url}"))
        for address in addresses(folder, base):
            page.goto(address)
            here = f"{address.removeprefix(base)}, {width}, {scheme}: "
            faults += [f"{here}{wide}" for wide in page.evaluate(TOO_WIDE)]
            faults += [f"{here}owned"] if page.title() == "owned" else []
            faults += [here + text for text in page.evaluate(UNREADABLE)]
    assert not faults, "\n".join(faults)


# Parts of the page itself that do not fit: Furo hides some of that, and lets the page scroll for some.
TOO_WIDE = """() => [...document.querySelectorAll('html, body, .main, .content')]
  .map((e) => [e, Math.max(e.scrollWidth - e.clientWidth, e.getBoundingClientRect().right - innerWidth)])
  .filter(([e, over]) => over > 1)
  .map(([e, over]) => `<${e.tagName} class="${e.className}"> is ${over} px too wide`)"""

# Text whose contrast with what is behind it is below what WCAG asks for large text.
UNREADABLE = """() => {
  const parse = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return [...n, 1].slice(0, 4) }
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]))
  const behind = (e) => {
    if (!e) return [255, 255, 255]
    const c = parse(getComputedStyle(e).backgroundColor)
    return c[3] === 1 ? c.slice(0, 3) : over(c, behind(e.parentElement))
  }
  const light = (c) => c.map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)
  const found = []
  for (const e of document.querySelectorAll('article *')) {
    const own = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join('').trim()
    if (!own || !e.checkVisibility() || e.closest('.headerlink')) continue
    const back = behind(e), ink = over(parse(getComputedStyle(e).color), back)
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x)
    if ((a + 0.05) / (b + 0.05) < 3) found.push(`cannot be read: ${own.slice(0, 40)}: ${ink} on ${back}`)
  }
  return found.slice(0, 5)
}"""


@pytest.mark.slow
def test_every_link_leads_somewhere(served, browser):
    folder, base = served
    page = browser.new_page()
    found: dict[str, list[str]] = {}
    places: dict[str, set[str]] = {}
    for address in addresses(folder, base):
        page.goto(address)
        found[address] = page.eval_on_selector_all("a[href]", "all => all.map(a => a.href)")
        places[address] = set(page.eval_on_selector_all("[id]", "all => all.map(e => e.id)"))
    page.close()
    broken = set()
    for address, targets in found.items():
        for target in targets:
            place, fragment = urldefrag(target)
            if not place.startswith(base):
                assert place.startswith(("https://", "http://")), f"{address}: {target}"
                continue
            file = folder / unquote(urlparse(place).path).lstrip("/")
            there = (file / "index.html" if file.is_dir() else file).is_file()
            if not there or (fragment and unquote(fragment) not in places.get(place, {""})):
                broken.add(f"{address.removeprefix(base)} -> {target.removeprefix(base)}")
    assert sum(map(len, found.values())) > 100
    assert not broken, "\n".join(sorted(broken))


@pytest.mark.slow
def test_a_search_finds_a_page_without_a_network(served, browser):
    _, base = served
    page = browser.new_page()
    page.goto(f"{base}search.html?q=claims")
    page.wait_for_selector("#search-results li a", timeout=20_000)
    page.close()
