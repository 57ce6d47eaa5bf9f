"""Masks: which elements, in which bytes, built by whom. Byte strings are hand-computed."""

import math

import pytest
import torch

from thinwire.codecs.bitmask import Bitmask
from thinwire.errors import ConfigError, WireError
from thinwire.kernels.adams import largest
from thinwire.scape.messages import MaskWire, codec, message_nbytes
from thinwire.scape.select import random_positions, top_positions
from thinwire.scape.table import Piece, build_table, keep
from thinwire.schedules import Density

SIZES = [1, 7, 8, 4095, 4096, 4097, 66_049]


def positions(numel: int, k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(numel, generator=generator)[:k].sort().values


BYTES = [
    ("bits", 17, [0, 3, 8, 9, 15], "09 83 00"),
    ("index12", 17, [0, 3, 8, 9, 15], "05 00 00 30 00 08 90 00 0F 00"),
    ("index12", 5000, [1, 4095, 4096, 4999], "02 00 02 00 01 F0 FF 00 70 38"),
    ("bits", 9, [], "00 00"),
    ("index12", 9, [], "00 00"),
]


@pytest.mark.parametrize(("form", "numel", "chosen", "want"), BYTES)
def test_byte_strings(form, numel, chosen, want):
    chosen = torch.tensor(chosen, dtype=torch.int64)
    how = Bitmask(k=chosen.numel(), form=form)
    wire = how.encode_index(chosen, numel)
    assert bytes(wire.tolist()) == bytes.fromhex(want)
    assert torch.equal(how.decode_index(wire, numel), chosen)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_formulas_equal_lengths_and_round_trips_hold(numel, density):
    k = max(1, round(density * numel))
    chosen = positions(numel, k)
    index12 = 2 * math.ceil(numel / 4096) + math.ceil(3 * k / 2)
    for form, want in (("bits", math.ceil(numel / 8)), ("index12", index12)):
        how = Bitmask(k=k, form=form)
        wire = how.encode_index(chosen, numel)
        assert wire.numel() == how.wire_nbytes(numel) == want
        assert torch.equal(how.decode_index(wire, numel), chosen)


def test_a_full_and_an_empty_chunk():
    chosen = torch.cat((torch.arange(4096), torch.tensor([8192, 9000])))
    how = Bitmask(k=chosen.numel(), form="index12")
    wire = how.encode_index(chosen, 9001)
    assert wire[:6].tolist() == [0, 16, 0, 0, 2, 0]
    assert torch.equal(how.decode_index(wire, 9001), chosen)


FORMS = [  # elements, positions, shorter form: index12 beats bits below 8.30 %
    (4096 * 100, 4096, "index12"),
    (4096 * 100, 40960, "bits"),
    (4096 * 1000, int(0.0829 * 4096 * 1000), "index12"),
    (4096 * 1000, int(0.0831 * 4096 * 1000), "bits"),
    (4096, 340, "bits"),  # a tie: 512 bytes each
]


@pytest.mark.parametrize(("numel", "k", "form"), FORMS)
@pytest.mark.parametrize("mask_format", ["auto", "delta"])
def test_auto_takes_the_smaller_form_and_bits_on_a_tie(numel, k, form, mask_format):
    assert codec(k, mask_format).form_for(numel) == form


TIES = [
    ([1.0, 2, 2, 2, 0], 2, [1, 2]),
    ([0.0, 0, 0, 0], 2, [0, 1]),
    ([3.0, 1, 3, 2, 3], 2, [0, 2]),
    ([float("nan"), 1, float("inf"), 0], 2, [1, 2]),
    ([5.0], 1, [0]),
]


@pytest.mark.parametrize(("scores", "k", "want"), TIES)
def test_ties_go_to_the_lowest_index(scores, k, want):
    assert top_positions(torch.tensor([scores]), k)[0].tolist() == want


def test_rows_are_picked_one_by_one():
    scores = torch.randint(0, 5, (3, 300), generator=torch.Generator().manual_seed(0)).float()
    for row, got in zip(scores, top_positions(scores, 40), strict=True):
        order = sorted(range(300), key=lambda i: (-row[i].item(), i))
        assert got.tolist() == sorted(order[:40])


def test_owners_are_the_least_loaded_ranks():
    table = build_table(
        list("abcde"), [(1003, 1), (517, 1), (2048, 1), (33, 1), (800, 1)], 4, dense_below=0
    )
    assert [p.owner for p in table.pieces] == [1, 3, 0, 3, 2]
    loads = [sum(p.numel for p in table.owned_by(r)) for r in range(4)]
    assert loads == [2048, 1003, 800, 550]


def test_rows_partition_cuts_large_tensors_at_rows():
    table = build_table(["e", "w"], [(100, 30), (20, 10)], 4, dense_below=0, partition="rows")
    rows = [p for p in table.pieces if p.param == 0]
    assert sum(p.numel for p in rows) == 3000
    assert all(p.numel <= 800 and p.numel % 30 == 0 and p.start % 30 == 0 for p in rows)
    assert rows[0].name == "e[0:25]"
    assert {p.owner for p in rows} == {0, 1, 2, 3}


def test_which_tensors_are_dense_and_why():
    shapes = [(), (5000,), (10, 10), (0, 10), (100, 50), (100, 50)]
    table = build_table(list("abcdef"), shapes, 2, dense=["f"])
    assert [p.dense for p in table.pieces] == [
        "fewer than 2 dimensions",
        "fewer than 2 dimensions",
        "fewer than 4096 elements",
        "empty",
        "",
        "named in dense=",
    ]


def test_tables_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="no parameter would be sparsified"):
        build_table(["a"], [(3,)], 2)
    with pytest.raises(ConfigError, match="names no parameter 'x'"):
        build_table(["a"], [(300, 30)], 2, dense=["x"])
    with pytest.raises(ConfigError, match="masks address"):
        build_table(["a"], [(2**18, 2**17)], 2)
    with pytest.raises(ConfigError, match="partition"):
        build_table(["a"], [(300, 30)], 2, partition="columns")


PRIMES = [(257, 660, 2640, 1024, 264_196), (1021, 10_424, 41_696, 16_146, 4_169_764)]


@pytest.mark.parametrize(("width", "k", "values", "mask", "dense"), PRIMES)
def test_prime_widths_never_send_more_than_dense(width, k, values, mask, dense):
    """Field case S10: padding a prime width made the sparse message larger than the gradient."""
    n = width * width
    assert keep(n, 0.01) == k
    assert 4 * k == values
    assert codec(k, "auto").wire_nbytes(n) == mask
    assert 4 * n == dense
    for density in (0.01, 0.1, 0.5, 0.9, 0.97):
        kept = keep(n, density)
        assert 4 * kept + codec(kept, "auto").wire_nbytes(n) < 4.1 * n


def test_density_schedule():
    ramp = Density(0.01, warmup_steps=0, ramp_steps=4)
    want = [1, 0.316228, 0.1, 0.031623, 0.01, 0.01]
    assert [ramp(step) for step in range(6)] == pytest.approx(want, abs=1e-6)
    assert [keep(4096, ramp(step)) for step in range(5)] == [4096, 1295, 410, 130, 41]
    late = Density(0.1, warmup_steps=3)
    assert [late(step) for step in range(6)] == [1, 1, 1, 1, 0.1, 0.1]
    assert keep(1000, 0.98) == 1000
    with pytest.raises(ConfigError, match="density"):
        Density(0.0)


def two_pieces(numel: int = 5000) -> list[Piece]:
    return [Piece("a", 0, 0, numel, owner=1), Piece("b", 1, 0, 700, owner=1)]


@pytest.mark.parametrize("mask_format", ["auto", "bits", "index12", "delta"])
@pytest.mark.parametrize("density", [0.01, 0.1])
def test_messages_round_trip(mask_format, density):
    pieces = two_pieces()
    wire = MaskWire(pieces, density, 7, b"abcd", mask_format)
    new = [positions(p.numel, p.kept(density), 1) for p in pieces]
    # Half of the old positions stay.
    old = [
        torch.cat((n[::2], positions(p.numel, n.numel(), 2))).unique()
        for n, p in zip(new, pieces, strict=True)
    ]
    message = wire.encode(new, old)
    assert message.numel() % 16 == 0
    head = bytes(message[:16].tolist())
    assert head[:8] == b"TWMK\x07\x00\x00\x00"
    assert head[12:] == b"abcd"
    if mask_format != "delta":
        assert message.numel() == message_nbytes(pieces, density, mask_format)
    assert all(torch.equal(a, b) for a, b in zip(wire.decode(message, old), new, strict=True))


def test_delta_is_smaller_where_masks_overlap_and_falls_back_where_not():
    pieces = [Piece("a", 0, 0, 400_000, owner=0)]
    k = pieces[0].kept(0.1)
    old = positions(400_000, k, 0)
    kept = old[torch.randperm(k, generator=torch.Generator().manual_seed(1))[: int(0.6 * k)]]
    free = torch.ones(400_000, dtype=torch.bool)
    free[old] = False
    added = free.nonzero().view(-1)[positions(400_000 - k, k - kept.numel(), 2)]
    new = torch.cat((kept, added)).sort().values
    delta = MaskWire(pieces, 0.1, 3, b"abcd", "delta").encode([new], [old])
    # keep bits k/8, two bytes per 4096, 1.5 bytes per added position: .07299 per element at .6
    assert delta.numel() / 400_000 == pytest.approx(0.07299, abs=2e-4)
    assert int(delta[11]) & 0x80
    apart = MaskWire(pieces, 0.1, 3, b"abcd", "delta").encode([added[: k // 2]], [old])
    assert not int(apart[11]) & 0x80 or apart.numel() < message_nbytes(pieces, 0.1, "auto")
    assert MaskWire(pieces, 0.1, 3, b"abcd", "delta").encode([new], [None]).numel() == (
        message_nbytes(pieces, 0.1, "auto")
    )


def test_foreign_and_broken_messages_are_refused():
    pieces = two_pieces()
    wire = MaskWire(pieces, 0.01, 7, b"abcd", "auto")
    message = wire.encode([positions(p.numel, p.kept(0.01)) for p in pieces], [None, None])
    cases = [
        (MaskWire(pieces, 0.01, 8, b"abcd", "auto"), message, "for step 7 arrived in step 8"),
        (MaskWire(pieces, 0.01, 7, b"abce", "auto"), message, "another table"),
        (MaskWire(pieces, 0.02, 7, b"abcd", "auto"), message, "truncated or of another k"),
        (wire, message[4:], "header"),
    ]
    for reader, sent, text in cases:
        with pytest.raises(WireError, match=text):
            reader.decode(sent, [None, None])


FILL_IN = [(0.1, 4, 0.265), (0.1, 8, 0.422), (0.1, 32, 0.844), (0.1, 64, 0.970)]
FILL_IN += [(0.01, 4, 0.021), (0.01, 8, 0.033), (0.01, 32, 0.089), (0.01, 64, 0.152)]


def test_fill_in_of_masks_that_every_worker_builds():
    """Why masks have one owner: the union of workers' own masks loses the sparsity."""
    numel, generator = 200_000, torch.Generator().manual_seed(0)

    def noisy(scale):
        a, b = (torch.randn(numel, generator=generator) for _ in range(2))
        return a * torch.exp(scale * b)

    common = noisy(1.0)
    scores = [(common + 2 * noisy(0.5)).abs() for _ in range(64)]
    for density in (0.1, 0.01):
        union = torch.zeros(numel, dtype=torch.bool)
        filled = {}
        for count, row in enumerate(scores, start=1):
            union[largest(row, round(density * numel))] = True
            filled[count] = union.float().mean().item()
        for d, count, want in FILL_IN:
            if d == density:
                assert filled[count] == pytest.approx(want, abs=0.01)


def test_random_masks_come_from_key_name_and_step_alone():
    def draw(name="w", key=0, step=1):
        return random_positions(name, 4097, 41, run_key=key, step=step, device=torch.device("cpu"))

    assert torch.equal(draw(), draw())
    assert draw().numel() == 41
    for other in (draw(name="v"), draw(key=1), draw(step=2)):
        assert not torch.equal(draw(), other)
