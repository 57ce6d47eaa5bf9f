"""Slices, node tiers and the size gate of the compressed collectives."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from thinwire.codecs import Blockwise, Cast
from thinwire.comm import Ledger, all_gather, all_reduce, hierarchy, reduce_scatter
from thinwire.comm.shots import cut
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.testing.ranks import run_ranks
from thinwire.testing.transport import record_transport

CODEC = Blockwise(bits=8, block_size=32)
SIZES = [1, 40, 257, 4096]


def part(rank, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def test_cuts_are_whole_units():
    assert cut(1000, 128, 4) == [(0, 256), (256, 512), (512, 768), (768, 1000)]
    assert cut(100, 128, 4) == [(0, 100)]
    assert cut(300, 128, 2) == [(0, 128), (128, 300)]


@pytest.mark.parametrize("slices", [2, 4, 7])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_slices_change_neither_values_nor_bytes(slices, num_ranks):
    def fn(rank):
        out = []
        for count in (1, slices):
            ledger, values = Ledger(), []
            for n in SIZES:
                x = part(rank, n)
                values.append(all_gather(x, CODEC, ledger=ledger, slices=count))
                values.append(
                    reduce_scatter(part(rank, n * num_ranks), CODEC, ledger=ledger, slices=count)
                )
                for algorithm in ("one_shot", "two_shot"):
                    values.append(
                        all_reduce(x, CODEC, algorithm=algorithm, ledger=ledger, slices=count)
                    )
            sent = ledger["weights"].wire_bytes + ledger["gradients"].wire_bytes
            out.append((values, sent))
        return out

    with record_transport() as sent:
        results = run_ranks(num_ranks, fn)
    for rank, ((whole, whole_bytes), (cut_up, cut_bytes)) in enumerate(results):
        assert whole_bytes == cut_bytes
        assert sent[rank].nbytes == 2 * cut_bytes
        assert all(torch.equal(a, b) for a, b in zip(whole, cut_up, strict=True))


def test_slices_that_would_move_a_scale_are_refused():
    def fn(rank):
        with pytest.raises(ConfigError, match="slices=2 would change the message"):
            all_reduce(torch.ones(4), Blockwise(bits=8, pad_to=4096), slices=2)
        with pytest.raises(ConfigError, match="between 1 and 64"):
            all_reduce(torch.ones(4), CODEC, slices=0)

    run_ranks(2, fn)


def test_a_nan_in_the_last_slice_raises_on_all():
    def fn(rank):
        x = part(rank, 4096)
        if rank == 1:
            x[-1] = float("nan")
        with pytest.raises(NonFiniteError):
            all_reduce(x, CODEC, slices=4, algorithm="two_shot")
        return all_reduce(part(rank, 64), CODEC)

    results = run_ranks(3, fn)
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize(("num_ranks", "node_size"), [(4, 2), (6, 3), (6, 2), (4, 4), (4, 1)])
def test_tiers_equal_their_definition(num_ranks, node_size):
    """Decode, add per node in rank order, recode, add over nodes, recode."""
    num_nodes = num_ranks // node_size

    def fn(rank):
        tiers, ledger = hierarchy(None, node_size), Ledger()
        values = [all_reduce(part(rank, n), CODEC, tiers=tiers, ledger=ledger) for n in SIZES]
        return values, ledger["gradients"].wire_bytes

    def recode(x):
        return CODEC.decode(CODEC.encode(x), x.numel(), torch.float32)

    with record_transport() as sent:
        results = run_ranks(num_ranks, fn)
    for i, n in enumerate(SIZES):
        padded = -(-n // (32 * num_ranks)) * 32 * num_ranks
        xs = [torch.nn.functional.pad(part(r, n), (0, padded - n)) for r in range(num_ranks)]
        node_sums = []
        for node in range(num_nodes):
            total = torch.zeros(padded)
            for x in xs[node * node_size : (node + 1) * node_size]:
                total += recode(x)
            node_sums.append(total)
        total = torch.zeros(padded)
        for node_sum in node_sums:
            total += recode(node_sum)
        want = recode(total)[:n]
        for values, _ in results:
            assert torch.equal(values[i], want)
    for rank, (_, nbytes) in enumerate(results):
        assert sent[rank].nbytes == nbytes


def test_tiers_raise_together_and_fit_a_sub_group():
    def fn(rank):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        group = mesh["tp"].get_group()
        tiers = hierarchy(group, 2)
        x = part(rank, 300)
        good = all_reduce(x, CODEC, group=group, tiers=tiers)
        if rank == 6:
            x[7] = float("inf")
        bad = rank >= 4
        try:
            all_reduce(x, CODEC, group=group, tiers=tiers)
            raised = False
        except NonFiniteError:
            raised = True
        with pytest.raises(ConfigError, match="does not divide"):
            hierarchy(group, 3)
        dense = x.new_tensor(0) if bad else all_reduce(x, Cast(), group=group, tiers=tiers)
        return good, raised == bad, dense

    results = run_ranks(8, fn)
    assert all(r[1] for r in results)
    for first in (0, 4):
        want = sum(part(r, 300) for r in range(first, first + 4))
        for good, _, dense in results[first : first + 4]:
            assert torch.equal(good, results[first][0])
            assert (good - want).abs().max() < 0.2
            if first == 0:
                torch.testing.assert_close(dense, want)


def test_the_gate_goes_by_shape_and_dtype_and_is_booked():
    def fn(rank):
        ledger, group = Ledger(), dist.group.WORLD
        options = {"ledger": ledger, "group": group, "link": "tensor", "min_bytes": 1000}
        for n in (100, 400, 8):
            all_reduce(part(rank, n), CODEC, **options)
        # bf16: 8-bit blocks of 32 take 4 more bytes, so 9 values would not shrink
        x = part(rank, 9, torch.bfloat16)
        all_gather(x, CODEC, **{**options, "min_bytes": 0})
        reduce_scatter(part(rank, 18, torch.bfloat16), CODEC, **{**options, "min_bytes": 0})
        all_gather(x, CODEC, **{**options, "min_bytes": None})
        all_reduce(part(rank, 0), CODEC, **options)
        return ledger

    ledger = run_ranks(2, fn)[0]
    gated = {reason: (g.calls, g.nbytes) for (_, reason), g in ledger.exempt_calls.items()}
    assert gated == {
        "smaller than min_bytes=1000": (3, 100 * 4 + 8 * 4),
        "compression would not shrink it": (2, 9 * 2 + 9 * 2),
    }
    totals = ledger["tensor"]
    assert totals.exempt_bytes == 468
    assert totals.wire_bytes == 468 + CODEC.wire_nbytes(400, torch.float32) + 36
    assert totals.calls == 7
