"""SCAPE over real processes: what threads cannot stand in for. One launch, many cases."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from tests.scape_cases import all_equal, gradient, parameters, simulate, train_rank, weights_of
from thinwire.comm import Ledger
from thinwire.errors import ConfigError, NonFiniteError
from thinwire.scape import Scape
from thinwire.scape.consistency import fingerprint
from thinwire.testing.processes import run_processes

pytestmark = pytest.mark.processes
STEPS = 60
LONG = 200
SETTINGS = {"dense_below": 0, "density": 0.05}
ARMS = {
    "transfer": {},
    "decay": {"unmasked": "decay"},
    "overlap": {"overlap": True, "run_bytes": 4200},
    "offload": {"offload": "all", "run_bytes": 4200},
    "native": {"reduce": "native"},
}


class Net(nn.Module):
    """Two layers in a chain, so that their gradients come one after the other."""

    def __init__(self, width=64):
        super().__init__()
        self.up = nn.Linear(8, width, bias=False)
        self.mid = nn.Linear(width, width)
        self.down = nn.Linear(width, 8, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.mid(F.gelu(self.up(x)))))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 8, generator=generator)
    return x, torch.roll(x, 1, dims=1)


def whole_of(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


def cloned(state):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def train_net(model, opt, steps, rank, micro=1):
    for step in range(steps):
        x, y = batch(step, rank)
        parts = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        for x_m, y_m in parts[:-1]:
            with opt.no_sync():
                (F.mse_loss(model(x_m), y_m) / micro).backward()
        (F.mse_loss(model(parts[-1][0]), parts[-1][1]) / micro).backward()
        opt.step()
        opt.zero_grad()


def quadratic(group, steps, **settings):
    """Return weights, ledger and whether all ranks of the group ended bit-equal."""
    named, ledger = parameters(), Ledger()
    opt = Scape(named, lr=0.01, ledger=ledger, group=group, **(SETTINGS | settings))
    if opt.overlap is not None:
        for step in range(steps):
            loss = torch.zeros(())
            for i, (_, p) in enumerate(named):
                loss = loss + (p * gradient(step, group.rank(), i, p)).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
    else:
        train_rank(group.rank(), steps, opt, named)
    opt.close()
    mine = fingerprint(weights_of(named))
    hashes = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(hashes, mine, group=group)
    calls = {link: ledger[link].calls for link in ("gradients", "masks")}
    return weights_of(named), calls, all(torch.equal(h, mine) for h in hashes)


def overlap_case(rank):
    """Launches leave from hooks, last run first; accumulation sends once; misuse raises."""
    out = {}
    for name, micro in (("whole", 1), ("accumulated", 2)):
        plain, early = net(), net()
        settings = {"density": 0.1, "dense_below": 100, "run_bytes": 3000}
        opt = Scape(plain.named_parameters(), lr=0.01, **settings)
        train_net(plain, opt, 8, rank, micro)
        fast = Scape(early.named_parameters(), lr=0.01, overlap=True, **settings)
        train_net(early, fast, 8, rank, micro)
        out[name] = all_equal(list(plain.parameters()), list(early.parameters()))
        launches = fast.overlap.launches
        out[f"{name} order"] = [i for i, *_ in launches] == sorted(
            (i for i, *_ in launches), reverse=True
        ) and all(from_hook for *_, from_hook in launches)
    x, y = batch(0, rank)
    F.mse_loss(early(x), y).backward()
    try:
        F.mse_loss(early(x), y).backward()
        out["twice raises"] = False
    except ConfigError as error:
        out["twice raises"] = "no_sync" in str(error)
    fast.step()
    fast.zero_grad()
    loss = F.mse_loss(early(x), y) * (float("nan") if rank == 1 else 1.0)
    loss.backward()
    before = weights_of(early.named_parameters())
    try:
        fast.step()
        out["nan raises"] = False
    except NonFiniteError:
        out["nan raises"] = all_equal(before, weights_of(early.named_parameters()))
    fast.zero_grad()
    # A parameter that only an earlier micro-step used is sent by the leftover launch.
    with fast.no_sync():
        early.mid.bias.sum().backward()
    early.up.weight.sum().backward()
    fast.step()
    out["unused at last is sent"] = bool(
        (fast.state[early.mid.bias]["exp_avg"] != 0).all()
    ) and not all(from_hook for *_, from_hook in fast.overlap.launches)
    fast.close()
    opt.close()
    return out


def sharded_case(rank):
    """FSDP2 over 2 inside 2 replicas: each replica's shards agree; DCP keeps the shared state."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    out = {}

    def build():
        model = net()
        for layer in (model.up, model.mid, model.down):
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        ledger = Ledger()
        opt = Scape(
            model.named_parameters(), lr=0.01, density=0.1, dense_below=100, ledger=ledger,
            group=mesh["replica"].get_group(), max_norm=0.05, check_every=5,
        )  # fmt: skip
        return model, opt, ledger

    model, opt, ledger = build()
    train_net(model, opt, 20, rank)
    out["check"] = "below dense" in ledger.check()
    full = [p.full_tensor() for p in model.parameters()]
    every = [None] * 4
    dist.all_gather_object(every, full)
    out["replicas equal"] = all(all_equal(every[0], e) for e in every)
    out["state is DTensor"] = isinstance(opt.state[model.up.weight]["exp_avg"], DTensor)
    x, y = batch(0, 99)
    out["learns"] = F.mse_loss(model(x), y).item() < 0.75 * F.mse_loss(net()(x), y).item()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    shared = cloned(get_optimizer_state_dict(model, opt, options=options))
    own, held = copy.deepcopy(opt.local_state()), cloned(model.state_dict())
    out["residual is not shared"] = not any("residual" in key for key in shared)
    train_net(model, opt, 3, rank)
    again, other, _ = build()
    again.load_state_dict(held)
    set_optimizer_state_dict(again, other, shared, options=options)
    other.load_local_state([own])
    train_net(again, other, 3, rank)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    out["resumes"] = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    return out


def tensor_parallel_case(rank):
    """Tensor parallel over 2 inside 2 replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    model = net()
    plan = {"up": ColwiseParallel(), "mid": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    opt = Scape(
        model.named_parameters(), lr=0.01, density=0.1, dense_below=100,
        group=mesh["replica"].get_group(), max_norm=0.5,
    )  # fmt: skip
    train_net(model, opt, 10, rank // 2)
    norm = opt.metrics()["scape_grad_norm"]
    whole = net()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        q.data.copy_(whole_of(p))
    train_step = batch(10, rank // 2)
    for m in (model, whole):
        F.mse_loss(m(train_step[0]), train_step[1]).backward()
    opt.step()
    norm = opt.metrics()["scape_grad_norm"]
    want = torch.stack([p.grad.norm() for p in whole.parameters()]).norm().item()
    every = [None] * 4
    dist.all_gather_object(every, [whole_of(p) for p in model.parameters()])
    return {
        "norm counts each element once": abs(norm - want) < 1e-5,
        "replicas equal": all(all_equal(every[0], e) for e in every),
    }


def cases(rank):
    groups = {n: dist.new_group(list(range(n))) for n in (2, 3)}
    world = dist.group.WORLD
    out = {name: quadratic(world, STEPS, **arm) for name, arm in ARMS.items()}
    for n, group in groups.items():
        out[n] = quadratic(group, LONG) if rank < n else None
    out[4] = quadratic(world, LONG)
    verdicts = {}
    for case in (overlap_case, sharded_case, tensor_parallel_case):
        verdicts |= {f"{case.__name__}: {k}": v for k, v in case(rank).items()}
    return out, verdicts


@pytest.fixture(scope="module")
def results():
    return run_processes(4, cases)


@pytest.mark.parametrize("name", ["transfer", "decay", "overlap", "offload"])
def test_processes_equal_the_simulator(results, name):
    want, _ = simulate(STEPS, 4, unmasked="decay" if name == "decay" else "transfer")
    for out, _ in results:
        weights, calls, agree = out[name]
        assert agree
        assert all_equal(weights, weights_of(want))
        runs = 4 if name == "overlap" else 1
        assert calls["masks"] == STEPS
        assert calls["gradients"] >= STEPS * runs if name == "overlap" else STEPS


def test_torchs_own_sum_stays_close(results):
    want, _ = simulate(STEPS, 4)
    for a, b in zip(results[0][0]["native"][0], weights_of(want), strict=True):
        assert (a - b).abs().median() < 1e-6


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replicas_are_bit_equal_over_hundreds_of_steps(results, num_ranks):
    want, _ = simulate(LONG, num_ranks)
    for out, _ in results[:num_ranks]:
        weights, _, agree = out[num_ranks]
        assert agree
        assert all_equal(weights, weights_of(want))


def test_overlap_sharding_and_tensor_parallel(results):
    for rank, (_, verdicts) in enumerate(results):
        failed = [name for name, verdict in verdicts.items() if verdict is not True]
        assert not failed, (rank, failed)
