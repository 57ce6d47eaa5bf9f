"""Kernels called directly where nothing records them, as ops of the graph where something does."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.codecs import Blockwise
from thinwire.kernels import ops
from thinwire.kernels.finite import all_finite

CODEC = Blockwise(bits=4, block_size=32)
X = torch.linspace(-1, 1, 256)
CODED = CODEC.encode(X)


@pytest.fixture
def direct(monkeypatch):
    """Return a list that each call of an op adds to: whether it went past the dispatcher."""
    calls = []
    traced = ops._compat.is_traced
    monkeypatch.setattr(ops._compat, "is_traced", lambda: calls.append(traced()) or calls[-1])
    return calls


def test_plain_calls_go_past_the_dispatcher(direct):
    assert torch.equal(CODEC.encode(X), CODED)
    assert torch.equal(CODEC.encode(X.clone().requires_grad_()), CODED)
    assert direct == [False, False]


def test_a_compiled_graph_holds_the_op():
    compiled = torch.compile(CODEC.encode, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X), CODED)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_traced_graph_holds_the_op(mode):
    graph = make_fx(lambda x: CODEC.encode(x), tracing_mode=mode)(X)
    assert "thinwire.blockwise_encode" in graph.code
    assert torch.equal(graph(X), CODED)


def test_modes_see_the_op():
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **kwargs or {})

    with Recorder():
        CODEC.encode(X)
    assert any("blockwise_encode" in name for name in seen)


def test_functions_that_torch_transforms():
    def loss(x):
        read = CODEC.decode(CODEC.encode(x.detach()), x.numel(), x.dtype)
        return (x * read).sum()

    gradient = torch.func.grad(loss)(X)
    assert torch.equal(gradient, CODEC.decode(CODED, X.numel(), X.dtype))


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([], True),
        ([1.0, 2.0], True),
        ([3e38, 3e38], True),  # the sum overflows
        ([math.inf, -math.inf], False),
        ([1.0, math.nan], False),
        ([-math.inf], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_finite(values, finite, dtype):
    found = all_finite(torch.tensor(values, dtype=dtype))
    assert found.dtype == torch.bool
    assert found.shape == ()
    assert bool(found) == finite


def test_all_finite_of_other_types():
    assert all_finite(torch.tensor([6e4, 6e4], dtype=torch.float16))
    assert all_finite(torch.arange(3))
    assert not all_finite(torch.tensor([1j * math.inf]))
    assert not all_finite(torch.tensor([1.0, math.inf]).to(torch.float8_e5m2))
