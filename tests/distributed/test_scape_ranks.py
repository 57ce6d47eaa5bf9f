"""SCAPE over ranks as threads: equal to the simulator, every byte counted, errors on all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.scape_cases import (
    SIZES,
    all_equal,
    gradient,
    parameters,
    simulate,
    train_rank,
    weights_of,
)
from thinwire.comm import Ledger
from thinwire.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    NonFiniteError,
    WireError,
)
from thinwire.scape import Scape, TopkAdamW
from thinwire.scape.rules import TopkAdamw
from thinwire.scape.worker import Masking
from thinwire.schedules import Density
from thinwire.testing.ranks import run_ranks
from thinwire.testing.transport import record_transport

SETTINGS = {"dense_below": 0, "density": 0.05}


def run(rank, steps=20, sizes=SIZES, dtype=torch.float32, **settings):
    named = parameters(sizes, dtype)
    opt = Scape(named, lr=0.01, **(SETTINGS | settings))
    train_rank(rank, steps, opt, named)
    return named, opt


def weights(rank, **settings):
    named, opt = run(rank, **settings)
    opt.close()
    return weights_of(named)


RMS = {"max_norm": 1.0, "clip": "rms"}
RECONSTRUCTED = {"max_norm": 1.0, "clip": "reconstructed"}
RANDOM = Masking(source="random", run_key=3)
SAME = {
    "transfer": ({}, {}),
    "decay": ({"unmasked": "decay"}, {"unmasked": "decay"}),
    "lag 0": ({"lag": 0}, {"lag": 0}),
    "rows": ({"partition": "rows"}, {"partition": "rows"}),
    "bf16 values": ({"values_dtype": torch.bfloat16}, {"values_dtype": torch.bfloat16}),
    "bits": ({"mask_format": "bits"}, {}),
    "delta": ({"mask_format": "delta"}, {}),
    "ramp": ({"density": Density(0.05, 2, 4)}, {"density": Density(0.05, 2, 4)}),
    "clip local": ({"max_norm": 1.0}, {"max_norm": 1.0}),
    "clip rms": (RMS, RMS),
    "clip g^": (RECONSTRUCTED, RECONSTRUCTED),
    "random": ({"mask_source": "random", "run_key": 3}, {"masking": RANDOM}),
    "union": ({"mask_source": "union"}, {"masking": Masking(source="union")}),
    "offload residual": ({"offload": "residual"}, {}),
    "offload all": ({"offload": "all", "run_bytes": 4096}, {}),
    "small runs": ({"run_bytes": 1}, {}),
    "float64": ({"dtype": torch.float64}, {"dtype": torch.float64}),
}  # fmt: skip


CASES = [(name, 3) for name in SAME] + [("transfer", 2), ("bf16 values", 2), ("rows", 4)]


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_ranks_equal_the_simulator(name, num_ranks):
    ours, theirs = SAME[name]
    want, _ = simulate(12, num_ranks, **theirs)
    for got in run_ranks(num_ranks, lambda rank: weights(rank, steps=12, **ours)):
        assert all_equal(got, weights_of(want))


def test_topk_adamw_equals_the_simulator():
    want, _ = simulate(20, 3, rule=TopkAdamw())

    def fn(rank):
        named = parameters()
        opt = TopkAdamW(named, lr=0.01, **SETTINGS)
        train_rank(rank, 20, opt, named)
        return weights_of(named)

    for got in run_ranks(3, fn):
        assert all_equal(got, weights_of(want))


def test_torchs_own_sum_is_close_to_rank_order():
    want, _ = simulate(20, 3)
    for got in run_ranks(3, lambda rank: weights(rank, reduce="native")):
        for a, b in zip(got, weights_of(want), strict=True):
            assert (a - b).abs().max() < 1e-3  # a tie in a mask may break another way


@pytest.mark.parametrize("mask_format", ["auto", "delta"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ledger_equals_what_travelled(num_ranks, mask_format):
    """One value message and one mask exchange per step, padded or broadcast."""

    def fn(rank):
        ledger = Ledger()
        _, opt = run(rank, steps=6, ledger=ledger, mask_format=mask_format, check_every=0)
        opt.close()
        return ledger

    with record_transport() as sent:
        ledgers = run_ranks(num_ranks, fn)
    booked = sum(ledger[link].wire_bytes for ledger in ledgers for link in ("gradients", "masks"))
    assert abs(booked - sum(s.nbytes for s in sent.values())) <= 6 * num_ranks  # rounded up
    assert ledgers[0]["gradients"].calls == 6
    assert ledgers[0]["masks"].calls == (6 if mask_format == "auto" else 12)
    assert ledgers[0]["masks"].dense_bytes == 0
    assert "below dense" in ledgers[0].check()
    assert ledgers[0]["gradients"].exempt_bytes < ledgers[0]["gradients"].wire_bytes


def test_check_judges_sparse_steps_only():
    def fn(rank):
        ledger = Ledger()
        _, opt = run(rank, steps=2, ledger=ledger, density=Density(0.05, warmup_steps=10))
        with pytest.raises(ContractError):
            ledger.check()  # nothing sparse yet
        train_rank(rank, 20, opt, parameters(), start=2)
        return ledger["gradients"].compressed_ratio

    assert all(ratio > 15 for ratio in run_ranks(2, fn))


def test_exempt_tensors_are_listed():
    def fn(rank):
        ledger = Ledger()
        named = [*parameters((5000,)), ("b", nn.Parameter(torch.zeros(7)))]
        Scape(named, lr=0.01, ledger=ledger)
        return [(e.name, e.reason, e.nbytes) for e in ledger.exemptions]

    assert run_ranks(2, fn)[0] == [("b", "fewer than 2 dimensions", 28)]


def test_a_group_that_is_not_the_world():
    """Field case S1: sub-groups hung where code meant the world."""
    want, _ = simulate(8, 2)

    def fn(rank):
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = pairs[rank % 2]
        if rank % 2:
            return weights_of(parameters())  # outsiders take no part
        return weights_of(run(group.rank(), steps=8, group=group)[0])

    results = run_ranks(4, fn)
    for rank in (0, 2):
        assert all_equal(results[rank], weights_of(want))


def test_one_rank_needs_no_group():
    ledger = Ledger()
    named, opt = run(0, steps=10, ledger=ledger)
    want, _ = simulate(10, 1)
    assert all_equal(weights_of(named), weights_of(want))
    assert ledger.check() == "gradients: one rank, nothing to send"
    assert opt.exchange.num_ranks == 1


def test_an_empty_parameter():
    """Field case S2: an empty parameter poisoned all with 0/0."""

    def fn(rank):
        named = [*parameters((5000,)), ("none", nn.Parameter(torch.empty(0, 10)))]
        opt = Scape(named, lr=0.01)
        train_rank(rank, 4, opt, named)
        return all(bool(torch.isfinite(p).all()) for _, p in named)

    assert all(run_ranks(2, fn))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_nan_on_one_rank_stops_all_in_the_same_step(nonfinite):
    def fn(rank):
        named, opt = run(rank, steps=5, nonfinite=nonfinite)
        before = weights_of(named)
        for _, p in named:
            p.grad = torch.zeros_like(p)
        if rank == 1:
            named[2][1].grad[7] = float("nan")
        message = ""
        try:
            opt.step()
        except NonFiniteError as error:
            message = str(error)
        opt.zero_grad()
        same = all_equal(before, weights_of(named)) and opt.num_steps == 5
        train_rank(rank, 3, opt, named, start=5)
        return same, message, weights_of(named)

    results = run_ranks(3, fn)
    want, _ = simulate(8, 3)
    for rank, (same, message, after) in enumerate(results):
        assert same
        if nonfinite == "raise":
            assert ("here in w2" if rank == 1 else "on another rank") in message
        assert all_equal(after, weights_of(want))


DTYPES = [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize(("param_dtype", "values_dtype"), DTYPES)
def test_communication_dtype_differs_from_gradient_dtype(param_dtype, values_dtype):
    """Field case S4: bf16 gradients with fp32 moments crashed."""

    def fn(rank):
        named = [(n, nn.Parameter(p.detach().to(param_dtype))) for n, p in parameters()]
        opt = Scape(named, lr=0.01, values_dtype=values_dtype, **SETTINGS)
        train_rank(rank, 6, opt, named)
        run0 = opt.worker.runs[0]
        master = torch.cat([run0.masters[p] for p in run0.pieces])
        params = torch.cat([p.detach().view(-1) for _, p in named])
        return params, master, run0.state["exp_avg"].dtype

    for params, master, dtype in run_ranks(2, fn):
        assert dtype == torch.float32
        assert torch.equal(params, master.to(param_dtype))


@pytest.mark.parametrize("partition", ["tensor", "rows"])
def test_sharded_mode_equals_replicated(partition):
    def fn(rank, mode):
        named = [(n, nn.Parameter(p.detach().bfloat16())) for n, p in parameters()]
        ledger = Ledger()
        opt = Scape(named, lr=0.01, mode=mode, partition=partition, ledger=ledger, **SETTINGS)
        train_rank(rank, 10, opt, named)
        return weights_of(named), ledger["weights"], opt.memory()["master_bytes"]

    whole = run_ranks(3, lambda rank: fn(rank, "replicated"))
    parts = run_ranks(3, lambda rank: fn(rank, "sharded"))
    for a, b in zip(whole, parts, strict=True):
        assert all_equal(a[0], b[0])
    assert sum(p[2] for p in parts) == whole[0][2]  # each fp32 weight lies at its owner alone
    assert parts[0][1].wire_bytes == parts[0][1].dense_bytes > 0


@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("unmasked", ["transfer", "decay"])
def test_resume_is_bit_exact(at, unmasked):
    """Field case S5: residuals lost at restart."""
    density = Density(0.05, 1, 3)

    def fn(rank):
        named, opt = run(rank, steps=at, unmasked=unmasked, density=density)
        state, held = copy.deepcopy(opt.state_dict()), weights_of(named)
        train_rank(rank, 6, opt, named, start=at)
        again, other = run(rank, steps=2, unmasked=unmasked, density=density)
        with torch.no_grad():
            for (_, p), w in zip(again, held, strict=True):
                p.copy_(w)
        other.load_state_dict(state)
        train_rank(rank, 6, other, again, start=at)
        residual = torch.cat([r.flatten() for r in other.local_state()["residual"].values()])
        return all_equal(weights_of(named), weights_of(again)), residual

    results = run_ranks(3, fn)
    assert all(same for same, _ in results)
    assert not torch.equal(results[0][1], results[1][1])  # residuals are each rank's own


def test_another_number_of_workers_goes_on():
    def save(rank):
        named, opt = run(rank, steps=6)
        return copy.deepcopy(opt.state_dict()), weights_of(named)

    saved = run_ranks(4, save)
    parts = [state["scape"] for state, _ in saved]

    def resume(rank):
        named = parameters()
        opt = Scape(named, lr=0.01, **SETTINGS)
        with torch.no_grad():
            for (_, p), w in zip(named, saved[0][1], strict=True):
                p.copy_(w)
        shared = {k: v for k, v in saved[0][0].items() if k != "scape"}
        opt.load_state_dict(shared)
        with pytest.raises(CheckpointError, match="load_local_state"):
            opt.step()
        with pytest.raises(CheckpointError, match="needs the parts of all 4"):
            opt.load_local_state(parts[:1])
        opt.load_local_state(parts)
        residual = opt.worker.runs[0].state["residual"].clone()
        train_rank(rank, 4, opt, named, start=6)
        return residual, weights_of(named)

    old = torch.stack([torch.cat([r.flatten() for r in p["residual"].values()]) for p in parts])
    results = run_ranks(2, resume)
    new = torch.stack([residual for residual, _ in results])
    assert (old.mean(0) - new.mean(0)).abs().max() < 5e-7  # float32
    assert all_equal(results[0][1], results[1][1])


def test_foreign_states_are_refused():
    """Field case S9: moments came back in another dtype."""
    _, opt = run(0, steps=3)
    good = opt.state_dict()

    def refused(text, change):
        state = copy.deepcopy(good)
        change(state)
        with pytest.raises(CheckpointError, match=text):
            opt.load_state_dict(state)

    def cast(state):
        state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].bfloat16()

    refused("exp_avg of 'w0' was saved as torch.bfloat16", cast)
    refused("parameter groups of", lambda s: s["param_groups"][0]["params"].pop())
    refused("density", lambda s: s["scape"].update(density="Density(0.1)"))
    refused("residual of 'w1'", lambda s: s["scape"]["residual"].pop("w1"))
    refused("mask of 'w1'", lambda s: s["scape"]["mask"].pop("w1"))


def test_accumulation_sends_once_and_unused_gradients_survive():
    """Field case S6: a parameter unused in the last micro-step never synchronized."""

    def fn(rank):
        named = parameters((5000, 5000))
        opt = Scape(named, lr=0.01)
        for i, (_, p) in enumerate(named):
            p.grad = torch.full_like(p, 1.0 + i)
        named[0][1].grad += 1  # the second micro-step used the first parameter alone
        opt.step()
        return [opt.state[p]["exp_avg"].view(-1)[0].item() for _, p in named]

    assert run_ranks(2, fn)[0] == pytest.approx([0.2, 0.2])


def test_no_gradient_anywhere_is_a_zero_gradient():
    def fn(rank):
        named, opt = run(rank, steps=3, sizes=(5000,))
        before = named[0][1].detach().clone()
        opt.step()
        return opt.state[named[0][1]]["exp_avg"], before, named[0][1].detach()

    after, w, w_after = run_ranks(2, fn)[0]
    kept = after != 0
    assert kept.any()
    assert not torch.equal(w, w_after)  # the idle step of AdamS


@pytest.mark.parametrize("sizes", [(257 * 257,), (70_000, 33)])
def test_tensors_over_65536_elements(sizes):
    """Field case S8: 16-bit indices overflowed."""
    want, _ = simulate(3, 2, sizes=sizes, density=0.01)
    for got in run_ranks(2, lambda rank: weights(rank, steps=3, sizes=sizes, density=0.01)):
        assert all_equal(got, weights_of(want))


VIEWS = {"view", "slice", "select", "detach", "split", "split_with_sizes", "alias", "unbind"}


def test_calls_do_not_grow_with_the_number_of_tensors():
    """Field case S7: loops over tensors left the device idle."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += func.overloadpacket.__name__ not in VIEWS
            return func(*args, **(kwargs or {}))

    def calls(count):
        named = parameters((500,) * count)
        opt = Scape(named, lr=0.01, density=0.5, dense_below=0, check_every=0)
        train_rank(0, 2, opt, named)
        for i, (_, p) in enumerate(named):
            p.grad = torch.full_like(p, float(i))
        with Count() as counter:
            opt.step()
        return counter.calls

    few, many = calls(2), calls(12)
    assert few < 120
    assert (many - few) / 10 < 20  # each mask is packed, unpacked and compared on its own


def test_drift_is_found():
    def fn(rank):
        named, opt = run(rank, steps=3, check_every=1)
        if rank == 1:
            with torch.no_grad():
                named[1][1][3] += 1e-3
        with pytest.raises(ContractError, match=r"drifted by step 4: ranks \[1\]"):
            train_rank(rank, 1, opt, named, start=3)
        return True

    assert all(run_ranks(2, fn))


def test_other_weights_or_parameters_at_the_start_are_found():
    def fn(rank):
        with pytest.raises(ContractError, match="other weights"):
            Scape(parameters(seed=rank), lr=0.01, **SETTINGS)
        with pytest.raises(ContractError, match="other parameters"):
            Scape(parameters((5000, 4500 + rank)), lr=0.01)
        named = parameters(seed=rank)
        Scape(named, lr=0.01, initial="broadcast", **SETTINGS)
        return weights_of(named)

    results = run_ranks(2, fn)
    assert all_equal(*results)


REFUSED = [
    ({"unmasked": "keep"}, "unmasked"),
    ({"lag": 2}, "lag must be one of 0, 1"),
    ({"clip": "rms"}, "needs max_norm"),
    ({"clip": "global", "max_norm": 1.0}, "clip must be one of"),
    ({"overlap": True, "lag": 0}, "overlap=True"),
    ({"overlap": True, "max_norm": 1.0}, "overlap=True"),
    ({"density": 0.0}, "density"),
    ({"mask_format": "rle"}, "mask_format"),
    ({"values_dtype": torch.float16}, "values_dtype"),
    ({"dense": ["nope"]}, "names no parameter 'nope'"),
    ({"dense_below": 10**6}, "no parameter would be sparsified"),
    ({"eps": 0.0}, "eps must be positive"),
    ({"move_all": True}, "move_all"),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED)
def test_settings_that_cannot_work(settings, text):
    with pytest.raises(ConfigError, match=text):
        Scape(parameters(), **({"lr": 0.01, "dense_below": 0} | settings))


def test_groups_are_fixed_and_betas_warn():
    opt = Scape(parameters(), lr=0.01, dense_below=0)
    with pytest.raises(ConfigError, match="fixed"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.warns(UserWarning, match=r"3\.29"):
        Scape(parameters(), lr=0.01, dense_below=0, betas=(0.9, 0.999))
    with pytest.warns(UserWarning, match="rounds small increments"):
        Scape(parameters(), lr=0.01, dense_below=0, residual_dtype=torch.bfloat16)


def test_bf16_residual_runs_and_halves():
    def fn(rank):
        _, opt = run(rank, steps=5, residual_dtype=torch.bfloat16)
        return opt.memory()

    with pytest.warns(UserWarning, match="rounds"):
        memory = run_ranks(2, fn)[0]
    assert memory["residual_bytes"] * 2 == memory["state_bytes"]


def test_memory_of_each_kind():
    _, opt = run(0, steps=4, offload="residual")
    n, memory = sum(SIZES), opt.memory()
    assert memory["state_bytes"] == memory["residual_bytes"] == memory["host_bytes"] == 4 * n
    assert memory["mask_bytes"] == 8 * sum(max(1, round(0.05 * s)) for s in SIZES)
    assert memory["master_bytes"] == 0


def test_metrics_tell_form_bytes_and_waits():
    def fn(rank):
        return run(rank, steps=4)[1].metrics()

    for m in run_ranks(2, fn):
        assert m["density"] == 0.05
        assert m["sent_fraction"] == pytest.approx(0.05, abs=1e-3)
        assert m["mask_index12_tensors"] + m["mask_bits_tensors"] == len(SIZES)
        assert 0 <= m["mask_overlap"] <= 1
        for name in ("mask_wait_s", "mask_window_s", "value_wait_s", "scape_step_s"):
            assert m[name] >= 0


def test_ranks_out_of_step_are_found():
    def fn(rank):
        named, opt = run(rank, steps=3, check_every=0)
        opt.begin()
        opt.worker.step += rank
        train_rank(rank, 1, opt, named)
        with pytest.raises(WireError, match="ranks drifted"):
            opt.begin()
        return True

    assert all(run_ranks(2, fn))


def test_parameter_groups_keep_their_own_settings():
    """Two groups with other rates equal two optimizers on one group each."""

    def fn(rank):
        a, b = parameters((5000,), seed=1), parameters((4500,), seed=2)
        a, b = [("a", a[0][1])], [("b", b[0][1])]
        groups = [{"params": a, "lr": 0.1}, {"params": b, "betas": (0.8, 0.9)}]
        both = Scape(groups, lr=0.01)
        train_rank(rank, 5, both, [*a, *b])
        return weights_of([*a, *b])

    def apart(rank, which):
        named = parameters((5000,), seed=1) if which == 0 else parameters((4500,), seed=2)
        named = [("ab"[which], named[0][1])]
        settings = [{"lr": 0.1}, {"lr": 0.01, "betas": (0.8, 0.9)}][which]
        opt = Scape(named, **settings)
        for step in range(5):
            named[0][1].grad = gradient(step, rank, which, named[0][1])
            opt.step()
        return weights_of(named)

    together = fn(0)
    for which in (0, 1):
        assert torch.equal(together[which], apart(0, which)[0])
