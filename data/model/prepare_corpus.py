#!/usr/bin/env python3
"""Make the text and the tokenizer that the compact model is trained with.

The text is the prose of documentation that Debian packages under permissive licences::

    mkdir debs && (cd debs && apt-get download python3.11-doc postgresql-doc-15 sqlite3-doc \\
        rust-doc apache2-doc python-django-doc python-sqlalchemy-doc)
    python3 data/model/prepare_corpus.py debs --corpus corpus.txt.xz --out data/model/compact

The corpus is not in the repository; ``sources.json`` says which packages it was made from, and the
digest of its text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048
#: A document starts with a line of this and its name; held-out documents are chosen by name.
MARK = "=== "


@dataclass(frozen=True)
class Source:
    """A package's documents: files below ``folder`` (of the package), outside ``without``."""

    licence: str
    folder: str
    without: tuple[str, ...] = ()


_RUST_API = ("alloc", "core", "implementors", "proc_macro", "src", "std", "test")
SOURCES = {
    "apache2-doc": Source("Apache-2.0", "usr/share/doc/apache2-doc/manual/en"),
    "postgresql-doc-15": Source("PostgreSQL", "usr/share/doc/postgresql-doc-15"),
    "python-django-doc": Source("BSD-3-Clause", "usr/share/doc"),
    "python-sqlalchemy-doc": Source("MIT", "usr/share/doc"),
    "python3.11-doc": Source("PSF-2.0", "usr/share/doc"),
    "rust-doc": Source("MIT or Apache-2.0", "usr/share/doc/rust-doc/html", _RUST_API),
    "sqlite3-doc": Source("public domain", "usr/share/doc"),
}

_QUOTES = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "¶": "", "…": "..."}
)
_SKIPPED = frozenset({"pre", "script", "style", "table", "nav", "footer"})
_BREAKS = frozenset("ul ol dl div li dd dt h1 h2 h3 h4 section body".split())


class _Paragraphs(HTMLParser):
    """Collects the text of ``<p>`` elements; code blocks, tables and navigation are left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._text: list[str] | None = None
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in _SKIPPED
        if tag == "p" or tag in _BREAKS:
            self.flush()
        if tag == "p":
            self._text = []

    def handle_endtag(self, tag: str) -> None:
        self._skipped = max(0, self._skipped - (tag in _SKIPPED))
        if tag == "p" or tag in _BREAKS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if self._text is not None and not self._skipped:
            self._text.append(data)

    def flush(self) -> None:
        if self._text is not None:
            self.found.append(" ".join("".join(self._text).translate(_QUOTES).split()))
        self._text = None


def paragraphs(html: str) -> list[str]:
    """The paragraphs of a page that read as English sentences."""
    parser = _Paragraphs()
    parser.feed(html)
    parser.flush()
    return [text for text in parser.found if _is_prose(text)]


def _is_prose(text: str) -> bool:
    letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in text)
    return (
        len(text) >= 60
        and letters >= 0.85 * len(text)
        and text[0].isalpha()
        and text[-1] in '.:?!;)"'
        and END_OF_TEXT not in text
    )


def documents(package: Path, source: Source, seen: set[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of each document of a package, without paragraphs seen before.

    Args:
        package: the ``.deb`` file.
        seen: paragraphs of earlier documents; grows.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        root = Path(folder) / source.folder
        for path in sorted(root.rglob("*.html")):
            name = path.relative_to(root)
            if path.is_symlink() or name.parts[0] in source.without:
                continue
            found = [t for t in paragraphs(path.read_text(errors="replace")) if t not in seen]
            seen.update(found)
            text = "\n".join(dict.fromkeys(found))
            if len(text) >= 400:
                yield f"{package.name.split('_')[0]}/{name}", text


def train_tokenizer(texts: list[str], folder: Path) -> None:
    """Byte-level BPE in Hugging Face's files; the only special token ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("packages", type=Path, help="folder of the downloaded .deb files")
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.txt.xz to write")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer")
    args = parser.parse_args()
    used, texts, lines, seen = [], [], [], set[str]()
    for name, source in SOURCES.items():
        package = next(iter(sorted(args.packages.glob(f"{name}_*.deb"))), None)
        if package is None:
            parser.error(f"{args.packages} has no {name}_*.deb: apt-get download {name}")
        made = list(documents(package, source, seen))
        for title, text in made:
            lines.append(f"{MARK}{title}\n{text}\n")
            texts.append(text)
        used.append(
            {
                "package": name,
                "version": subprocess.run(
                    ["dpkg-deb", "-f", package, "Version"],
                    check=True,
                    text=True,
                    capture_output=True,
                ).stdout.strip(),
                "licence": source.licence,
                "documents": len(made),
                "characters": sum(len(text) for _, text in made),
            }
        )
        print(used[-1], flush=True)
    corpus = "".join(lines).encode()
    args.out.mkdir(parents=True, exist_ok=True)
    args.corpus.parent.mkdir(parents=True, exist_ok=True)
    args.corpus.write_bytes(lzma.compress(corpus, preset=9 | lzma.PRESET_EXTREME))
    train_tokenizer(texts, args.out)
    about = {"sha256": hashlib.sha256(corpus).hexdigest(), "bytes": len(corpus), "packages": used}
    (args.out / "sources.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
