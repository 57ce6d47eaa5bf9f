"""Methods together: each pair and triple trains beside its dense twin, or is refused with a reason.

How far a run may stray from its twin follows from its methods, not from what they gave:

* Rounding of relative error e (measured on normal values with the very codec) changes gradients
  and logits by that share. In t steps the loss then moves by at most e times what the twin learned,
  plus e times twice the size of the logits: their spread at the start is INIT_STD * sqrt(dim), and
  an Adam step adds at most lr per weight, lr * dim per logit of a normalized input.
* A method that leaves parts of the update out by design keeps a share f of it: the coordinates a
  boundary carries, the elements that are sent. What a share f of the gradient's energy achieves is,
  to first order, f of what all of it does. Ranks that train apart on half the batch follow a
  direction whose cosine with the whole batch's is at least sqrt(1/2): again half.

A run of rounding methods alone is compared with its dense twin. One with a method of the second
kind is compared with its dense twin by the share, and with the same run without rounding by e.
"""

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from thinwire import aquavit, cli, eco
from thinwire.codecs import Blockwise, Cast, Hadamard
from thinwire.eco.export import rounded
from thinwire.errors import ConfigError
from thinwire.testing.ranks import run_ranks
from thinwire.train import agreement, systems, tensor
from thinwire.train.axes import check_ranks
from thinwire.train.combined import COMBINED
from thinwire.train.loop import Trainer, train
from thinwire.train.model import INIT_STD
from thinwire.train.optim import lr_schedule
from thinwire.train.parse import from_dict
from thinwire.train.recipes import RECIPES, recipe
from thinwire.train.sources import load_corpus
from thinwire.train.support import METHODS, asked_for, exclusive, refusal
from thinwire.train.support_page import fewest_ranks, support_page

STEPS, DIM, BLOCK = 3, 32, 32
BASE = {
    "steps": STEPS,
    "model": {"dim": DIM, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 64},
    "data": {"source": "synthetic", "seq_len_tokens": 16, "batch_seqs": 8},
    "optim": {"warmup_steps": 1, "lr": 3e-3},
    "evaluation": {"num_seqs": 4, "boundaries": "full"},
}
# What a test asks for, where the method's defaults would say too little in four steps.
ASKS = {
    # About 6 bits from the first step on.
    "weights": {"weights": {"codec": "aquavit", "a": 3.0, "min_shard_numel": 64}},
    "gradients": {
        "gradients": {"codec": "int8", "block_size": BLOCK},
        "weights": {"min_shard_numel": 64},
    },
    "tensor": {"tensor": {"codec": "hadamard", "group": BLOCK}},
    "constrained": {"pipeline": {"mode": "constrained", "ratio": 2}},
    "lossy": {"pipeline": {"mode": "lossy", "ratio": 2}},
    "storage": {"storage": {"fmt": "fp8_e4m3"}},
    "sparse": {"replicas": {"optimizer": "scape", "density": 0.5}},
    "baseline": {"replicas": {"optimizer": "powersgd"}},
    "sparseloco": {
        "outer": {"method": "sparseloco", "sync_every": 2, "k": 2048, "small_dense": False}
    },
    "diloco": {"outer": {"method": "diloco", "sync_every": 2, "momentum": 0.0}},
}
# The share of an update that a method keeps by design.
APART = 0.5
SHARES = {
    "constrained": 1 / 2,
    "lossy": 1 / 2,
    "sparse": 0.5,
    "sparseloco": APART * 2048 / 4096,
    "diloco": APART,
}
LINKS = {
    "weights": "weights",
    "gradients": "gradients",
    "tensor": "tensor",
    "constrained": "pipeline",
    "lossy": "pipeline",
    "sparse": "gradients",
    "sparseloco": "outer",
    "diloco": "outer",
}
SETS = [keys for size in (1, 2, 3) for keys in combinations(METHODS, size) if not exclusive(keys)]
TOGETHER = [keys for keys in SETS if refusal(keys) is None]
# PowerSGD alone is in test_scape_trainer.
TRAINED = [keys for keys in TOGETHER if keys != ("baseline",)]
REFUSED = [keys for keys in SETS if refusal(keys) is not None]


def merge(values, changes):
    out = dict(values)
    for key, value in changes.items():
        inner = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if inner else value
    return out


def configured(keys, out="unused"):
    """Return the configuration that asks for the methods, and its ranks."""
    asks = {}
    for key in keys:
        asks = merge(asks, ASKS[key])
    sizes = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "tp"), 1)
    sizes |= {METHODS[key].axis: 2 for key in keys if METHODS[key].axis}
    values = merge(BASE, {"data": {"micro_batches": sizes["pp"]}})
    mesh, ranks = sizes, 1
    for size in sizes.values():
        ranks *= size
    if "sparseloco" in keys and {"constrained", "lossy"} & set(keys):
        mesh, ranks = {"replicas": "0,1:2 2,3:2"}, 4
        asks = merge(asks, {"pipeline": {"ratio": 1}})
    return from_dict(merge(values, {"mesh": mesh, "systems": asks, "out": str(out)})), ranks


@pytest.fixture(autouse=True, scope="module")
def one_corpus():
    """Make the synthetic text once, not once per rank."""
    with mock.patch.object(agreement, "load_corpus", cache(load_corpus)):
        yield


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Return a function that trains a set of methods, once, and gives the losses of its steps."""
    root = tmp_path_factory.mktemp("support")

    @cache
    def run(keys, optimizer="adamw"):
        config, ranks = configured(keys, root / ("+".join(keys) or "dense") / optimizer)
        if optimizer != "adamw":
            replicas = replace(config.systems.replicas, optimizer=optimizer)
            config = replace(config, systems=replace(config.systems, replicas=replicas))
        results = run_ranks(ranks, lambda _: train(config))
        lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines], results[0]

    return run


@cache
def rounding_error(key):
    """Return the relative error of a method's codec on normal values."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    if key == "storage":
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        eco.quantize_(model, "fp8_e4m3", filter=lambda *_: True)
        # Stochastic rounding has up to twice the squared error of rounding to nearest.
        return 2**0.5 * ((rounded(model[0].weight, x) - x).norm() / x.norm()).item()
    level = aquavit.Schedule(STEPS, a=3.0).level(0)
    codec = {
        "weights": Blockwise(bits=level.bits, block_size=level.block_size),
        "gradients": Blockwise(bits=8, block_size=BLOCK),
        "tensor": Hadamard(fmt="e4m3", group=BLOCK),
    }.get(key)
    if codec is None:  # coefficients in bfloat16; others send floats or leave out, not round
        return 2**-9 if key in ("constrained", "lossy") else 0.0
    flat = x.flatten()
    return ((codec.decode(codec.encode(flat), flat.numel(), flat.dtype) - flat).norm()
            / flat.norm()).item()  # fmt: skip


def bands(keys, learned):
    """Return how far rounding may move the loss of each step."""
    error = sum(rounding_error(key) for key in keys)
    config, _ = configured(keys)
    schedule, spread, found = lr_schedule(config), INIT_STD * DIM**0.5, []
    for step, gain in enumerate(learned):
        found.append(error * (2 * spread + gain) + 1e-5)
        spread += schedule(step) * DIM
    return found


@pytest.mark.parametrize("keys", TRAINED, ids="+".join)
def test_methods_that_go_together_train_like_their_twin(losses, keys):
    dense, _ = losses((), "adams" if "sparse" in keys else "adamw")
    got, run = losses(keys)
    learned = [dense[0] - loss for loss in dense]
    assert learned[-1] > 0.1
    kept = tuple(key for key in keys if key in SHARES)
    near = losses(kept)[0] if kept else dense
    for a, b, band in zip(got, near, bands(keys, learned), strict=True):
        assert abs(a - b) <= band
    share = 1.0
    for key in kept:
        share *= SHARES[key]
    assert got[0] - got[-1] >= share * learned[-1] - bands(keys, learned)[-1]
    for key in keys:  # the trainer has checked that what was to shrink did
        link = LINKS.get(key)
        assert link is None or any(ledger[link]["wire_bytes"] > 0 for ledger in run["ledger_ranks"]
                                   if link in ledger)  # fmt: skip


@pytest.mark.parametrize("keys", REFUSED, ids="+".join)
def test_others_are_refused_at_set_up_with_the_reason(keys):
    config, ranks = configured(keys)
    part, reason = refusal(keys)
    named = [METHODS[key].said(config) for key in part]
    with pytest.raises(ConfigError) as caught:
        check_ranks(config, ranks)
    message = str(caught.value)
    assert message.endswith(reason)
    assert all(name in message for name in named)
    assert "\n" not in message


def test_a_refusal_starts_no_rank(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.train.launch.launch", lambda *_: pytest.fail("ranks started"))
    words = "scape-90 --nproc 2 --systems.storage.fmt fp8_e4m3"
    assert cli.main(["train", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(
        "thinwire: systems.storage.fmt fp8_e4m3 and systems.replicas.optimizer scape do not go "
        "together: EcoAdamW"
    )


def test_every_method_is_in_a_recipe_and_every_combined_recipe_fits_four_ranks():
    asked = {name: asked_for(make()) for name, make in RECIPES.items()}
    assert {key for keys in asked.values() for key in keys} == set(METHODS)
    assert asked["everything"] == ["weights", "gradients", "tensor", "storage"]
    for name in COMBINED:
        ranks, sizes = fewest_ranks(recipe(name))
        assert ranks == (8 if name == "everything-8" else 4)
        for key in asked[name]:
            assert not METHODS[key].axis or sizes[METHODS[key].axis] > 1


def small(name, out, **more):
    """Return a combined recipe at the size of a test."""
    return from_dict(
        {
            "steps": 4,
            "out": str(out),
            "model": BASE["model"] | {"dim": 64, "hidden_dim": 128},
            "data": {"source": "synthetic", "seq_len_tokens": 16, "batch_seqs": 8},
            "optim": {"warmup_steps": 1},
            "evaluation": {"num_seqs": 4},
            "systems": {
                "weights": {"min_shard_numel": 64},
                "replicas": {"dense_steps": 0},
                "outer": {"sync_every": 3},
            },
            **more,
        },
        recipe(name),
    )


def step_losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("name", COMBINED)
def test_combined_recipes_train(name, tmp_path):
    config = small(name, tmp_path)
    ranks, _ = fewest_ranks(config)
    run = run_ranks(ranks, lambda _: train(config))[0]
    losses = step_losses(tmp_path)
    assert losses[-1] < losses[0]
    for key in asked_for(config):
        link = LINKS.get(key)
        # SCAPE's first step is dense.
        assert link is None or key == "sparse" or run["ledger"][link]["compressed_ratio"] > 1.5


@pytest.mark.parametrize("name", ["everything-sites", "everything-pp", "taco-sparseloco"])
def test_combined_recipes_resume_bit_for_bit(name, tmp_path):
    """Stopped within a round, with stored weights, or with output matrices cut by columns."""
    config, cut = small(name, tmp_path / "whole"), small(name, tmp_path / "cut", stop_after=2)
    run_ranks(4, lambda _: train(config))
    run_ranks(4, lambda _: train(cut))
    going_on = replace(cut, stop_after=0)
    run_ranks(4, lambda _: train(going_on, resume=tmp_path / "cut"))
    assert step_losses(tmp_path / "cut") == step_losses(tmp_path / "whole")


IDENTITIES = {
    "dp_shard x tp": {"mesh": {"dp_shard": 2, "tp": 2}},
    "pp x dp_shard": {"mesh": {"pp": 2, "dp_shard": 2}, "data": {"micro_batches": 2}},
    "dp_replicate x dp_shard": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
    "dp_replicate x tp": {"mesh": {"dp_replicate": 2, "dp_shard": 1, "tp": 2}},
}


def trained(values, ranks):
    """Return the losses of a few steps, without the check that links shrank."""

    def work(rank):
        trainer = Trainer.build(from_dict(values), torch.device("cpu"))
        return [trainer.train_step()["loss"] for _ in range(STEPS)]

    return run_ranks(ranks, work)[0]


@pytest.mark.parametrize("name", IDENTITIES)
def test_with_identity_codecs_all_at_once_equals_the_twin(name):
    """fp32 for every codec, all channels, all elements: what is left is the order of sums."""
    changes = IDENTITIES[name]
    mesh = changes["mesh"]
    asks = {}
    if mesh["dp_shard"] > 1:
        asks["weights"] = {"codec": "static", "min_shard_numel": 64}
        asks["gradients"] = {"codec": "int8"}
    if mesh.get("tp"):
        asks["tensor"] = {"codec": "hadamard"}
    if mesh.get("pp"):
        asks["pipeline"] = {"mode": "constrained", "rank": DIM, "wire": "fp32"}
    twin = {}
    if mesh.get("dp_replicate"):
        asks["replicas"] = {"optimizer": "scape", "density": 1.0}
        twin["replicas"] = {"optimizer": "adams"}
    # SCAPE bounds the norm of replicas' own gradients, not that of their mean: go without.
    base = merge(BASE, {"optim": {"max_norm": 0.0}})
    with ExitStack() as stack:
        exact = Cast("fp32")
        for module, function, value in (
            (systems, "weight_schedule", aquavit.Static(exact)),
            (systems, "gradient_codec", exact),
            (tensor, "tensor_codec", exact),
        ):
            stack.enter_context(mock.patch.object(module, function, lambda *_, v=value: v))
        got = trained(merge(base, changes | {"systems": asks}), 4)
    want = trained(merge(base, {"mesh": {"dp_shard": 1}, "systems": twin}), 1)
    assert got == pytest.approx(want, rel=2e-5)
    assert got[-1] < got[0] - 0.1


def test_the_page_is_what_the_code_says():
    """Write it anew with `thinwire recipes --support > docs/support.md`."""
    page = Path(__file__).parents[2] / "docs" / "support.md"
    assert page.read_text() == support_page()


def test_the_command_prints_the_page(capsys):
    assert cli.main(["recipes", "--support"]) == 0
    assert capsys.readouterr().out == support_page()
    assert cli.main(["recipes", "--suport"]) == 2
    assert "takes --support alone" in capsys.readouterr().err
