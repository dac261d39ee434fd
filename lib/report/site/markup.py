"""Pieces of HTML that the site writes itself. Every value from a result is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from fusion_evidence.lib.report.box import COLOURS
from fusion_evidence.lib.report.evidence import Evidence, Verdict
from fusion_evidence.lib.report.handed_in import HandedIn
from fusion_evidence.lib.report.labels import Lang

#: Words of the pages in both languages.
WORDS: dict[Lang, dict[str, str]] = {
    "en": {
        "measured": "Measured by this project",
        "imported": "Handed in, verified, not run by this project",
        "archive": "SHA-256 of the archive:",
        "fresh": "fresh: the notebook and the code it imports are still those that gave it",
        "commit": "commit",
        "clean": "no uncommitted changes",
        "dirty": "with uncommitted changes",
        "unknown": "unknown",
        "result": "result as JSON",
        "notebook": "notebook",
        "claim": "claim",
        "absent": "no result",
        "left_out": "left out",
    },
    "zh": {
        "measured": "由本项目实测",
        "imported": "由他人提交并通过校验，并非本项目运行",
        "archive": "归档文件的 SHA-256：",
        "fresh": "未过期：notebook 及其导入的代码与产生该结果时一致",
        "commit": "提交",
        "clean": "无未提交的改动",
        "dirty": "含未提交的改动",
        "unknown": "未知",
        "result": "结果 JSON",
        "notebook": "notebook",
        "claim": "陈述",
        "absent": "无结果",
        "left_out": "未收录",
    },
}


def raw(html: str) -> str:
    """HTML as a block of MyST Markdown; nothing in it can end the block."""
    return f"```{{raw}} html\n{html.replace('`', '&#96;')}\n```"


def verdict_badge(verdict: Verdict, text: str) -> str:
    """A verdict's name in some language on the verdict's colour."""
    return f'<span class="fe-verdict" style="background:{COLOURS[verdict]}">{escape(text)}</span>'


def table(head: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table that scrolls; the cells are HTML already. ``kind``: a class for its style."""
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    inside = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return _SCROLLING.format(kind=kind, inside=inside)


def scrolling(plain: re.Match[str]) -> str:
    """A table without attributes, its inside being the first group, as one that scrolls."""
    return _SCROLLING.format(kind="", inside=plain[1])


# A keyboard can scroll what it can focus.
_SCROLLING = '<div class="fe-scroll {kind}" tabindex="0"><table>{inside}</table></div>'


def provenance(
    evidence: Evidence, archive: HandedIn | None, language: Lang, more: Sequence[str] = ()
) -> str:
    """Who measured a result, on what, when and with which versions. ``more``: lines of HTML."""
    words = WORDS[language]
    machine = evidence.machine
    assert machine is not None  # verified
    changes = {None: words["unknown"], True: words["dirty"], False: words["clean"]}[evidence.dirty]
    versions = ", ".join(f"{escape(k)} {escape(v)}" for k, v in machine.versions.items() if v)
    day = escape((evidence.finished or evidence.started or "")[:10])
    lines = [
        f"<b>{words['imported' if archive else 'measured']}</b>&ensp;·&ensp;"
        f"{escape(machine.device_name)} (<code>{escape(machine.name)}</code>)&ensp;·&ensp;{day}",
        versions,
        f"{words['commit']} <code>{escape((evidence.commit or words['unknown'])[:12])}</code>, "
        f"{changes}&ensp;·&ensp;{words['fresh']}",
        f"{words['archive']} <code>{archive.sha256}</code>" if archive else "",
        *more,
    ]
    kind = "fe-note fe-imported" if archive else "fe-note"
    return f'<div class="{kind}">{"".join(f"<p>{line}</p>" for line in lines if line)}</div>'
