"""Collectives against plain sums and stacks: values, bytes, agreement between ranks, NaN policy."""

import pytest
import torch

from thinwire.codecs import Blockwise, Cast
from thinwire.comm import Ledger, all_gather, all_reduce, reduce_scatter
from thinwire.comm.ledger import all_gather_sent, all_reduce_sent, reduce_scatter_sent
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.testing.ranks import run_ranks
from thinwire.testing.transport import record_transport

CODECS = [None, Cast(), Cast("bf16"), Blockwise(bits=8, block_size=32), Blockwise(bits=4)]
SIZES = [1, 7, 257, 1000]


def part(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def rank_order_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for p in parts:
        total += p.float()
    return total


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_all_gather_is_the_stack_of_decoded_parts(codec, num_ranks):
    def fn(rank):
        return [all_gather(part(rank, n), codec, group=None) for n in SIZES]

    for rank_result in run_ranks(num_ranks, fn):
        for n, got in zip(SIZES, rank_result, strict=True):
            for r in range(num_ranks):
                x = part(r, n)
                want = x if codec is None else codec.decode(codec.encode(x), n, x.dtype)
                assert torch.equal(got[r], want)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_reduce_equals_its_definition(algorithm, num_ranks, dtype):
    codec = Blockwise(bits=8, block_size=32)

    def fn(rank):
        return [all_reduce(part(rank, n, dtype), codec, algorithm=algorithm) for n in SIZES]

    results = run_ranks(num_ranks, fn)
    for i, n in enumerate(SIZES):
        size = n if algorithm == "one_shot" else -(-n // (num_ranks * 32)) * 32 * num_ranks
        step = size if algorithm == "one_shot" else size // num_ranks
        xs = [torch.nn.functional.pad(part(r, n, dtype), (0, size - n)) for r in range(num_ranks)]
        chunks = []
        for start in range(0, size, step):
            rows = [codec.encode(x[start : start + step]) for x in xs]
            total = rank_order_sum([codec.decode(w, step, torch.float32) for w in rows])
            if algorithm == "two_shot":
                total = codec.decode(codec.encode(total), step, dtype)
            chunks.append(total)
        want = torch.cat(chunks)[:n].to(dtype)
        for rank_result in results:
            assert torch.equal(rank_result[i], want)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_reduce_scatter_equals_its_definition(num_ranks):
    codec = Blockwise(bits=6, block_size=64)

    def fn(rank):
        return reduce_scatter(part(rank, num_ranks * 70).view(num_ranks * 7, 10), codec)

    parts = [part(r, num_ranks * 70).view(num_ranks, 70) for r in range(num_ranks)]
    for rank, got in enumerate(run_ranks(num_ranks, fn)):
        decoded = [codec.decode(codec.encode(p[rank]), 70, torch.float32) for p in parts]
        assert torch.equal(got, rank_order_sum(decoded).view(7, 10))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dense_calls_equal_torch(num_ranks):
    def fn(rank):
        x = part(rank, 12)
        return all_reduce(x, None), reduce_scatter(x, None), all_gather(x, None)

    parts = [part(r, 12) for r in range(num_ranks)]
    for rank, (reduced, scattered, gathered) in enumerate(run_ranks(num_ranks, fn)):
        total = torch.stack(parts).sum(0)
        torch.testing.assert_close(reduced, total)
        torch.testing.assert_close(scattered, total.view(num_ranks, -1)[rank])
        assert torch.equal(gathered, torch.stack(parts))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ledger_equals_what_the_transport_saw(num_ranks):
    codecs = [Cast(), Blockwise(bits=4, block_size=32, layout="interleaved"), Blockwise(bits=6)]

    def fn(rank):
        ledger = Ledger()
        for codec in codecs:
            for n in SIZES:
                x = part(rank, n)
                all_gather(x, codec, ledger=ledger)
                for algorithm in ("one_shot", "two_shot", "auto"):
                    all_reduce(x, codec, ledger=ledger, algorithm=algorithm)
                reduce_scatter(part(rank, n * num_ranks), codec, ledger=ledger)
        return ledger

    with record_transport() as sent:
        ledgers = run_ranks(num_ranks, fn)
    for rank, ledger in enumerate(ledgers):
        booked = ledger["weights"].wire_bytes + ledger["gradients"].wire_bytes
        assert booked == sent[rank].nbytes
    calls = len(codecs) * len(SIZES)
    total = sum(SIZES) * 4 * len(codecs)
    assert ledgers[0]["weights"].calls == calls
    assert ledgers[0]["weights"].dense_bytes == all_gather_sent(total, num_ranks)
    per_reduce = sum(all_reduce_sent(4 * n, num_ranks) for n in SIZES) * len(codecs)
    scatter = reduce_scatter_sent(total, num_ranks)
    assert ledgers[0]["gradients"].dense_bytes == 3 * per_reduce + scatter


@pytest.mark.parametrize("call", ["all_gather", "one_shot", "two_shot", "reduce_scatter"])
def test_a_nan_on_one_rank_raises_on_all(call):
    codec, num_ranks = Blockwise(bits=8, block_size=32), 3

    def run(rank, nonfinite):
        x = part(rank, 300)
        if rank == 1:
            x[5] = float("nan")  # inside the first chunk only
        if call == "all_gather":
            return all_gather(x, codec, nonfinite=nonfinite)
        if call == "reduce_scatter":
            return reduce_scatter(x, codec, nonfinite=nonfinite)
        return all_reduce(x, codec, algorithm=call, nonfinite=nonfinite)

    def raising(rank):
        with pytest.raises(NonFiniteError, match="All ranks raise"):
            run(rank, "raise")
        return True

    assert run_ranks(num_ranks, raising) == [True] * num_ranks
    zeroed = run_ranks(num_ranks, lambda rank: run(rank, "zero"))
    assert all(torch.isfinite(z).all() for z in zeroed)
    spread = run_ranks(num_ranks, lambda rank: run(rank, "propagate"))
    assert torch.isnan(spread[0]).any()


def test_bad_arguments_say_what_to_do():
    def fn(rank):
        with pytest.raises(ConfigError, match="pad it to a multiple of 2"):
            reduce_scatter(torch.ones(3), Cast())
        with pytest.raises(ConfigError, match="one_shot"):
            all_reduce(torch.ones(3), Cast(), algorithm="ring")
        with pytest.raises(ConfigError, match="nonfinite"):
            all_reduce(torch.ones(3), Cast(), nonfinite="ignore")

    run_ranks(2, fn)


def test_one_rank_sends_nothing():
    def fn(rank):
        ledger = Ledger()
        x = torch.randn(100)
        assert torch.equal(all_reduce(x, Blockwise(bits=2), ledger=ledger), x)
        assert torch.equal(all_gather(x, Blockwise(bits=2), ledger=ledger)[0], x)
        ledger.expect("weights", num_ranks=1)
        assert "nothing to send" in ledger.check()
        return ledger["weights"].wire_bytes + ledger["gradients"].wire_bytes

    assert run_ranks(1, fn) == [0]
