"""Stored weights over ranks: codes that don't depend on the mesh, bytes sent, checkpoints."""

import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests import fsdp_models
from tests.eco_models import same
from thinwire import aquavit, eco
from thinwire.codecs import Blockwise
from thinwire.comm import Ledger
from thinwire.errors import ConfigError, ContractError, NonFiniteError
from thinwire.testing.ranks import run_ranks

FORMATS = {
    "fp8 row": ("fp8_e4m3", "row"),
    "int8 tensor": ("int8", "tensor"),
    "int4 tensor": ("int4", "tensor"),
    "int4 group": ("int4", "group:8"),
    "bf16": ("bf16", None),
}


def build(num_ranks, fmt="fp8 row", *, dtype=None, hidden=65, **kwargs):
    """Return the shared model (33 wide, 65 hidden: no rank count divides them), sharded."""
    with fsdp_models._SEEDING:
        torch.manual_seed(0)
        model = fsdp_models.Net(hidden=hidden)
    eco.quantize_(model, FORMATS[fmt][0], granularity=FORMATS[fmt][1], **kwargs)
    mesh = init_device_mesh("cpu", (num_ranks,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def whole(state):
    return {
        k: v.full_tensor().clone() if isinstance(v, DTensor) else v
        for k, v in eco.plain_state_dict(state).items()
    }


def steps(model, optimizer, count=3, first=0):
    """Train on the same data on every rank: averages over 2 or 4 ranks are exact."""
    losses = []
    for index in range(first, first + count):
        loss = fsdp_models.loss_of(model, index, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_do_not_depend_on_the_number_of_ranks(fmt):
    """Field cases E1, E2: stochastic rounding and scales under FSDP2, uneven shards."""

    def work(num_ranks):
        def rank(_):
            model = build(num_ranks, fmt)
            losses = steps(model, eco.EcoAdamW(model.parameters(), lr=1e-2))
            return losses, whole(model.state_dict())

        return run_ranks(num_ranks, rank)

    (base,) = work(1)
    for num_ranks in (2, 4):
        for losses, state in work(num_ranks):
            assert losses == base[0]
            same(state, base[1])


def test_a_rank_without_rows_and_shards_of_one_row():
    def rank(_):
        model = build(4, "int4 tensor", hidden=3)
        losses = steps(model, eco.EcoAdamW(model.parameters(), lr=1e-2))
        return losses, whole(model.state_dict())

    results = run_ranks(4, rank)
    for losses, state in results:
        assert losses == results[0][0]
        same(state, results[0][1])


def test_gathered_weights_are_the_stored_values_after_every_step():
    def rank(_):
        model = build(2)
        optimizer = eco.EcoAdamW(model.parameters(), lr=1e-2)
        hashes = set()
        for index in range(3):
            steps(model, optimizer, 1, index)
            stored = eco.dense_state_dict(model)["blocks.0.up.weight"]
            model.blocks[0].unshard()
            assert torch.equal(model.blocks[0].up.weight.detach(), stored)
            model.blocks[0].reshard()
            hashes.add(stored.sum().item())
        return len(hashes)

    assert run_ranks(2, rank) == [3, 3]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_bytes_on_the_weights_link(dtype):
    """fp8 row sends rows_padded * (C + 4) bytes per rank, rounded up to 4; the rest is exempt."""

    def rank(_):
        model = build(2, dtype=dtype)
        plain = steps(model, eco.EcoAdamW(model.parameters(), lr=1e-2), 1)
        model = build(2, dtype=dtype)
        ledger = Ledger()
        aquavit.attach(model, None, ledger=ledger)
        booked = steps(model, eco.EcoAdamW(model.parameters(), lr=1e-2), 1)
        ledger.check()
        return plain == booked, ledger["weights"]

    size = 2 if dtype else 4
    stored = 33 * (33 + 4) + 17 * (65 + 4)  # up [65, 33] and down [33, 65] over 2 ranks
    stored = -(-33 * 37 // 4) * 4 + -(-17 * 69 // 4) * 4
    block_raw = size * (2 * 17 + 33 + 17)  # norm gain and bias, two biases
    root = size * (19 * 33 + 19 * 33 + 19)  # embedding, head
    for equal, link in run_ranks(2, rank):
        assert equal
        # Two blocks, gathered for forward and backward; FSDP2 keeps the root gathered.
        assert link.wire_bytes == 4 * (stored + block_raw) + root
        assert link.exempt_bytes == 4 * block_raw + root
        assert link.dense_bytes == 4 * (size * (33 * 33 + 17 * 65) + block_raw) + root


RECODED = {
    "below the stored bits": (Blockwise(bits=4, block_size=32), True),
    "above the stored bits": (Blockwise(bits=8, block_size=32, pad_to=4096), False),
}


@pytest.mark.parametrize("case", RECODED)
@pytest.mark.parametrize("keep_wire", ["none", "forward"])
def test_aquavit_recodes_only_below_the_stored_bits(case, keep_wire):
    codec, recoded = RECODED[case]

    def rank(_):
        model = build(2)
        ledger = Ledger()
        handle = aquavit.attach(
            model, aquavit.Static(codec), ledger=ledger, min_shard_numel=1000, keep_wire=keep_wire
        )
        optimizer = eco.EcoAdamW(model.parameters(), lr=1e-2)
        losses = steps(model, optimizer)
        ledger.check()
        stored = eco.dense_state_dict(model)["blocks.0.up.weight"]
        model.blocks[0].unshard()
        gathered = model.blocks[0].up.weight.detach().clone()
        model.blocks[0].reshard()
        return losses, stored, gathered, ledger["weights"].wire_bytes, handle.layer_errors()

    results = run_ranks(2, rank)
    plain = run_ranks(2, lambda _: steps(m := build(2), eco.EcoAdamW(m.parameters(), lr=1e-2)))
    for losses, stored, gathered, _, errors in results:
        assert torch.equal(gathered, results[0][2])
        if not recoded:
            assert losses == plain[0]
            assert torch.equal(gathered, stored)
            assert "blocks.0.up.weight" not in errors
            continue
        padded = torch.nn.functional.pad(stored, (0, 0, 0, 1)).view(2, -1)
        want = torch.stack([codec.decode(codec.encode(s), s.numel(), s.dtype) for s in padded])
        assert torch.equal(gathered, want.view(66, 33)[:65])
        assert losses == pytest.approx(plain[0], abs=0.2)
        assert 0 < errors["blocks.0.up.weight"] < 0.02


def test_aquavit_ascends_past_the_stored_bits():
    def rank(_):
        model = build(2, "int4 group")
        ledger = Ledger()
        schedule = aquavit.Schedule(6, monotone=True)
        aquavit.attach(model, schedule, ledger=ledger, min_shard_numel=64)
        optimizer = eco.EcoAdamW(model.parameters(), lr=1e-2)
        sent = []
        for index in range(6):
            steps(model, optimizer, 1, index)
            sent.append(ledger.end_step()["weights"])
        ledger.check()
        return sent

    for sent in run_ranks(2, rank):
        assert sent == sorted(sent)
        assert sent[0] < sent[-1]


def test_weight_differences_are_refused():
    def rank(_):
        model = build(2)
        with pytest.raises(ConfigError, match="stored quantized"):
            aquavit.attach(model, aquavit.Difference(Blockwise(bits=4)))

    run_ranks(2, rank)


# -- replicas ------------------------------------------------------------------------------------


def test_plain_data_parallel_keeps_replicas_equal():
    def rank(index):
        with fsdp_models._SEEDING:
            torch.manual_seed(0)
            model = fsdp_models.Net()
        eco.quantize_(model)
        optimizer = eco.EcoAdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            fsdp_models.loss_of(model, step, index).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
        eco.check_replicas(model, dist.group.WORLD)
        if index == 1:
            model.blocks[1].up.weight.codes[0, 0] ^= 1
        with pytest.raises(ContractError, match=r"blocks\.1\.up\.weight\.codes of rank 1"):
            eco.check_replicas(model, dist.group.WORLD)

    run_ranks(2, rank)


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all():
    def rank(index):
        model = build(2)
        optimizer = eco.EcoAdamW(model.parameters(), lr=1e-2)
        before = whole(model.state_dict())
        fsdp_models.loss_of(model, 0, 0).backward()
        if index == 1:
            model.blocks[0].up.weight.grad.to_local()[0, 0] = float("nan")
        optimizer.step()
        same(whole(model.state_dict()), before)
        assert optimizer.skipped_steps == 1
        optimizer = eco.EcoAdamW(model.parameters(), lr=100.0, weight_decay=10.0)
        if index == 1:
            model.blocks[0].up.weight.grad.to_local()[0, 0] = 0.0
            model.blocks[0].up.weight.to_local().scales.mul_(1e37)
        with pytest.raises(NonFiniteError):
            optimizer.step()

    run_ranks(2, rank)


def test_fused_backward_under_fsdp():
    def work(fused):
        def rank(_):
            model = build(2, "int4 tensor")
            optimizer = eco.EcoAdamW(model.parameters(), lr=1e-2, fused_backward=fused)
            losses = steps(model, optimizer)
            return losses, whole(model.state_dict())

        return run_ranks(2, rank)

    for plain, fused in zip(work(False), work(True), strict=True):
        assert plain[0] == fused[0]
        same(plain[1], fused[1])


# -- tensor parallel -----------------------------------------------------------------------------


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = ((16, 32), (32, 16))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*s, bias=False) for s in sizes)

    def forward(self, x):
        return self.layers[1](torch.relu(self.layers[0](x)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_meshes_give_equal_codes(fmt):
    """Field case E2: (1, 1), (1, 2), (2, 1) and (2, 2) ranks of (shards, tensor parallel)."""
    gradients = [torch.randn(32, 16), torch.randn(16, 32)]

    def work(shards, splits):
        def rank(_):
            with fsdp_models._SEEDING:
                torch.manual_seed(0)
                model = Mlp()
            mesh = init_device_mesh("cpu", (shards, splits), mesh_dim_names=("shard", "tp"))
            plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
            if splits > 1:
                parallelize_module(model, mesh["tp"], plan)
            eco.quantize_(model, FORMATS[fmt][0], granularity=FORMATS[fmt][1])
            if shards > 1:
                fully_shard(model, mesh=mesh["shard"])
            optimizer = eco.EcoAdamW(model.parameters(), lr=1e-2)
            model(torch.ones(2, 16)).sum().backward()  # no draw: others may be seeding
            for _ in range(3):
                for p, g in zip(model.parameters(), gradients, strict=True):
                    _set_grad(p, g)
                optimizer.step()
            return whole(model.state_dict())

        return run_ranks(shards * splits, rank)

    base = work(1, 1)[0]
    for layout in ((1, 2), (2, 1), (2, 2)):
        for state in work(*layout):
            same(state, base)


@pytest.mark.parametrize("fmt", FORMATS)
def test_tensor_parallel_keeps_codes_for_backward(fmt):
    """Between the passes no rank holds a weight's values: what autograd keeps is decoded again."""

    def rank(_):
        with fsdp_models._SEEDING:
            torch.manual_seed(0)
            model = Mlp()
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(
            model, mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        )
        eco.quantize_(model, FORMATS[fmt][0], granularity=FORMATS[fmt][1])
        kept = []

        def pack(x):
            kept.append(x)
            return x

        x = torch.linspace(-1, 1, 32).view(2, 16).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = model(x)
        floats = [k for k in kept if isinstance(k, DTensor) and k.numel() == 16 * 32]
        assert floats
        assert all(isinstance(k.to_local(), eco.QuantizedTensor) for k in floats)
        out.sum().backward()
        values = [p.to_local().dequantize() for p in model.parameters()]
        first = torch.nn.functional.linear(x.detach(), values[0]).relu()
        grad = torch.ones(2, 16) @ values[1] * (first > 0)
        assert torch.allclose(model.layers[0].weight.grad.to_local(), grad.T @ x.detach())
        own = grad @ values[0]
        dist.all_reduce(own)
        assert torch.allclose(x.grad, own, atol=1e-6)

    run_ranks(2, rank)


def _set_grad(p, g):
    """Give a parameter its piece of a whole gradient."""
    if not isinstance(p, DTensor):
        p.grad = g.clone()
        return
    for axis in sorted(range(p.device_mesh.ndim), reverse=True):  # tensor parallel cuts first
        placement = p.placements[axis]
        if hasattr(placement, "dim"):
            parts = g.chunk(p.device_mesh.size(axis), placement.dim)
            g = parts[p.device_mesh.get_local_rank(axis)]
    p.grad = DTensor.from_local(
        g.contiguous(),
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=p.shape,
        stride=p.stride(),
    )


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "state_dtype"), [("fp8 row", "fp32"), ("int4 tensor", "8bit")])
def test_a_checkpoint_opens_on_another_number_of_ranks(fmt, state_dtype, tmp_path):
    """Field case E3: save at step 0 and 2 on 4 ranks, go on with 2 and 1, bit for bit."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def everything(model, optimizer):
        flat = get_optimizer_state_dict(model, optimizer, options=options)
        return {"model": eco.plain_state_dict(model.state_dict()), "optimizer": flat}

    def make(num_ranks):
        model = build(num_ranks, fmt)
        return model, eco.EcoAdamW(model.parameters(), lr=1e-2, state_dtype=state_dtype)

    def save(_):
        model, optimizer = make(4)
        dcp.save(everything(model, optimizer), checkpoint_id=tmp_path / "0")
        steps(model, optimizer, 2)
        dcp.save(everything(model, optimizer), checkpoint_id=tmp_path / "2")
        return steps(model, optimizer, 2, 2), whole(model.state_dict())

    def resume(num_ranks, step):
        def rank(_):
            model, optimizer = make(num_ranks)
            state = everything(model, optimizer)
            dcp.load(state, checkpoint_id=tmp_path / str(step))
            eco.load_plain_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
            losses = steps(model, optimizer, 4 - step, step)
            return losses[-2:], whole(model.state_dict())

        return run_ranks(num_ranks, rank)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = run_ranks(4, save)[0]
        for num_ranks, step in ((4, 0), (2, 2), (1, 2)):
            losses, state = resume(num_ranks, step)[0]
            assert losses == want[0]
            same(state, want[1])
    shutil.rmtree(tmp_path)
