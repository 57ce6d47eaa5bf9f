"""Every recipe that compresses FSDP2's links trains on two ranks and sends fewer bytes.

Two recipes once named a codec that the trainer refused to build, and no test ran them.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.train.combined import COMBINED
from thinwire.train.launch import launch
from thinwire.train.parse import to_dict
from thinwire.train.recipes import RECIPES, recipe

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
STEPS = 3


def compressed(name):
    systems = recipe(name).systems
    links = {systems.weights.codec, systems.gradients.codec}
    # Recipes that compress other links too need more ranks: they are in test_support.
    return links != {"dense"} and recipe(name).mesh.tp == 1 and name not in COMBINED


NAMES = ["dense-fsdp", *filter(compressed, RECIPES)]


def small(name, out):
    config = recipe(name)
    return replace(
        config,
        steps=STEPS,
        out=str(out / name),
        # Shards of 8192 elements: a whole block of the largest size.
        model=replace(config.model, dim=64, num_layers=2, num_heads=4, hidden_dim=256),
        data=replace(config.data, source="synthetic", seq_len_tokens=32, batch_seqs=4),
        evaluation=replace(config.evaluation, num_seqs=4),
        optim=replace(config.optim, warmup_steps=1),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("recipes")
    payload = {"configs": [to_dict(small(name, out)) for name in NAMES]}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", str(HERE), prepend=":")
        results = launch(2, "trainer_cases:losses", payload)[0]
    return dict(zip(NAMES, results, strict=True))


def test_all_recipes_are_here():
    assert {"aquavit", "zeropp", "sdp4bit", "bf16-fsdp"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES[1:])
def test_recipe_trains_and_sends_fewer_bytes(runs, name):
    dense, run = runs["dense-fsdp"], runs[name]
    assert "error" not in run, run
    first, last = run["steps"][0][0], run["steps"][-1][0]
    assert first == pytest.approx(dense["steps"][0][0], rel=0.02)
    assert last == pytest.approx(dense["steps"][-1][0], rel=0.05)
    for link in ("weights", "gradients"):
        codec = getattr(recipe(name).systems, link).codec
        booked = run["ledger"][link]
        if codec == "dense":
            assert booked["wire_bytes"] == booked["dense_bytes"]
        else:
            assert booked["wire_bytes"] < 0.6 * booked["dense_bytes"]
