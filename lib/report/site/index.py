"""The first pages of the site, the summary and each machine's card, in English and in Chinese."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fusion_evidence.lib.report import card as evidence_card
from fusion_evidence.lib.report import labels
from fusion_evidence.lib.report import summary as results
from fusion_evidence.lib.report.evidence import Verdict
from fusion_evidence.lib.report.labels import Lang
from fusion_evidence.lib.report.site.collect import MachineResults, Page
from fusion_evidence.lib.report.site.inert import inert_markdown
from fusion_evidence.lib.report.site.markup import (
    WORDS,
    provenance,
    raw,
    scrolling,
    table,
    verdict_badge,
)

_TEXT: dict[Lang, str] = {
    "en": """# What is proved

*Does a fused kernel survive the whole model, and if not, which bit changed first, and why?*

Everything here comes from result files that were verified and are fresh: the notebook and the code
that gave them have not changed since. Figures of the article that this collection follows are
labelled `published, gfx936`; nothing was measured on that machine unless it has a section below.

{about}

## Results

A row for each notebook, a column for each machine: the claims counted by verdict. A cell leads to
the executed notebook.
""",
    "zh": """# 哪些结论得到了证明

*融合 kernel 放进完整模型后还成立吗？如果不成立，最先变化的是哪一位，为什么？*

本站内容全部来自通过校验且未过期的结果文件：产生这些结果的 notebook 与代码此后没有改动。\
所跟随的文章中的数字一律标注为 `published, gfx936`（文中公布）；\
除非下文有那台机器自己的一节，本项目没有在那台机器上测过任何东西。

{about}

## 结果

每行一个 notebook，每列一台机器：按判定统计的陈述数。单元格链接到已执行的 notebook（英文）。
""",
}
_ABOUT: dict[Lang, str] = {
    "en": "[中文](index.zh-CN.md) · [About the project](README.md)",
    "zh": "[English](index.md) · [项目说明](README.zh-CN.md)",
}
_CLAIMS: dict[Lang, str] = {
    "en": "## Claims\n\nA verdict leads to the page that has its reason. PASS: the claim as worded holds.",
    "zh": "## 陈述\n\n判定链接到说明理由的页面。PASS 表示该条陈述按字面成立。",
}
_LEFT_OUT: dict[Lang, str] = {
    "en": "**Left out of this site**, because they would not be accepted today:",
    "zh": "**未收录于本站**的结果（今天无法再次通过验收）：",
}
_CARD: dict[Lang, str] = {
    "en": "[The whole card of {name}]({link}): every figure and claim, with its result file.",
    "zh": "[{name} 的完整证据卡]({link})：每个数字与陈述，连同其结果文件。",
}
_SUFFIX: dict[Lang, str] = {"en": "", "zh": ".zh-CN"}


def index_name(language: Lang) -> str:
    """The summary's place in the site, without ``.md``."""
    return f"index{_SUFFIX[language]}"


def heading_id(machine: str) -> str:
    """The place of a machine's section on the summary, as MyST names it."""
    return re.sub(r"[^\w-]", "", machine.lower())


def card_name(machine: str, language: Lang) -> str:
    """A machine's card's place in the site, without ``.md``."""
    return f"data/runs/{machine}/card{_SUFFIX[language]}"


# --- the summary


def index(machines: Sequence[MachineResults], served: Path, language: Lang) -> str:
    """The summary as MyST Markdown: overview, claims, a section for each machine.

    ``served``: the folder with the evidence files of the site and no others.
    """
    parts = [_TEXT[language].format(about=_ABOUT[language]), raw(_overview(machines, language))]
    if left := [_left_out(machine) for machine in machines if machine.left_out]:
        parts += [_LEFT_OUT[language], raw(f"<ul>{''.join(left)}</ul>")]
    parts += [_CLAIMS[language], raw(_claims(machines, language))]
    parts += [_section(m, served, language) for m in machines if m.pages]
    return "\n\n".join(parts) + "\n"


def _overview(machines: Sequence[MachineResults], language: Lang) -> str:
    names = {page.notebook for machine in machines for page in machine.pages}
    names |= {name for machine in machines for name in [*machine.left_out, *machine.absent]}
    head = [WORDS[language]["notebook"], *(machine.name for machine in machines)]
    rows = [
        [escape(name.replace("_", " ")), *(_tally(machine, name, language) for machine in machines)]
        for name in sorted(names)
    ]
    return table(head, rows)


def _tally(machine: MachineResults, notebook: str, language: Lang) -> str:
    for page in machine.pages:
        if page.notebook == notebook:
            return f'<a href="{_link(page)}">{escape(page.evidence.tally())}</a>'
    return WORDS[language]["left_out" if notebook in machine.left_out else "absent"]


def _link(page: Page) -> str:
    return f"{page.document}.html"  # a checked name: plain ASCII


def _left_out(machine: MachineResults) -> str:
    return "".join(
        f"<li><code>{escape(machine.name)}/{escape(name)}</code>: {escape(why)}</li>"
        for name, why in machine.left_out.items()
    )


def _claims(machines: Sequence[MachineResults], language: Lang) -> str:
    """Claims by machine: each verdict on its colour, leading to its page."""
    cells: dict[tuple[str, str, str | None], dict[str, str]] = {}
    for machine in machines:
        for page in machine.pages:
            for claim in page.evidence.claims:
                row = cells.setdefault((page.notebook, claim.claim, claim.arm), {})
                badge = _badge(claim.verdict, language)
                row[machine.name] = (
                    f'<a href="{_link(page)}" title="{escape(claim.why)}">{badge}</a>'
                )
    names = [machine.name for machine in machines]
    head = [WORDS[language]["claim"], *names]
    rows = [
        [
            f"{escape(notebook[:2])} {escape(labels.claim(claim, arm or '', language))}",
            *(row.get(name, "") for name in names),
        ]
        for (notebook, claim, arm), row in sorted(cells.items(), key=lambda item: item[0][0])
    ]
    return table(head, rows, kind="fe-claims")


def _badge(verdict: Verdict, language: Lang) -> str:
    return verdict_badge(verdict, labels.word(verdict.value, language))


def _section(machine: MachineResults, served: Path, language: Lang) -> str:
    last = max(machine.pages, key=lambda page: page.evidence.finished or "")
    facts = results.facts(evidence_card.results(machine.name, [served / machine.name]))
    head, *rows = evidence_card.side_by_side(facts, language)
    cells = [[f"<b>{escape(first)}</b>", *map(escape, others)] for first, *others in rows]
    link = f"{card_name(machine.name, language)}.md"
    return "\n\n".join(
        [
            f"## {machine.name}",
            raw(provenance(last.evidence, machine.archive, language)),
            raw(table(map(escape, head), cells)),
            _CARD[language].format(name=machine.name, link=link),
        ]
    )


# --- cards


def card_page(machine: MachineResults, served: Path, language: Lang) -> str:
    """A machine's card as a page: its own title, the rest as inert HTML."""
    folder = served / machine.name

    def resolve(target: str) -> str | None:
        name = target.rpartition("/")[2]
        return name if (folder / name).is_file() else None

    title, _, rest = evidence_card.card(machine.name, language, [folder]).partition("\n")
    last = max(machine.pages, key=lambda page: page.evidence.finished or "")
    note = provenance(last.evidence, machine.archive, language)
    body = re.sub("<table>(.*?)</table>", scrolling, inert_markdown(rest, resolve), flags=re.DOTALL)
    words = inert_markdown(title.lstrip("# "))
    heading = re.sub("<[^>]*>", "", words).strip()
    return f"# {_one_line(heading)}\n\n{raw(note + body)}\n"


def _one_line(text: str) -> str:
    """Text of a result as a heading's: letters, digits and plain signs, nothing of Markdown's."""
    return re.sub(r"[^\w .,:()/+：（）-]|_(?=_)", " ", text)
