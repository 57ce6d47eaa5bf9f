"""Bytes of SparseLoCo's messages: sizes from shapes alone, the header, and every way to refuse."""

import struct
import zlib

import pytest
import torch

from thinwire.codecs import TopK
from thinwire.errors import ConfigError, ContractError, WireError
from thinwire.sparseloco import Options, Partition, Table, message_nbytes
from thinwire.sparseloco.bins import Bins
from thinwire.sparseloco.message import read_header, unpack

HEADER = 128


def llama(d, layers, ffn, vocab=32000):
    shapes = {"embed": (vocab, d), "head": (vocab, d), "norm": (d,)}
    for i in range(layers):
        for name in "qkvo":
            shapes[f"{i}.{name}"] = (d, d)
        shapes |= {f"{i}.gate": (ffn, d), f"{i}.up": (ffn, d), f"{i}.down": (d, ffn)}
        shapes |= {f"{i}.norm1": (d,), f"{i}.norm2": (d,)}
    return shapes


@pytest.mark.parametrize(
    ("size", "params", "k64", "k128"),
    [
        ((1024, 9, 2688), 177_622_016, (4_896_532, 5_068_672), (9_752_852, 9_924_992)),
        ((1536, 12, 5440), 512_398_848, (14_088_376, 14_587_008), (28_098_232, 28_596_864)),
        ((2048, 16, 8192), 1_204_881_408, (33_081_576, 34_255_872), (66_025_704, 67_200_000)),
    ],
)
def test_bytes_of_llama_shapes(size, params, k64, k128):
    shapes = llama(*size)
    assert Table(shapes, Options()).numel == params
    for k, sizes in ((64, k64), (128, k128)):
        for quant, expected in zip(("paper", "sym"), sizes, strict=True):
            assert message_nbytes(shapes, Options(k=k, quant=quant)) == HEADER + expected
    assert 4 * params / k64[1] == pytest.approx(
        {1024: 140.2, 1536: 140.5, 2048: 140.7}[size[0]], abs=0.05
    )


def test_bytes_of_odd_shapes_stay_near_the_nominal_density():
    assert message_nbytes({"w": (257, 257)}, Options(k=128)) == HEADER + 3720
    assert message_nbytes({"w": (100, 257)}, Options(k=128)) == HEADER + 1448
    for shape in ((257, 1021), (4096, 24), (131, 67), (3, 70, 80), (8, 8, 9, 11)):
        numel = torch.Size(shape).numel()
        nbytes = message_nbytes({"w": shape}, Options(k=128)) - HEADER
        assert nbytes < 0.075 * numel, shape


def test_table_sorts_by_name_and_places_small_and_empty_tensors():
    shapes = {"z": (64, 64), "é": (3,), "a.bias": (7,), "none": (0, 10), "one": (), "m": (65, 64)}
    table = Table(shapes, Options())
    assert [r.name for r in table.records] == ["a.bias", "m", "none", "one", "z", "é"]
    sizes = {r.name: r.nbytes for r in table.records}
    assert sizes["a.bias"] == 14
    assert sizes["one"] == 2
    assert sizes["none"] == 0
    assert sizes["z"] == 116
    assert all(r.offset % 4 == 0 for r in table.records)
    assert table.payload_nbytes == 16 + sizes["m"] + 0 + 4 + 116 + 8
    whole = Table(shapes, Options(small_dense=False))
    assert all(r.sparse for r in whole.records if r.numel)
    other = Table(shapes | {"z": (64, 65)}, Options())
    assert len({table.digest, whole.digest, other.digest}) == 3
    assert Table({"w": (64, 128)}, Options()).density == 64 / 4096


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="can be compressed"):
        Table({"bias": (5000,), "small": (63, 65)}, Options())
    for wrong in ({"quant": "int3"}, {"aggregate": "sum"}, {"beta": 1.5}, {"k": 0}, {"tile": 65}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(**wrong)
    with pytest.raises(ConfigError, match=r"'w' is torch\.int64"):
        Partition({"w": torch.zeros(64, 64, dtype=torch.int64)}, Options())


def partition(options=None, replica=1, **more):
    torch.manual_seed(0)
    tensors = {"w": torch.randn(65, 70), "v": torch.randn(64, 64), "bias": torch.randn(5)}
    return Partition(tensors, options or Options(), replica=replica, roster=(0, 1, 3), **more)


def message_of(part, seed=1, tokens=77, scale=1e-3):
    generator = torch.Generator().manual_seed(seed)

    def delta(name):
        return scale * torch.randn(part.theta[name].shape, generator=generator)

    return part.prepare(delta, tokens)


def judge(part, message, replica=1):
    return unpack(message, part.table, part.header(replica))


def test_header_layout():
    part = partition(Options(quant="paper", chunking="reference"), stage=5, basis_version=9)
    part.round = 3
    message = message_of(part)
    raw = message.numpy().tobytes()
    assert raw[:4] == b"TWSL"
    assert struct.unpack_from("<HHQIIQQII", raw, 4) == (
        1, 1 << 1 | 2 << 3, 3, 1, 5, 77, part.table.payload_nbytes, 3, 9,
    )  # fmt: skip
    assert raw[48:64] == Options(quant="paper", chunking="reference").config_hash()
    assert raw[64:80] == part.table.digest
    assert raw[112:124] == bytes(12)  # round 3 compares no anchors
    assert struct.unpack_from("<I", raw, 124)[0] == zlib.crc32(raw[:124])
    assert len(raw) == HEADER + part.table.payload_nbytes
    assert read_header(message).tokens == 77
    assert read_header(message_of(partition())).anchor == partition().fingerprint()[:12]


def test_every_corrupt_byte_is_refused():
    part = partition()
    message = message_of(part)
    assert judge(part, message).header.tokens == 77
    for at in range(message.numel()):
        bad = message.clone()
        bad[at] ^= 1 << (at % 8)
        with pytest.raises(WireError):
            judge(part, bad)


def test_messages_of_another_kind_are_refused():
    part = partition()
    cases = {
        "settings": message_of(partition(Options(alpha=0.5))),
        "other settings": message_of(partition(extra=b"vocabulary")),
        "stage is 2": message_of(partition(stage=2)),
        "basis_version": message_of(partition(basis_version=1)),
        "replica is 3": message_of(partition(replica=3)),
        "bytes of payload": message_of(part)[:-4],
        "no message": torch.zeros(100, dtype=torch.uint8),
        "CRC": torch.zeros(part.table.message_nbytes, dtype=torch.uint8),
    }
    late = partition()
    late.round = 1
    cases["round is 1"] = message_of(late)
    other = Partition({"w": torch.zeros(65, 71)}, Options(), replica=1, roster=(1,))
    cases["payload_nbytes"] = message_of(other)
    for reason, message in cases.items():
        with pytest.raises(WireError, match=reason.split()[-1]):
            judge(part, message)


def test_a_sender_with_another_anchor_is_a_contract_error():
    other = partition()
    other.theta["w"][0, 0] += 1
    with pytest.raises(ContractError, match="another anchor"):
        judge(partition(), message_of(other))


def test_forged_numbers_are_refused_even_with_good_hashes():
    """A peer that signs nonsense correctly: indices out of order, levels that are not finite."""
    from thinwire.sparseloco.message import pack

    part = partition()
    message = message_of(part)
    record = next(r for r in part.table.records if r.name == "v")
    at = HEADER + record.offset
    for where, value in ((at + 4, 255), (at + 1, 0x7C), (at + 3, 0xFC)):
        bad = message.clone()
        bad[where] = value
        if where == at + 4:
            bad[at + 5] = 255
        pack(read_header(message), bad)
        with pytest.raises(WireError):
            judge(part, bad)


def test_an_abstaining_message_has_the_same_length():
    part = partition()
    message = part.prepare(lambda name: torch.full(part.theta[name].shape, torch.nan), 5)
    assert message.numel() == part.table.message_nbytes
    assert not message[HEADER:].any()
    assert "not finite" in part.abstains
    assert judge(part, message).header.abstains


def test_values_beyond_the_levels_range_abstain_and_bf16_carries_them():
    part = partition()
    message_of(part, scale=1e6)
    assert "range" in part.abstains
    wide = partition(Options(level_dtype="bf16"))
    assert not read_header(message_of(wide, scale=1e6)).abstains


@pytest.mark.parametrize("shape", [(64, 64), (100, 257), (3, 70, 80)])
def test_older_quantizers_of_more_bins(shape):
    n = torch.Size(shape).numel()
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    plain = TopK(k=128, shape=shape, quant="none")
    kept = plain.decode(plain.encode(x), n, x.dtype)
    paper = TopK(k=128, shape=shape, quant="paper")
    four = Bins(plain, 4)
    same_as = paper.decode(paper.encode(x), n, x.dtype)
    torch.testing.assert_close(four.decode(four.encode(x), n, x.dtype), same_as)
    errors = {}
    for bins in (4, 16, 256):
        codec = Bins(plain, bins)
        wire = codec.encode(x)
        count = plain.geometry(n).entries
        codes = count if bins == 256 else -(-count // 2)
        nbytes = 4 * (1 + bins) + plain.geometry(n).index_nbytes + codes
        assert wire.numel() == codec.wire_nbytes(n, x.dtype) == -(-nbytes // 4) * 4
        errors[bins] = (codec.decode(wire, n, x.dtype) - kept).square().sum() / kept.square().sum()
        wires = torch.stack([wire, codec.encode(2 * x)])
        both = codec.decode(wires[0], n, x.dtype) + codec.decode(wires[1], n, x.dtype)
        assert torch.equal(codec.decode_sum(wires, n, x.dtype), both)
        x[7] = torch.nan
        assert codec.nonfinite_count(wires, n, x.dtype) == 0
        assert codec.nonfinite_count(codec.encode(x), n, x.dtype) == 1
        x[7] = 0.0
    assert errors[256] < 0.1 * errors[16]
    assert errors[16] < 0.5 * errors[4]
    assert errors[256] < 1e-3


def test_more_bins_travel_as_messages():
    part = partition(Options(quant="paper", n_bins=16))
    message = message_of(part)
    assert read_header(message).flags >> 1 & 3 == 3
    assert judge(part, message).header.tokens == 77
    with pytest.raises(ConfigError, match="n_bins"):
        Options(n_bins=16)
    with pytest.raises(ConfigError, match="n_bins"):
        Options(quant="paper", n_bins=7)
