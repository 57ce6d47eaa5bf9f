"""Every layout of the reference trainer gives the single process's loss within float noise."""

from pathlib import Path

import pytest

from thinwire.train.launch import launch

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
STEPS = 4
NOISE = 2e-5
BASE = {
    "steps": STEPS,
    "model": {"dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 64},
    "data": {"source": "synthetic", "seq_len_tokens": 32, "batch_seqs": 12},
    # Clipping is active in every step: a wrong global norm would show in the next loss.
    "optim": {"warmup_steps": 1, "lr": 1e-2, "max_norm": 0.5},
    "evaluation": {"num_seqs": 7},
}
MOE = {"num_experts": 4, "experts_per_token": 2}


def mesh(pp=1, dp_replicate=1, dp_shard=1, tp=1):
    return {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}


QUANTIZED = ("static", "virtual", "quantized")
TACO = {"codec": "hadamard", "group": 32}
SEQUENCE = {"sequence_parallel": True}
STATIC = {"weights": {"codec": "static", "bits": 8, "block_size": 32, "min_shard_numel": 64}}

# ranks -> name -> changes to BASE
CASES = {
    1: {
        "whole": {"mesh": mesh()},
        "accumulated": {"mesh": mesh(), "data": {"micro_batches": 3}},
        "odd": {"mesh": mesh(), "data": {"seq_len_tokens": 31}},
        "virtual taco": {
            "mesh": mesh(),
            "systems": {"tensor": {**TACO, "virtual_ranks": 2}},
        },
        "recomputed": {"mesh": mesh(), "compute": {"activation_checkpointing": True}},
        "experts": {"mesh": mesh(), "model": MOE},
        "tied": {"mesh": mesh(), "model": {"tie_embeddings": True}},
    },
    2: {
        "dp_shard": {"mesh": mesh(dp_shard=2)},
        "dp_replicate": {"mesh": mesh(dp_replicate=2)},
        "tp": {"mesh": mesh(tp=2)},
        "pp": {"mesh": mesh(pp=2), "data": {"micro_batches": 3}},
        "dp_shard accumulated": {"mesh": mesh(dp_shard=2), "data": {"micro_batches": 3}},
        "dp_shard recomputed": {
            "mesh": mesh(dp_shard=2),
            "compute": {"activation_checkpointing": True, "reshard_after_forward": 0},
        },
        "quantized tp": {"mesh": mesh(tp=2), "systems": {"tensor": TACO}},
        "tp sequence": {"mesh": mesh(tp=2), "compute": SEQUENCE},
        "tp sequence odd": {
            "mesh": mesh(tp=2),
            "compute": SEQUENCE,
            "data": {"seq_len_tokens": 31, "micro_batches": 2},
        },
        "tp sequence recomputed": {
            "mesh": mesh(tp=2),
            "compute": SEQUENCE | {"activation_checkpointing": True},
        },
        "tp recomputed": {"mesh": mesh(tp=2), "compute": {"activation_checkpointing": True}},
        "experts dp_shard": {"mesh": mesh(dp_shard=2), "model": MOE},
        "static dp_shard": {"mesh": mesh(dp_shard=2), "systems": STATIC},
        "tied dp_shard": {"mesh": mesh(dp_shard=2), "model": {"tie_embeddings": True}},
    },
    3: {
        "dp_shard": {"mesh": mesh(dp_shard=3)},
        "dp_replicate": {"mesh": mesh(dp_replicate=3)},
        "pp": {"mesh": mesh(pp=3), "data": {"micro_batches": 4}},
    },
    4: {
        "dp_shard": {"mesh": mesh(dp_shard=4)},
        "tp": {"mesh": mesh(tp=4)},
        "pp": {"mesh": mesh(pp=4), "data": {"micro_batches": 4}},
        "dp_replicate x dp_shard": {"mesh": mesh(dp_replicate=2, dp_shard=2)},
        "tp sequence": {"mesh": mesh(tp=4), "compute": SEQUENCE},
        "dp_replicate x tp sequence": {"mesh": mesh(dp_replicate=2, tp=2), "compute": SEQUENCE},
        "dp_shard x tp sequence": {"mesh": mesh(dp_shard=2, tp=2), "compute": SEQUENCE},
        "pp x tp sequence": {
            "mesh": mesh(pp=2, tp=2),
            "compute": SEQUENCE,
            "data": {"micro_batches": 2},
        },
        "dp_replicate x tp": {"mesh": mesh(dp_replicate=2, tp=2)},
        "dp_shard x tp": {"mesh": mesh(dp_shard=2, tp=2)},
        "pp x dp_replicate": {"mesh": mesh(pp=2, dp_replicate=2), "data": {"micro_batches": 2}},
        "pp x dp_shard": {"mesh": mesh(pp=2, dp_shard=2), "data": {"micro_batches": 3}},
        "static dp_replicate x dp_shard": {
            "mesh": mesh(dp_replicate=2, dp_shard=2),
            "systems": STATIC,
        },
        "static pp x dp_shard": {
            "mesh": mesh(pp=2, dp_shard=2),
            "data": {"micro_batches": 2},
            "systems": STATIC,
        },
        "pp x tp": {"mesh": mesh(pp=2, tp=2), "data": {"micro_batches": 2}},
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run all cases of a number of ranks in one launch, when first asked for."""
    found = {}

    def get(ranks):
        if ranks not in found:
            out = tmp_path_factory.mktemp(f"ranks{ranks}")
            configs = [
                merged(changes) | {"out": str(out / name)} for name, changes in CASES[ranks].items()
            ]
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend(str(HERE))
                patch.setenv("PYTHONPATH", str(HERE), prepend=":")
                answers = launch(ranks, "trainer_cases:losses", {"configs": configs})
            found[ranks] = dict(zip(CASES[ranks], answers[0], strict=True))
        return found[ranks]

    return get


def merged(changes):
    return {
        key: {**value, **changes.get(key, {})} if isinstance(value, dict) else value
        for key, value in {**{k: {} for k in changes}, **BASE}.items()
    }


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(r, name) for r, cases in CASES.items() for name in cases if not name.startswith(QUANTIZED)],
)
def test_losses_and_norms_equal_the_single_process(results, ranks, name):
    got = results(ranks)[name]
    assert "error" not in got, got
    twin = next((kind for kind in ("experts", "tied", "odd") if kind in name), "whole")
    check_steps(got, results(1)[twin], later=NOISE)


@pytest.mark.parametrize("name", [name for name in CASES[4] if name.startswith("static")])
def test_quantized_weights_depend_on_the_ends_of_shards_alone(results, name):
    got, want = results(4)[name], results(2)["static dp_shard"]
    assert "error" not in got, got
    # After an update, float noise moves a few weights over the border between two codes.
    check_steps(got, want, later=1e-3)


def test_virtual_tensor_ranks_equal_real_ones(results):
    # Sums in another order move a few values over the border between two codes.
    got, want = results(1)["virtual taco"], results(2)["quantized tp"]
    check_steps(got, want, later=1e-3)
    assert results(2)["quantized tp"]["ledger"]["tensor"]["compressed_ratio"] > 3
    whole = results(1)["whole"]
    assert got["steps"] != whole["steps"]


def check_steps(got, want, later):
    assert len(got["steps"]) == STEPS
    assert got["steps"][0] == pytest.approx(want["steps"][0], rel=NOISE)
    for got_step, want_step in zip(got["steps"], want["steps"], strict=True):
        assert got_step == pytest.approx(want_step, rel=later)
    assert got["val_loss"] == pytest.approx(want["val_loss"], rel=later)
    assert want["steps"][0][1] > BASE["optim"]["max_norm"]
    assert want["steps"][-1][0] < want["steps"][0][0]


MODEL, DATA = BASE["model"], BASE["data"]
ACTIVATION_BYTES = DATA["batch_seqs"] * DATA["seq_len_tokens"] * MODEL["dim"] * 4
# Attention and feed-forward each all-reduce once forward and once backward.
TENSOR_BYTES = 4 * MODEL["num_layers"] * ACTIVATION_BYTES
SCALARS_BYTES = 2 * 8

# ranks, name -> bytes that rank 0 sends in a step, from the formulas of the ledger
WIRE = {
    (2, "dp_replicate"): lambda params: {"gradients": 4 * params},
    (3, "dp_replicate"): lambda params: {"gradients": -(-4 * 4 * params // 3)},
    (2, "tp"): lambda params: {"tensor": TENSOR_BYTES},
    (4, "tp"): lambda params: {"tensor": TENSOR_BYTES * 3 // 2},
    (2, "pp"): lambda params: {"pipeline": ACTIVATION_BYTES},
    (4, "pp"): lambda params: {"pipeline": ACTIVATION_BYTES},
    (2, "dp_shard"): lambda params: {"weights": 2 * 2 * params, "gradients": 2 * params},
    (2, "dp_shard accumulated"): lambda params: {
        # Each micro-batch gathers twice, gradients are reduced once.
        "weights": 3 * 2 * 2 * params,
        "gradients": 2 * params,
    },
    (4, "pp x tp"): lambda params: {"tensor": TENSOR_BYTES // 2, "pipeline": ACTIVATION_BYTES},
}


@pytest.mark.parametrize(("ranks", "name"), WIRE)
def test_every_byte_of_a_step_is_booked(results, ranks, name):
    got = results(ranks)[name]
    scalars = -(-2 * SCALARS_BYTES * (ranks - 1) // ranks)
    assert got["wire"] == WIRE[ranks, name](got["params"]) | {"scalars": scalars}
