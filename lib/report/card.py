"""The evidence card: what one machine's results show, short enough for a forum, each line linked.

Two parts, as in the article: the primitive (the kernel alone) and the integration (the kernel in the
model). A card only reads: no figure on it is computed here.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import Markdown
from pandas.io.formats.style import Styler

from fusion_evidence.lib import paths
from fusion_evidence.lib.report import labels, summary
from fusion_evidence.lib.report.evidence import Evidence, write_text
from fusion_evidence.lib.report.labels import Lang, word
from fusion_evidence.lib.report.summary import PARTS, Fact, Result, Section

_WHY = 80  #: characters of a reason in a figure's place; all of it stands with the claim
#: Where a notebook's claims belong, and those that belong elsewhere.
_SECTION_OF: dict[str, Section] = {
    "01": "correctness",
    "02": "dispatch",
    "03": "dispatch",
    "04": "text",
    "05": "graph",
    "06": "graph",
    "07": "endpoint",
}
_ELSEWHERE: dict[Section, str] = {
    "performance": "near_the_floor ahead_of_peers faster_than_compiled",
    "dispatch": "candidate_ran kernel_ran",
    "graph": "branch_folded branch_can_be_kept finder_names_the_branch finder_silent_on_clean "
    "fallback_bits opcheck no_cache_copy same_program kernel_alone_exact",
    "text": "answers_right texts_unchanged coin_tosses",
    "endpoint": "times_repeat resolves_mean_tpot resolves_p99_tpot saving_arrives "
    "prefill_not_slower same_run saving_as_predicted net_saving",
}
_SECTION_OF_CLAIM = {
    name: section for section, names in _ELSEWHERE.items() for name in names.split()
}


# --- one figure in words


def measured(fact: Fact, lang: Lang = "en") -> str:
    """A measured figure with its unit, interval and n, or what stands in its place."""
    texts = []
    if fact.value is not None:
        texts.append(_value(fact, lang))
        if fact.low is not None and fact.high is not None:
            texts[-1] += f" [{_number(fact.low, fact.unit)}, {_number(fact.high, fact.unit)}]"
        if fact.n is not None and not fact.out_of:
            texts.append(word("n", lang).format(n=f"{fact.n:,}"))
        if fact.zero_bound is not None:
            texts.append(word("bound", lang).format(bound=f"{fact.zero_bound:.1e}"))
    if fact.verdict:
        why = word("missing", lang) if fact.state == "missing" else fact.not_comparable or fact.why
        why = textwrap.shorten(why, _WHY, placeholder=" …")
        said = fact.verdict if fact.verdict == "NOT_RUN" else word(fact.verdict, lang)
        texts.append(said + (f"{_colon(lang)}{why}" if why else ""))
    if fact.state not in ("fresh", "missing"):
        texts.append(word(fact.state, lang))
    return _comma(lang).join(texts)


def published(fact: Fact, lang: Lang = "en") -> str:
    """The article's figure in the same unit; a dash where the article has no such figure."""
    value = fact.published
    if value is None:
        return word("no figure", lang)
    if not isinstance(value, (int, float, list)):
        return word(str(value), lang)
    if isinstance(value, list):  # the article: equal at each of these
        return "0 @ T = " + ", ".join(map(str, value))
    text = f"{value:.7g}{_spaced_unit(fact.unit)}"
    if fact.published_of is not None:
        text = word("of", lang).format(value=text, n=fact.published_of)
    return f"> {text}" if fact.key == "ttft_candidate" else text


def _value(fact: Fact, lang: Lang) -> str:
    text = _number(fact.value, fact.unit) + _spaced_unit(fact.unit)
    phrase = "elements" if fact.metric == "mismatch" else "of"
    return word(phrase, lang).format(value=text, n=f"{fact.n:,}") if fact.out_of else text


def _number(value: Any, unit: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if not unit and float(value).is_integer():
        return f"{int(value):,}"
    if unit == "%":
        return f"{value:+.2f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def _spaced_unit(unit: str) -> str:
    return {"x": "×", "": "", "us": " µs"}.get(unit, f" {unit}")


def _comma(lang: Lang) -> str:
    return "，" if lang == "zh" else ", "


def _brackets(text: str, lang: Lang) -> str:
    return f"（{text}）" if lang == "zh" else f" ({text})"


def _colon(lang: Lang) -> str:
    return "：" if lang == "zh" else ": "


def beside_published(facts: Sequence[Fact]) -> pd.DataFrame:
    """Figures that the article states too, as `plots_summary.beside_published` takes them.

    Counts out of a total are drawn as their share. A figure that must not be compared has no bar.
    """
    rows = []
    for fact in facts:
        if not isinstance(fact.published, (int, float)):
            continue
        title, counts = labels.figure(fact.key), fact.counts
        theirs = fact.published / (fact.published_of or 1)
        of = fact.n if fact.out_of and fact.n else 1
        ends = [math.nan] * 3
        if isinstance(fact.value, (int, float)) and not fact.not_comparable:
            ends = [math.nan if v is None else v / of for v in (fact.value, fact.low, fact.high)]
        said = measured(fact)
        if fact.value is not None and fact.not_comparable:  # the reason has no room here
            said = f"{_value(fact, 'en')}, {word('not_comparable')}"
        text = {"text": textwrap.shorten(said, 64, placeholder=" …"), "counts": counts}
        names = ("value", "low", "high")
        source = {"figure": title, "source": word("published, gfx936")}
        rows.append(source | dict(value=theirs, text=published(fact), counts=True))
        rows.append(
            {"figure": title, "source": fact.machine, **dict(zip(names, ends, strict=True)), **text}
        )
    columns = ["figure", "source", "value", "low", "high", "text", "counts"]
    return pd.DataFrame(rows, columns=columns).drop_duplicates(["figure", "source"])


def listed(rows: pd.DataFrame, lang: Lang = "en") -> Styler | Markdown:
    """A list of claims (`summary.proved` and its like) in words, as a table for a page."""
    if rows.empty:
        return Markdown(f"*{word('none', lang)}*")
    said = pd.DataFrame(
        {
            "notebook": row["notebook"][:2],
            "claim": labels.claim(row["claim"], row["arm"], lang),
            "verdict": word(row["verdict"], lang),
            "machines": row["machines"],
            "why": textwrap.shorten(row["why"], 240, placeholder=" …"),
        }
        for row in rows.to_dict("records")
    )
    alike = said.verdict.nunique() == 1
    said = said.drop(columns="verdict") if alike else said
    return page_table(_headed(said.set_index(["notebook", "claim"]), lang))


def not_counted(found: Iterable[Result], lang: Lang = "en") -> Styler | Markdown:
    """Results that are there and count for nothing, with the reason, as a table for a page."""
    rows = summary.not_counted(found)
    if rows.empty:
        return Markdown(f"*{word('none', lang)}*")
    rows = rows.assign(state=[word(state, lang) for state in rows.state])
    return page_table(_headed(rows.set_index("notebook"), lang))


def _headed(rows: pd.DataFrame, lang: Lang) -> pd.DataFrame:
    """The same table with its columns' names in words."""
    rows = rows.rename(columns=lambda name: word(f"column {name}", lang))
    return rows.rename_axis([word(f"column {name}", lang) for name in rows.index.names])


def figures_table(facts: Sequence[Fact], lang: Lang = "en") -> Styler:
    """Figures of one section, the published one and a column for each machine."""
    theirs = word("published, gfx936", lang)
    rows: dict[str, dict[str, str]] = {}
    for fact in facts:
        row = rows.setdefault(labels.figure(fact.key, lang), {theirs: published(fact, lang)})
        row[fact.machine] = measured(fact, lang)
    return page_table(pd.DataFrame.from_dict(rows, orient="index"))


def page_table(frame: pd.DataFrame) -> Styler:
    """A table of words: everything to the left, nothing cut off, what is in it text and no HTML."""
    left = [{"selector": "th, td, caption", "props": "text-align: left; vertical-align: top"}]
    return frame.style.format(escape="html").format_index(escape="html").set_table_styles(left)


# --- the data


def card_data(machine: str, where: Sequence[Path] | None = None) -> dict[str, Any]:
    """Everything on a machine's card, in JSON's types, with the sources of every line.

    ``where``: folders of its results; default: the accepted ones, or, if there are none, those of
    the last run here.
    """
    found = results(machine, where)
    facts = summary.facts(found)
    claims = summary.claims(found).to_dict("records")
    parts: dict[str, Any] = {
        part: {
            section: {
                "figures": [_figure(fact) for fact in facts if fact.section == section],
                "claims": [row for row in claims if section_of(row) == section],
            }
            for section in sections
        }
        for part, sections in PARTS.items()
    }
    return {"schema_version": 1, "machine": machine, **_about(found), **parts}


def results(machine: str, where: Sequence[Path] | None = None) -> list[Result]:
    """The results a card is made from: of one place, so that a local run never mixes with others."""
    if where is None:
        accepted = paths.ACCEPTED / machine
        where = [accepted if any(accepted.glob("*.json")) else paths.RUNS / machine]
    return summary.results(machine, where)


def section_of(claim: dict[Any, Any]) -> Section:
    """The section in which a claim stands: by its name, else by its notebook."""
    by_notebook = _SECTION_OF.get(str(claim["notebook"])[:2], "endpoint")
    return _SECTION_OF_CLAIM.get(str(claim["claim"]), by_notebook)


def _figure(fact: Fact) -> dict[str, Any]:
    names = (
        "key notebook metric labels unit value n low high not_comparable why state link published "
        "published_of published_label verdict"
    )
    return {name: getattr(fact, name) for name in names.split()}


def _about(found: Sequence[Result]) -> dict[str, Any]:
    made = [r.evidence for r in found if r.evidence.machine is not None]
    last = max(made, key=lambda evidence: evidence.finished or "", default=None)
    machine = last.machine if last else None
    return {
        "device": machine.device_name if machine else None,
        "arch": machine.arch if machine else None,
        "versions": machine.versions if machine else {},
        "candidate": _own_kernel(found),
        "handed_in": any(r.handed_in for r in found),
        "results": [
            {
                "notebook": r.notebook,
                "state": r.state,
                "why": r.why,
                "link": r.link,
                "claims": r.evidence.tally(),
                "commit": r.evidence.commit,
                "dirty": r.evidence.dirty,
                "finished": r.evidence.finished,
            }
            for r in found
        ],
    }


def _own_kernel(found: Iterable[Result]) -> str | None:
    """``module:function`` of the kernel that was measured, when it was not the project's."""
    first: Evidence | None = next((r.evidence for r in found if r.notebook[:2] == "01"), None)
    return str(first.parameters.get("candidate") or "") or None if first else None


# --- the page


def card(machine: str, lang: Lang = "en", where: Sequence[Path] | None = None) -> str:
    """A machine's card as Markdown; links lead from the repository to the result files.

    What is missing, stale or not comparable is shown as that. ``where``: as for `card_data`.
    """
    found = results(machine, where)
    facts = summary.facts(found)
    claims = summary.claims(found).to_dict("records")
    lines = [*_head(machine, found, lang), "", *_side_by_side(facts, lang)]
    for number, (part, sections) in enumerate(PARTS.items(), 1):
        lines += ["", f"## {number}. {word(part, lang)}"]
        for section in sections:
            lines += ["", f"### {word(section, lang)}", ""]
            lines += _figures([f for f in facts if f.section == section], lang)
            lines += _claims([row for row in claims if section_of(row) == section], lang)
    return "\n".join([*lines, "", *_foot(found, lang), ""])


def side_by_side(facts: Sequence[Fact], lang: Lang = "en") -> list[list[str]]:
    """Primitive and integration in one table: a header, then speed, bits and whether it ran."""
    by_key = {fact.key: fact for fact in facts}
    rows = [_phrase(lang, "side_header")]
    for name, keys in _SIDES.items():
        row = [_phrase(lang, name)[0]]
        for key in keys:
            fact = by_key.get(key)
            row.append(measured(fact, lang) if fact else word("no figure", lang))
            if fact is not None and fact.published is not None:
                theirs = word("published, gfx936", lang) + _colon(lang) + published(fact, lang)
                row[-1] += _brackets(theirs, lang)
        rows.append(row)
    return rows


_SIDES: dict[str, tuple[str, str, str]] = {
    "speed": ("speedup", "saving_candidate", "saving_realised"),
    "bits": ("mismatch_compiled", "texts_candidate", "integrated_records"),
    "ran": ("", "marker_folded", "marker_integrated"),
}

_PHRASES: dict[str, tuple[list[str], list[str]]] = {
    "side_header": (
        ["", "primitive", "integration, as in the article", "integration, calibrated"],
        ["", "原语：单独的 kernel", "集成：文中的方式", "集成：校准后"],
    ),
    "speed": (["speed"], ["速度"]),
    "bits": (["bits, texts"], ["比特与文本"]),
    "ran": (["runs of the kernel"], ["kernel 执行次数"]),
    "figures": (
        ["figure", "measured", "published, gfx936", "result"],
        ["指标", "本机实测", "文中公布，gfx936", "结果文件"],
    ),
    "claims": (
        ["verdict", "claim", "what was found", "result"],
        ["判定", "陈述", "原始记录（英文）", "结果文件"],
    ),
    "title": (["Evidence card: {device}"], ["证据卡：{device}"]),
    "intro": (
        [
            "The Qwen3.5 attention prologue (split, Q/K norm, MRoPE, gate, paged KV write) as one "
            "fused kernel: what was measured on this machine, in the article's two parts. "
            "Every rule was declared before its run; PASS means that the claim as worded holds. "
            "Brackets hold the interval that the result file defines. A time of another text is "
            "not comparable."
        ],
        [
            "将 Qwen3.5 的 attention prologue（拆分、Q/K 归一化、MRoPE、门控、分页 KV 写入）"
            "融合为一个 kernel：以下是本机的实测证据，按原文分为两部分。所有判定规则都在运行前声明；"
            "PASS 表示该条陈述按字面成立。方括号内为结果文件所定义的区间。文本已改变时，其耗时不可比。"
        ],
    ),
    "kernel": (
        ["The kernel is not the project's but `{name}`."],
        ["被测 kernel 并非本项目自带，而是 `{name}`。"],
    ),
    "verdicts": (["Verdicts that count:"], ["有效判定："]),
    "not counted": (
        ["Not counted as evidence until run again:"],
        ["以下结果在重新运行之前不计为证据："],
    ),
    "missing": (["Not run on this machine: {names}."], ["本机未运行：{names}。"]),
    "nothing": (["NOT_RUN: no claim of this section."], ["NOT_RUN：本节没有任何陈述。"]),
    "reproduce": (
        ["Reproduce: `fusion-evidence run`, then `fusion-evidence card --machine {machine}`."],
        [
            "复现：先 `fusion-evidence run`，再 "
            "`fusion-evidence card --machine {machine} --lang zh`。"
        ],
    ),
    "made": (["Made from {commits}"], ["代码版本：{commits}"]),
}


def _phrase(lang: Lang, name: str) -> list[str]:
    return _PHRASES[name][labels.LANGUAGES.index(lang)]


def _head(machine: str, found: Sequence[Result], lang: Lang) -> list[str]:
    about = _about(found)
    device = about["device"] or machine
    lines = [f"# {_phrase(lang, 'title')[0].format(device=_plain(device))}", ""]
    lines += [_phrase(lang, "intro")[0], ""]
    facts = [machine, about["arch"] or "", *_versions(about["versions"])]
    lines.append(_plain(" · ".join(filter(None, facts))))
    counts = summary.counts(summary.claims(found)).sum()
    counted = [f"{n} {verdict}" for verdict, n in counts.items() if n]
    if counted:
        lines += ["", f"**{_phrase(lang, 'verdicts')[0]}** " + _comma(lang).join(counted)]
    if any(r.handed_in for r in found):
        lines += ["", f"**{word('handed_in', lang)}**"]
    if about["candidate"]:
        lines += ["", _phrase(lang, "kernel")[0].format(name=_code(about["candidate"]))]
    spoiled = [r for r in found if r.state in ("stale", "incomplete", "unreadable")]
    if spoiled:
        lines += ["", f"**{_phrase(lang, 'not counted')[0]}**", ""]
    for r in spoiled:
        text = f"- {_link(r.notebook, r.link)}{_colon(lang)}{word(r.state, lang)}"
        lines.append(text + _brackets(f"`{_code(r.why)}`", lang))
    if missing := [f"`{r.notebook}`" for r in found if r.state == "missing"]:
        lines += ["", _phrase(lang, "missing")[0].format(names=_comma(lang).join(missing))]
    return lines


def _versions(versions: dict[str, str]) -> list[str]:
    shown = ("torch", "triton", "cuda", "hip", "vllm", "aiter")
    return [f"{name} {versions[name]}" for name in shown if name in versions]


def _side_by_side(facts: Sequence[Fact], lang: Lang) -> list[str]:
    header, *rows = side_by_side(facts, lang)
    return _table(header, [[f"**{row[0]}**", *map(_plain, row[1:])] for row in rows])


def _figures(facts: Sequence[Fact], lang: Lang) -> list[str]:
    rows = [
        [
            labels.figure(fact.key, lang),
            _plain(measured(fact, lang)),
            _plain(published(fact, lang)),
            _link(f"{fact.notebook[:2]} {fact.metric}", fact.link),
        ]
        for fact in facts
    ]
    return [*_table(_phrase(lang, "figures"), rows), ""] if rows else []


def _claims(rows: Sequence[dict[Any, Any]], lang: Lang) -> list[str]:
    if not rows:
        return [_phrase(lang, "nothing")[0]]
    shown = []
    for row in rows:
        verdict = f"**{word(row['verdict'], lang)}**"
        if not row["counts"]:
            verdict += _brackets(word(row["state"], lang), lang)
        why = _plain(row["why"]) if lang == "en" else f"`{_code(row['why'])}`"
        link = _link(f"{row['notebook'][:2]} {row['claim']}", row["link"])
        shown.append([verdict, _plain(labels.claim(row["claim"], row["arm"], lang)), why, link])
    return _table(_phrase(lang, "claims"), shown)


def _foot(found: Sequence[Result], lang: Lang) -> list[str]:
    commits: dict[str, list[str]] = {}
    for r in found:
        if r.evidence.commit:
            name = r.evidence.commit[:12] + ("+" if r.evidence.dirty else "")
            commits.setdefault(name, []).append(r.notebook[:2])
    made = "; ".join(f"`{_code(name)}` ({', '.join(books)})" for name, books in commits.items())
    machine = found[0].machine if found else ""
    lines = [_phrase(lang, "reproduce")[0].format(machine=machine)]
    return [*lines, "", _phrase(lang, "made")[0].format(commits=made)] if made else lines


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _link(text: str, target: str) -> str:
    shown = f"`{_code(text)}`"
    return f"[{shown}]({target})" if target else shown


def _plain(text: object) -> str:
    """Text for a Markdown cell: whatever a result file says, it stays text."""
    escaped = " ".join(str(text).split())
    for sign, instead in (
        ("\\", "\\\\"), ("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("$", "\\$"),
        ("](", "] ("), ("~~", "\\~\\~"), ("`", "\\`"),
    ):  # fmt: skip
        escaped = escaped.replace(sign, instead)
    return escaped


def _code(text: object) -> str:
    """Text between backticks, inside a table's cell."""
    return " ".join(str(text).split()).replace("`", "'").replace("|", "\\|")


def write(machine: str, folder: Path, where: Sequence[Path] | None = None) -> list[Path]:
    """Write ``card-en.md``, ``card-zh.md`` and ``card.json`` into a folder; returns their paths."""
    files = {folder / f"card-{lang}.md": card(machine, lang, where) for lang in labels.LANGUAGES}
    document = json.dumps(card_data(machine, where), indent=1, ensure_ascii=False, allow_nan=False)
    files[folder / "card.json"] = document + "\n"
    for path, text in files.items():
        write_text(path, text)
    return list(files)
