"""Each region against one process that holds the whole tensor: every dimension, odd sizes."""

import pytest
import torch
import torch.distributed as dist

from thinwire.codecs import Blockwise, Cast
from thinwire.comm import Ledger
from thinwire.errors import ConfigError
from thinwire.taco import Link, regions
from thinwire.taco.layout import whole_size
from thinwire.testing.ranks import run_ranks

# Batch 1, sequence 1 and 5, width 33: nothing divides by 2, 4, 16 or 128.
SHAPES = [(1, 5, 33), (4, 8, 16), (1, 1, 7), (3, 130, 2), (6,)]
CODECS = [None, Cast(), Blockwise(bits=8, block_size=32)]


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got, want, codec, roundings):
    """Assert equality, or an error within the codec's bound for that many roundings."""
    if codec is None or codec.facts.exact:
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    else:
        bound = roundings * codec.facts.max_error * 8.0  # no input exceeds 8
        assert (got - want).abs().max().item() <= bound if want.numel() else got.numel() == 0


def check_region(name, x_of, grad_of, rank, num_ranks, dim, wire, codec):
    """Run one region forward and backward beside its definition on whole tensors."""
    shape = x_of(0).shape
    sizes = regions.piece_sizes(shape[dim], num_ranks)
    start = sum(sizes[:rank])

    def piece(t, r=rank):
        return t.narrow(dim, sum(sizes[:r]), sizes[r])

    total = sum(x_of(r) for r in range(num_ranks))
    whole = torch.cat([piece(x_of(r), r) for r in range(num_ranks)], dim)
    grads = sum(grad_of(r) for r in range(num_ranks))
    grad_whole = torch.cat([piece(grad_of(r), r) for r in range(num_ranks)], dim)
    mine, my_grad, common = x_of(rank), grad_of(rank), grad_of(0)
    # name -> input, output wanted, gradient given, gradient wanted, roundings each way
    cases = {
        "copy_in": (mine, mine, my_grad, grads, 0, num_ranks + 1),
        "reduce_out": (mine, total, common, common, num_ranks + 1, 0),
        "gather": (piece(mine), whole, my_grad, piece(grads), 1, num_ranks),
        "scatter_reduce": (mine, piece(total), piece(my_grad), grad_whole, num_ranks, 1),
        "gather_out": (piece(mine), whole, common, piece(common), 1, 0),
        "split_in": (mine, piece(mine), piece(my_grad), grad_whole, 0, 1),
    }
    x, want, grad, want_grad, there, back = cases[name]
    x = x.clone().requires_grad_()
    args = {"gather": (dim, shape[dim]), "gather_out": (dim, shape[dim])}.get(name, (dim,))
    if name in ("copy_in", "reduce_out"):
        args = ()
    y = getattr(regions, name)(x, wire, *args)
    y.backward(grad)
    close(y.detach(), want, codec, there)
    close(x.grad, want_grad, codec, back)
    assert start <= shape[dim]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "name", ["copy_in", "reduce_out", "gather", "scatter_reduce", "gather_out", "split_in"]
)
def test_region_equals_its_definition(name, num_ranks, codec):
    def fn(rank):
        wire = Link(codec=codec).bind(dist.group.WORLD)
        for i, shape in enumerate(SHAPES):
            for dim in range(-1, len(shape)):

                def x_of(r, shape=shape, i=i):
                    return noise(*shape, seed=100 * i + r) * 0.5

                def grad_of(r, shape=shape, i=i):
                    return noise(*shape, seed=100 * i + 50 + r) * 0.5

                check_region(name, x_of, grad_of, rank, num_ranks, dim, wire, codec)

    run_ranks(num_ranks, fn)


def test_backward_sends_nothing_where_no_gradient_is_wanted():
    def fn(rank):
        ledger = Ledger()
        wire = Link(codec=Blockwise(bits=8), ledger=ledger).bind(dist.group.WORLD)
        frozen, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
        (regions.copy_in(frozen, wire) @ weight).sum().backward()
        return ledger["tensor"].calls

    assert run_ranks(2, fn) == [0, 0]


def test_lengths_of_plain_shards_are_exchanged_on_request():
    def fn(rank):
        wire = Link(uneven=True).bind(dist.group.WORLD)
        sizes = [3, 2]
        assert whole_size(torch.zeros(1, sizes[rank], 4), 1, wire) == 5
        with pytest.raises(ConfigError, match=r"lengths \[1, 4\]"):
            whole_size(torch.zeros(1, [1, 4][rank], 4), 1, wire)

    run_ranks(2, fn)


def test_one_rank_changes_nothing_and_sends_nothing():
    def fn(rank):
        ledger = Ledger()
        wire = Link(codec=Blockwise(bits=2), ledger=ledger).bind(dist.group.WORLD)
        x = torch.randn(3, 5, requires_grad=True)
        for y in (
            regions.reduce_out(regions.copy_in(x, wire), wire),
            regions.scatter_reduce(regions.gather(x, wire, 1), wire, 1),
        ):
            x.grad = None
            y.sum().backward()
            assert torch.equal(y, x)
            assert torch.equal(x.grad, torch.ones(3, 5))
        return ledger["tensor"].wire_bytes

    assert run_ranks(1, fn) == [0]
