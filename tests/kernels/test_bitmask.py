"""Mask messages: the published byte strings, sizes, round trips, and what is refused."""

import pytest
import torch

from thinwire.codecs import Bitmask, decode_delta, encode_delta
from thinwire.errors import ConfigError, WireError
from thinwire.kernels.bitmask import reference

SET = [0, 3, 8, 9, 15]


@pytest.mark.parametrize(
    ("index", "n", "form", "expected"),
    [
        (SET, 17, "bits", "09 83 00"),
        (SET, 17, "index12", "05 00 00 30 00 08 90 00 0F 00"),
        ([1, 4095, 4096, 4999], 5000, "index12", "02 00 02 00 01 F0 FF 00 70 38"),
    ],
)
def test_byte_strings(index, n, form, expected):
    codec = Bitmask(k=len(index), form=form)
    wire = codec.encode_index(torch.tensor(index), n)
    assert bytes(wire.tolist()) == bytes.fromhex(expected)
    assert codec.decode_index(wire, n).tolist() == index


@pytest.mark.parametrize("n", [1, 7, 8, 4095, 4096, 4097, 66_049])
def test_round_trips_and_reference(n):
    g = torch.Generator().manual_seed(n)
    for k in {0, 1, n // 100, n // 8, n}:
        index = torch.randperm(n, generator=g)[:k].sort().values
        for form in ("bits", "index12", "auto"):
            codec = Bitmask(k=k, form=form)
            wire = codec.encode_index(index, n)
            assert wire.numel() == codec.wire_nbytes(n)
            write = {"bits": reference.to_bits, "index12": reference.to_index12}
            read = {"bits": reference.from_bits, "index12": reference.from_index12}
            name = codec.form_for(n)
            assert torch.equal(wire, write[name](index, n))
            assert torch.equal(read[name](wire, n, k), index)
            assert torch.equal(codec.decode_index(wire, n), index)
            dense = codec.decode(wire, n, torch.bool)
            assert torch.equal(dense.nonzero().view(-1), index)
            assert torch.equal(codec.encode(dense), wire)


def test_auto_takes_the_shorter_form_and_bits_on_ties():
    assert Bitmask(k=66_049 // 10).form_for(66_049) == "bits"
    assert Bitmask(k=66_049 // 100).form_for(66_049) == "index12"
    assert Bitmask(k=660).wire_nbytes(257 * 257) == 1024
    assert Bitmask(k=10_424).wire_nbytes(1021 * 1021) == 16_146


def test_delta_round_trip_and_size():
    g = torch.Generator().manual_seed(0)
    n, k = 100_000, 1000
    old = torch.randperm(n, generator=g)[:k].sort().values
    extra = torch.randperm(n, generator=g)[:k]
    new = torch.cat([old[::3], extra]).unique()[:k].sort().values
    wire = encode_delta(old, new, n)
    added = (~torch.isin(new, old)).sum().item()
    assert wire.numel() == (k + 7) // 8 + reference.index12_nbytes(n, added)
    assert torch.equal(decode_delta(wire, old, n, new.numel()), new)
    for a, b in ((old, old[:0]), (old[:0], new), (old, old)):
        assert torch.equal(decode_delta(encode_delta(a, b, n), a, n, b.numel()), b)
    with pytest.raises(WireError):
        decode_delta(wire[:-1], old, n, new.numel())


def test_refuses_what_no_encoder_writes():
    for form in ("bits", "index12"):
        codec = Bitmask(k=5, form=form)
        wire = codec.encode_index(torch.tensor(SET), 17)
        broken = wire.clone()
        broken[0] ^= 1
        with pytest.raises(WireError):
            codec.decode_index(broken, 17)
        with pytest.raises(WireError):
            codec.decode_index(wire[:-1], 17)
    with pytest.raises(ConfigError, match="5 elements set"):
        Bitmask(k=5).encode(torch.ones(17))
    with pytest.raises(ConfigError, match="ascend"):
        Bitmask(k=1).encode_index(torch.tensor([17]), 17)
