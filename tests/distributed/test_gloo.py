"""What threads cannot stand in for: point-to-point messages and compiled collectives, over gloo."""

import pytest
import torch
import torch.distributed as dist

from thinwire.codecs import Blockwise, Cast
from thinwire.comm import Ledger, all_gather, all_reduce, recv, reduce_scatter, send
from thinwire.errors import NonFiniteError, WireError
from thinwire.testing.processes import run_processes

CODECS = [None, Cast("bf16"), Blockwise(bits=8, block_size=32), Blockwise(bits=2)]
SHAPES = [(1,), (7, 3), (2, 129)]


def point_to_point(rank: int) -> dict[str, bool]:
    verdicts = {}
    ledger = Ledger()
    for codec in CODECS:
        for shape in SHAPES:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
            if rank == 0:
                send(x, codec, 1, ledger=ledger)
                continue
            got = recv(shape, torch.float32, codec, 0, ledger=ledger)
            want = x if codec is None else codec.decode(codec.encode(x), x.numel(), x.dtype)
            verdicts[f"{codec} {shape}"] = torch.equal(got, want.view(shape))
    dense = len(CODECS) * sum(4 * torch.Size(s).numel() for s in SHAPES)
    verdicts["ledger"] = ledger["pipeline"].dense_bytes == (dense if rank == 0 else 0)
    codec = Blockwise(bits=8)
    try:
        if rank == 0:
            send(torch.tensor([1.0, float("inf")]), codec, 1)
        else:
            recv((2,), torch.float32, codec, 0)
        verdicts["nan raises on both"] = False
    except NonFiniteError:
        verdicts["nan raises on both"] = True
    return verdicts


def compiled(rank: int) -> dict[str, bool]:
    codec, verdicts = Blockwise(bits=8, block_size=32), {}
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(rank))
    calls = {
        "all_reduce": lambda x: all_reduce(x * 2, codec) + 1,
        "all_gather": lambda x: all_gather(x * 2, codec) + 1,
        "reduce_scatter": lambda x: reduce_scatter(x * 2, codec) + 1,
    }
    for name, call in calls.items():
        fast = torch.compile(call, fullgraph=True, backend="aot_eager")
        verdicts[name] = torch.equal(call(x), fast(x))
    return verdicts


def cases(rank: int) -> dict[str, bool]:
    verdicts = point_to_point(rank)
    dist.barrier()
    return verdicts | compiled(rank)


@pytest.mark.processes
def test_messages_and_compiled_calls():
    for verdicts in run_processes(2, cases):
        assert all(verdicts.values()), verdicts


def test_a_truncated_message_is_an_error_not_a_crash():
    codec = Blockwise(bits=4)
    wire = codec.encode(torch.ones(200))
    with pytest.raises(WireError, match="truncated"):
        codec.decode(wire[:-1], 200, torch.float32)
