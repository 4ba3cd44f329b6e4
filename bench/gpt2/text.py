"""Text that every machine with Python has: sources, headers and documentation of the installed packages.

``prepare`` collects it, trains a byte-level BPE tokenizer on a sample, and writes the tokens into a folder, once. Whole
files are held out for validation. ``Tokens.batch`` draws windows by seed and step alone, so that a run is resumed
without any state of its data.
"""

from __future__ import annotations

import hashlib
import json
import site
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SOURCES = (".py", ".pyi", ".pyx", ".pxd", ".h", ".hpp", ".cuh", ".inl", ".c", ".cpp", ".cu")
SUFFIXES = (*SOURCES, ".md", ".rst", ".txt")
# Larger files are mostly generated tables.
LARGEST_FILE = 1 << 20
# One file in so many is held out.
HELD_OUT = 100
END = "<|endoftext|>"
PIECES = 50257
ABOUT = "about.json"


def installed() -> list[Path]:
    """Return the folders of the standard library, of its headers and of the installed packages."""
    known = sysconfig.get_paths()
    names = [
        *(known[key] for key in ("stdlib", "platstdlib", "purelib", "platlib", "include")),
        *site.getsitepackages(),
    ]
    return sorted({Path(name).resolve() for name in names if Path(name).is_dir()})


class Document(NamedTuple):
    """The text of a file, and its hash."""

    digest: str
    text: str


def files(folders: Iterable[Path]) -> Iterator[Document]:
    """Yield the files, sorted by path; of files with the same content the first."""
    seen = set()
    found = {path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES}
    for path in sorted(found):
        if not path.is_file() or path.stat().st_size > LARGEST_FILE:
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if content and digest not in seen:
            seen.add(digest)
            try:
                yield Document(digest, content.decode())
            except UnicodeDecodeError:  # not UTF-8
                continue


def is_held_out(document: Document) -> bool:
    """Return whether a document is for validation."""
    return int(document.digest, 16) % HELD_OUT == 0


def prepare(folder: Path, folders: Sequence[Path], sample: int, most: int, pieces: int = PIECES) -> dict[str, Any]:
    """Write tokenizer and tokens into ``folder``, unless they are there, and return what they are.

    Args:
        folder: where they are kept.
        folders: where to look for text.
        sample: about how many characters the tokenizer is trained on.
        most: about how many characters there are at most.
        pieces: size of its vocabulary.

    Raises:
        ValueError: there is hardly any text.
    """
    if (folder / ABOUT).exists():
        return read_about(folder)
    start = time.perf_counter()
    documents = _thinned(list(files(folders)), most)
    held_out = [one for one in documents if is_held_out(one)]
    training = [one for one in documents if not is_held_out(one)]
    if not held_out:
        named = ", ".join(map(str, folders))
        raise ValueError(f"{len(documents)} files with text in {named}: name folders with more by --text")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(documents)} files; training a tokenizer", flush=True)
    tokenizer = _train_tokenizer(_thinned(training, sample), pieces)
    tokenizer.save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {
        "files": len(training) + len(held_out),
        "bytes": sum(len(one.text.encode()) for one in training),
    }
    for name, part in (("train", training), ("held_out", held_out)):
        tokens = _encode(tokenizer, part)
        np.save(folder / f"{name}.npy", tokens)
        about[f"{name} tokens"] = len(tokens)
    about["pieces"] = tokenizer.get_vocab_size()
    about["seconds"] = round(time.perf_counter() - start, 1)
    (folder / ABOUT).write_text(json.dumps(about))  # last: it says that the others are complete
    return about


def read_about(folder: Path) -> dict[str, Any]:
    """Return what :func:`prepare` wrote about the text."""
    if not (folder / ABOUT).exists():
        raise FileNotFoundError(
            f"{folder} has no prepared text: run `python -m bench.gpt2 prepare --data {folder}` first"
        )
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    return about


def _thinned(documents: Sequence[Document], characters: int) -> list[Document]:
    """Return documents that have about as many characters, spaced evenly; all of them if they have no more."""
    share = min(characters / max(sum(len(one.text) for one in documents), 1), 1.0)
    return [one for index, one in enumerate(documents) if int((index + 1) * share) > int(index * share)]


def _train_tokenizer(documents: Sequence[Document], pieces: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((one.text for one in documents), trainer)
    return tokenizer


def _encode(tokenizer: Any, documents: Sequence[Document], at_once: int = 2048) -> NDArray[np.uint16]:
    """Return the tokens of all documents, each followed by END; the tokenizer uses all cores."""
    end, parts = tokenizer.token_to_id(END), []
    for first in range(0, len(documents), at_once):
        texts = [one.text for one in documents[first : first + at_once]]
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts += [np.array([*one.ids, end], dtype=np.uint16) for one in encoded]
    return np.concatenate(parts)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a folder.

    Args:
        train, held_out: the tokens.
        about: what :func:`prepare` wrote about them.
    """

    train: NDArray[np.uint16]
    held_out: NDArray[np.uint16]
    about: dict[str, Any]

    @staticmethod
    def read(folder: Path) -> Tokens:
        """Return the tokens that :func:`prepare` wrote."""
        about = read_about(folder)
        return Tokens(np.load(folder / "train.npy"), np.load(folder / "held_out.npy"), about)

    def batch(self, sequences: int, context: int, seed: int, step: int) -> Tensor:
        """Return random windows of the training text, [sequences, context + 1], the same for seed and step."""
        starts = np.random.default_rng([seed, step]).integers(len(self.train) - context, size=sequences)
        return _windows(self.train, starts, context)

    def validation(self, sequences: int, context: int) -> Tensor:
        """Return windows that are spaced evenly over the text that was held out."""
        starts = np.linspace(0, len(self.held_out) - context - 1, sequences).astype(np.int64)
        return _windows(self.held_out, starts, context)


def _windows(tokens: NDArray[np.uint16], starts: NDArray[np.int64], context: int) -> Tensor:
    return torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
