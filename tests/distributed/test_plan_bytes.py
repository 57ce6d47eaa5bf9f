"""The cost model's bytes are the ledger's, per link and kind of step, in real training steps."""

import math
from pathlib import Path

import pytest

from thinwire.plan.workload import Message
from thinwire.train.launch import launch
from thinwire.train.parse import from_dict, to_dict
from thinwire.train.recipes import recipe
from thinwire.train.workload import workload

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
BASE = {
    "model": {"dim": 64, "num_layers": 3, "hidden_dim": 96},
    "data": {"source": "synthetic", "seq_len_tokens": 32, "batch_seqs": 8},
    "steps": 4,
}
# Everything that follows the first, dense step is sparse.
SPARSE = {"systems": {"replicas": {"dense_steps": 0}}}
# Two inner steps, then an exchange.
ROUNDS = {"systems": {"outer": {"sync_every": 2, "check_every": 0}}}
MESH = {"mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 2}}
RECOMPUTED = {"compute": {"activation_checkpointing": True}}
MICRO = {"data": {"micro_batches": 2}}
GROUPS = {"systems": {"storage": {"fmt": "int8", "granularity": "group"}}}
NARROW = {"systems": {"storage": {"fmt": "fp8_e4m3"}, "weights": {"min_shard_numel": 64}}}
TWO_BY_TWO = {"mesh": {"dp_replicate": 2, "dp_shard": 2}}
STORED = [
    ("eco-fp8-sr", {}), ("eco-int4-sr", MICRO), ("eco-fp8-sr", GROUPS),
    ("eco-fp8-sr", {"mesh": {"dp_replicate": 2, "dp_shard": 1}}), ("static-4bit", NARROW),
    ("aquavit-keep-wire", NARROW), ("aquavit-grad4", NARROW),
]  # fmt: skip

# ranks -> (recipe, changes)
CASES = {
    2: [
        ("dense-fsdp", {}), ("dense-fsdp", MICRO),
        ("dense-fsdp", {"compute": {"reshard_after_forward": 0}}),
        ("static-6bit", {}), ("static-4bit", {"compute": {"dtype": "bfloat16"}}), ("aquavit", {}),
        ("aquavit-keep-wire", {}), ("aquavit-keep-wire", MICRO), ("aquavit-grad4", {}),
        ("zeropp", {}), ("dense-ddp", {}), ("scape-90", SPARSE), ("scape-99", SPARSE),
        ("random-mask", SPARSE), ("dense-tp", {}), ("taco", {}),
        ("taco", MICRO | RECOMPUTED), ("dense-tp-sp", {}), ("taco-sp", {}), ("dense-pp", {}),
        ("subspace-pp", {}), ("subspace-pp-int8", {}), ("diloco", ROUNDS), ("diloco-int8", ROUNDS),
        ("sparseloco", ROUNDS), *STORED,
    ],
    3: [
        ("hetero", ROUNDS), ("hetero-dense", ROUNDS), ("dense-fsdp", {}), ("aquavit", {}),
        ("scape-90", SPARSE), ("sparseloco", ROUNDS),
    ],
    4: [("hetero-uniform", ROUNDS), ("everything", {}),
        ("everything", {"systems": {"storage": {"fmt": "int4"}}}),
        ("everything-sites", ROUNDS), ("taco-sparseloco", ROUNDS), ("sparseloco-fsdp", ROUNDS),
        ("diloco", ROUNDS | TWO_BY_TWO), ("taco-aquavit", {}),
        ("taco", {"mesh": {"tp": 2, "dp_shard": 2}}), ("scape-99", SPARSE)],
}  # fmt: skip


def merged(a, b):
    out = dict(a)
    for key, value in b.items():
        out[key] = merged(out.get(key, {}), value) if isinstance(value, dict) else value
    return out


def by_kind(phase):
    """Return {link: (dense, wire)} of a phase, the most that a stage sends."""
    stages = {}
    for op in phase.ops:
        if isinstance(op.work, Message):
            link = stages.setdefault(op.stage, {}).setdefault(op.work.link, [0, 0])
            link[0] += op.work.dense_bytes
            link[1] += op.work.sent
    return stages


def matches(step, phase, num_ranks, unlike=False):
    sent = {link: tuple(v) for link, v in step.items() if any(v)}
    if phase.name == "dense step":
        sent.pop("masks", None)  # the last one sends the masks of the step to come
    # Masks that are broadcast one by one are booked as the mean over ranks.
    slack = {"masks": num_ranks}
    if unlike:
        # Votes of unlike replicas are modelled by the byte for none of the ranks.
        slack = {"scalars": 150, "outer": 200}
        sent = {link: v for link, v in sent.items() if link != "outer" or max(v) > 0}
    for stage in by_kind(phase).values():
        same = set(stage) == set(sent)
        if same and all(
            math.isclose(a, b, abs_tol=slack.get(link, 0))
            for link in stage
            for a, b in zip(stage[link], sent[link], strict=True)
        ):
            return True
    return False


@pytest.mark.parametrize("num_ranks", CASES)
def test_every_step_sends_what_the_model_says(num_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=":")
    base = merged(BASE, {"data": {"batch_seqs": 12 if num_ranks == 3 else 8}})
    configs = []
    for index, (name, changes) in enumerate(CASES[num_ranks]):
        values = merged(merged(base, changes), {"out": str(tmp_path / str(index))})
        configs.append(from_dict(values, recipe(name)))
    payload = {"configs": [to_dict(c) for c in configs], "threads": 1}
    ranks = launch(num_ranks, "trainer_cases:booked", payload)
    wrong = []
    for index, (name, config) in enumerate(zip(CASES[num_ranks], configs, strict=True)):
        phases = workload(config, num_ranks).phases
        for step, booked in enumerate(ranks[0][index]):
            unlike = bool(config.mesh.replicas)
            if not any(matches(booked, phase, num_ranks, unlike) for phase in phases):
                wrong.append(
                    f"{name} step {step}: {booked} is none of {list(map(by_kind, phases))}"
                )
    assert not wrong, "\n".join(wrong)
