"""Quantized parameters and their optimizers on one device: use, measured bytes, edges."""

import copy
import io
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.eco_models import Matrix, mlp, parts, quantized, same
from thinwire import eco
from thinwire.eco.quantize import round_activations
from thinwire.errors import CheckpointError, ConfigError, NonFiniteError

FORMATS = {
    "fp8 row": ("fp8_e4m3", "row"),
    "int8 tensor": ("int8", "tensor"),
    "int4 tensor": ("int4", "tensor"),
    "int4 group": ("int4", "group:8"),
    "bf16": ("bf16", None),
}


def step(model, optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 20, generator=generator)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# -- bytes ---------------------------------------------------------------------------------------

# 4096 x 4096, by hand.
BYTES = {
    ("fp8_e4m3", "row"): 16_793_600,
    ("int4", "tensor"): 8_388_612,
    ("int4", "group:32"): 10_485_760,
    ("bf16", None): 33_554_432,
}


@pytest.mark.parametrize("fmt", BYTES)
def test_stored_bytes(fmt):
    assert eco.Format.parse(*fmt).nbytes((4096, 4096)) == BYTES[fmt]


# fmt, state, master -> bytes per weight; scales come on top.
PER_WEIGHT = {
    ("fp8_e4m3", "fp32", True): 13.0,
    ("fp8_e4m3", "fp32", False): 9.0,
    ("fp8_e4m3", "bf16", False): 5.0,
    ("fp8_e4m3", "8bit", False): 3.0,
    ("int4", "fp32", False): 8.5,
    ("bf16", "fp32", False): 10.0,
}


@pytest.mark.parametrize("case", PER_WEIGHT)
def test_bytes_per_weight_from_the_storages(case):
    """Field case E4: a wrapper widened the state unnoticed."""
    fmt, state, master = case
    rows, columns = 64, 512
    model = quantized(torch.randn(rows, columns), fmt, master=master)
    optimizer = eco.EcoAdamW(model.parameters(), state_dtype=state, eco=not master)
    model.weight.grad = torch.randn(rows, columns)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    measured = eco.weight_nbytes(model) + eco.optimizer_nbytes(optimizer)
    scales = {"fp8_e4m3": 4 * rows, "int4": 4, "bf16": 0}[fmt]
    state_scales = 2 * 4 * rows * columns // 256 if state == "8bit" else 0
    counter = 4
    want = PER_WEIGHT[case] * rows * columns + scales + state_scales + counter
    assert measured == want


# -- like any parameter --------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_forward_and_backward_equal_a_plain_weight_of_the_same_values(fmt):
    model = mlp()
    eco.quantize_(model, FORMATS[fmt][0], granularity=FORMATS[fmt][1])
    twin = mlp()
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.copy_(q.dequantize() if isinstance(q, eco.QuantizedTensor) else q)
    x = torch.randn(3, 4, 20, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    a, b = model(x), twin(y)
    a.square().sum().backward()
    b.square().sum().backward()
    assert torch.equal(a, b)
    torch.testing.assert_close(x.grad, y.grad)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert q.grad.dtype == torch.float32
        torch.testing.assert_close(q.grad, p.grad)


def test_backward_keeps_codes_not_values():
    model = quantized(torch.randn(64, 64))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model.layers[0](torch.randn(2, 64, requires_grad=True))
    assert sum(t.numel() for t in kept) == 2 * 64


def test_moves_copies_and_files():
    model = mlp(bias=False)
    eco.quantize_(model)
    before = parts(model)
    model.bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    assert model(torch.randn(2, 20, dtype=torch.bfloat16)).dtype == torch.bfloat16
    model.float()
    same(parts(model), before)
    same(parts(copy.deepcopy(model)), before)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = mlp(seed=1, bias=False)
    eco.quantize_(other)
    other.load_state_dict(torch.load(file))
    same(parts(other), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(2, 20)).dtype == torch.bfloat16


def test_writes_are_refused():
    model = mlp()
    eco.quantize_(model)
    with pytest.raises(ConfigError, match=r"writes parameter '0.weight'.*EcoAdamW"):
        nn.init.normal_(model[0].weight)
    with pytest.raises(RuntimeError, match="Load a dense checkpoint before quantize_"):
        model.load_state_dict(mlp().state_dict())


def test_stacked_experts_are_matrices_of_their_own():
    stack = nn.Module()
    stack.w = nn.Parameter(torch.randn(3, 4, 6) * torch.tensor([1.0, 10.0, 100.0])[:, None, None])
    whole = stack.w.detach().clone()
    model = nn.ModuleList([stack])
    eco.quantize_(model, "int4", filter=eco.experts)
    assert stack.w.scales.shape == (3,)
    for e in range(3):
        alone = quantized(whole[e], "int4")
        assert torch.equal(stack.w[e].dequantize(), alone.weight.dequantize())
    out = F.linear(torch.randn(2, 6), stack.w[1]).sum()
    out.backward()
    assert stack.w.grad[0].abs().sum() == 0
    assert stack.w.grad[1].abs().sum() > 0
    optimizer = eco.EcoAdamW(model.parameters())
    optimizer.step()
    assert torch.isfinite(stack.w.dequantize()).all()


# -- what is quantized ---------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 7, bias=False), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 7)
        self.blocks[0].weight = self.embed.weight


def test_blocks_alone_and_no_tied_weight():
    model = Tied()
    report = eco.quantize_(model)
    assert report.quantized == ("blocks.1.weight",)
    assert report.kept["embed.weight"] == "tied to a parameter that stays in full precision"
    assert report.kept["head.weight"] == "not chosen by the filter"
    assert report.weight_bytes == 36 + 24


REFUSED = {
    "unknown format": (lambda: eco.quantize_(mlp(), "fp4"), "fmt must be one of"),
    "unknown granularity": (
        lambda: eco.quantize_(mlp(), granularity="column"),
        "granularity must be row, tensor or group:N",
    ),
    "odd int4 group": (
        lambda: eco.quantize_(mlp(), "int4", granularity="group:3"),
        "even for int4",
    ),
    "nothing qualifies": (lambda: eco.quantize_(nn.Linear(3, 3)), "no parameter .* qualifies"),
    "twice": (lambda: [eco.quantize_(m) for m in [mlp()] * 2], "quantized already"),
    "no momentum": (
        lambda: eco.EcoAdamW(quantized(torch.ones(2, 2)).parameters(), betas=(0.0, 0.9)),
        "without a first moment",
    ),
    "nothing quantized": (lambda: eco.EcoAdamW(mlp().parameters()), "none of the parameters"),
    "master and ECO": (
        lambda: eco.EcoAdamW(quantized(torch.ones(2, 2), master=True).parameters()),
        "keeps a master copy",
    ),
    "state": (
        lambda: eco.EcoAdamW(quantized(torch.ones(2, 2)).parameters(), state_dtype="fp8"),
        "state_dtype must be one of",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()


def test_nan_weights_are_refused():
    with pytest.raises(NonFiniteError, match=r"layers\.0\.weight"):
        quantized(torch.tensor([[1.0, math.nan]]))


def test_rounding_happens_once_after_initialization():
    """Field case E5: masters made from rounded weights hurt early loss."""
    weight = torch.randn(8, 16)
    model = quantized(weight, master=True)
    assert torch.equal(model.weight.master, weight)
    again = quantized(model.weight.dequantize())
    torch.testing.assert_close(again.weight.dequantize(), model.weight.dequantize())


# -- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_and_constant_rows(fmt):
    weight = torch.stack([torch.zeros(16), torch.full((16,), 0.3), torch.randn(16)])
    if FORMATS[fmt][1] == "tensor":
        weight = weight[:2]
    value = quantized(weight, FORMATS[fmt][0], granularity=FORMATS[fmt][1]).weight.dequantize()
    assert value[0].abs().max() == 0
    tolerance = 1e-2 if fmt == "bf16" else 3e-7
    assert value[1].tolist() == pytest.approx([0.3] * 16, rel=tolerance)


def test_rate_zero_leaves_weights_alone():
    """Field case E7: learning rate 0 at the end of a cosine: division by zero."""
    model = mlp()
    eco.quantize_(model)
    optimizer = eco.EcoAdamW(model.parameters(), lr=1e-3)
    step(model, optimizer)
    before, moment = parts(model), optimizer.state[model[0].weight]["exp_avg"].clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer, seed=1)
    same(parts(model), before)
    assert not torch.equal(optimizer.state[model[0].weight]["exp_avg"], moment)
    assert torch.isfinite(optimizer.state[model[0].weight]["exp_avg"]).all()


def test_parameters_without_gradient_are_untouched():
    model = mlp()
    eco.quantize_(model)
    optimizer = eco.EcoAdamW(model.parameters())
    before = parts(model)
    model[2].weight.grad = torch.randn(7, 24)
    optimizer.step()
    after = parts(model)
    assert torch.equal(after["0.weight.codes"], before["0.weight.codes"])
    assert not torch.equal(after["2.weight.codes"], before["2.weight.codes"])
    assert optimizer.state[model[0].weight]["step"] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_skips_the_whole_step(bad):
    model = mlp()
    eco.quantize_(model)
    optimizer = eco.EcoAdamW(model.parameters())
    step(model, optimizer)
    before, state = parts(model), copy.deepcopy(optimizer.state_dict()["state"])
    for p in model.parameters():
        p.grad = torch.ones(p.shape)
    model[0].bias.grad[3] = bad
    optimizer.step()
    same(parts(model), before)
    assert optimizer.skipped_steps == 1
    for index, values in optimizer.state_dict()["state"].items():
        same(values, state[index])
    strict = eco.EcoAdamW(model.parameters(), nonfinite="raise")
    with pytest.raises(NonFiniteError, match="nothing was changed"):
        strict.step()


def test_an_infinite_new_weight_is_never_encoded():
    model = quantized(torch.randn(3, 8))
    optimizer = eco.EcoAdamW(model.parameters(), lr=100.0, weight_decay=10.0)
    model.weight.scales.mul_(1e37)
    before = parts(model)
    model.weight.grad = torch.ones(3, 8)
    with pytest.raises(NonFiniteError, match=r"layers\.0\.weight"):
        optimizer.step()
    same(parts(model), before)


def test_a_jump_of_the_rate_warns_once():
    model = quantized(torch.randn(3, 8))
    optimizer = eco.EcoAdamW(model.parameters(), lr=1e-6)
    model.weight.grad = torch.ones(3, 8)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    with pytest.warns(UserWarning, match="multiplies the rounding error"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_next_rate_bounds_the_injection():
    model = quantized(torch.randn(3, 8))
    optimizer = eco.EcoAdamW(model.parameters(), lr=1e-6, inject_lr="next")
    model.weight.grad = torch.ones(3, 8)
    with pytest.raises(ConfigError, match="next_lr"):
        optimizer.step()
    optimizer.param_groups[0]["next_lr"] = 1e-3
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].abs().max() < 10


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_learns(fmt, state):
    model = mlp()
    eco.quantize_(model, FORMATS[fmt][0], granularity=FORMATS[fmt][1])
    optimizer = eco.EcoAdamW(model.parameters(), lr=3e-3, state_dtype=state, weight_decay=0.0)
    losses = [step(model, optimizer) for _ in range(25)]
    assert losses[-1] < 0.35 * losses[0]


def test_fused_backward_equals_a_step_and_frees_gradients():
    models = [mlp(), mlp()]
    for model in models:
        eco.quantize_(model)
    plain = eco.EcoAdamW(models[0].parameters())
    fused = eco.EcoAdamW(models[1].parameters(), fused_backward=True)
    for seed in range(3):
        step(models[0], plain, seed)
        x = torch.randn(5, 20, generator=torch.Generator().manual_seed(seed))
        models[1](x).square().mean().backward()
        assert all(p.grad is None for p in models[1].parameters())
        fused.step()
    same(parts(models[0]), parts(models[1]))


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_ten_resumes_lose_nothing(state):
    """Field cases E3, E6: state that won't load; each resume loses mantissa bits."""

    def build():
        model = mlp()
        eco.quantize_(model)
        return model, eco.EcoAdamW(model.parameters(), state_dtype=state)

    whole, resumed = build(), build()
    for seed in range(10):
        step(*whole, seed)
        file = io.BytesIO()
        torch.save([eco.plain_state_dict(resumed[0].state_dict()), resumed[1].state_dict()], file)
        file.seek(0)
        resumed = build()
        weights, optimizer = torch.load(file)
        eco.load_plain_state_dict(resumed[0], weights)
        resumed[1].load_state_dict(optimizer)
        step(*resumed, seed)
    same(parts(whole[0]), parts(resumed[0]))


def test_state_of_another_kind_is_refused():
    model = mlp()
    eco.quantize_(model)
    saved = eco.EcoAdamW(model.parameters(), state_dtype="bf16").state_dict()
    with pytest.raises(CheckpointError, match="bfloat16"):
        eco.EcoAdamW(model.parameters()).load_state_dict(saved)
    other = mlp()
    eco.quantize_(other, "int8")
    with pytest.raises(CheckpointError, match="saved as fp8_e4m3 row, the model stores it as int8"):
        eco.load_plain_state_dict(other, eco.plain_state_dict(model.state_dict()))


def test_activations_are_rounded_by_rows_with_a_straight_gradient():
    x = torch.randn(3, 5, 16, requires_grad=True)
    y = round_activations(x)
    assert 0 < (y - x).abs().max() <= x.abs().max() * 2**-4
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    model = Matrix(torch.randn(4, 16))
    eco.quantize_(model, act_quant="fp8_e4m3")
    want = F.linear(round_activations(x.detach()), model.weight.dequantize())
    assert torch.equal(model.layers[0](x.detach()), want)


def test_dense_export_gives_the_values_in_use():
    model = mlp()
    eco.quantize_(model, "int4")
    dense = eco.dense_state_dict(model)
    twin = mlp(seed=1)
    twin.load_state_dict(dense)
    x = torch.randn(2, 20)
    assert torch.equal(twin(x), model(x))
