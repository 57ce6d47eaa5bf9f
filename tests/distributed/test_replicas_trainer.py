"""Unlike replicas in the trainer: twins, bytes, evaluation, resume, refusals (field case H1)."""

import json
from pathlib import Path

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.pipeline import Basis
from thinwire.replicas import Layout, Simulation
from thinwire.sparseloco import Options
from thinwire.train.axes import check_ranks, parse_replicas
from thinwire.train.data import TrainBatches, held_out_batch
from thinwire.train.launch import launch
from thinwire.train.model import build
from thinwire.train.optim import adamw, lr_schedule
from thinwire.train.parse import from_dict, to_dict
from thinwire.train.passes import token_loss
from thinwire.train.sources import load_corpus

HERE = Path(__file__).parent
DIM, SEQS, T, M, H = 32, 8, 32, 2, 3
BASE = {
    "steps": 7,
    "model": {"dim": DIM, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 64},
    "data": {"source": "synthetic", "seq_len_tokens": T, "batch_seqs": SEQS, "micro_batches": M},
    "optim": {"warmup_steps": 1, "lr": 1e-2, "max_norm": 0.5},
}
SPACE = {"mode": "constrained"}
OUTER = {"method": "sparseloco", "sync_every": H, "k": 256, "small_dense": False}
ONE, TWO = {"ranks": [0]}, {"ranks": [1, 2], "stages": 2}


def mixed(tables, boundaries="full", outer=OUTER, **pipeline):
    systems = {"outer": outer}
    if any("rank_ratio" in table for table in tables):
        systems["pipeline"] = SPACE | pipeline
    return {
        "replicas": tables,
        "systems": systems,
        "evaluation": {"num_seqs": 6, "boundaries": boundaries},
    }


HETERO = [ONE, TWO | {"rank_ratio": 4}]
UNIFORM = [ONE | {"rank_ratio": 4}, TWO | {"rank_ratio": 4}]
CASES = {
    "hetero": mixed(HETERO),
    "projected": mixed(HETERO, "projected"),
    "lossy": mixed(HETERO, mode="lossy"),
    "local": mixed(HETERO, ids="local", wire="int8"),
    "constrained full": mixed(HETERO, constrain_full=True),
    "unprojected": mixed(HETERO, anchor="unprojected"),
    "uniform": mixed(UNIFORM, "projected"),
    "dense": mixed([ONE, TWO]),
    "full rank": mixed([ONE, TWO | {"rank_ratio": 1}]),
}
NOTHING_TO_COMPRESS = mixed(HETERO, outer=OUTER | {"small_dense": True})


def config(changes, out):
    return BASE | changes | {"out": str(out)}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def results(root):
    resumed = mixed(HETERO)
    cases = [{"config": config(resumed, root / "whole"), "resume": None}]
    for stop in (3, 4):  # between rounds, and in the middle of one
        out = root / f"stop{stop}"
        cases.append({"config": config(resumed, out) | {"stop_after": stop}, "resume": None})
        cases.append({"config": config(resumed, out), "resume": str(out)})
    parts = {
        "losses": {"configs": [config(changes, root / name) for name, changes in CASES.items()]},
        "resumed": {"cases": cases},
        "poisoned_stage": {"config": config(mixed(HETERO), root / "poisoned"), "rank": 1},
        "refused": {"config": config(NOTHING_TO_COMPRESS, root / "refused")},
    }
    twin = {
        "mesh": {"dp_replicate": 2, "dp_shard": 1},
        "systems": {"outer": OUTER},
        "evaluation": {"num_seqs": 6},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=":")
        ranks = launch(3, "trainer_cases:several", {"parts": parts})
        two = launch(2, "trainer_cases:losses", {"configs": [config(twin, root / "twin")]})[0]
    found = dict(zip(CASES, ranks[0]["losses"], strict=True))
    return (
        found
        | {"twin": two[0], "refused": [rank["refused"] for rank in ranks]}
        | {"poisoned": [rank["poisoned_stage"] for rank in ranks]}
    )


def metrics(out):
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "step_s"} for line in lines]


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_one_replica_of_one_rank_and_one_of_two_train(results, root, name):
    got = results[name]
    assert "error" not in got, got
    losses = [step[0] for step in got["steps"]]
    assert min(losses[4:]) < losses[0]
    rounds = [line["outer"] for line in metrics(root / name) if "outer" in line]
    assert [r["committed"] for r in rounds] == [True, True, True]
    assert all(r["accepted"] == [0, 1] for r in rounds)


@pytest.mark.processes
def test_without_compression_a_cut_replica_equals_a_whole_one(results):
    """Same messages, cut into partitions: only the order of float sums differs."""
    for got, want in zip(results["dense"]["steps"], results["twin"]["steps"], strict=True):
        assert got == pytest.approx(want, rel=1e-3)
    assert results["dense"]["val_loss"] == pytest.approx(results["twin"]["val_loss"], rel=1e-3)


@pytest.mark.processes
def test_compression_changes_the_run_and_full_rank_hardly(results):
    first = results["dense"]["steps"][1][0]
    assert results["full rank"]["steps"][1][0] == pytest.approx(first, rel=2e-3)
    others = {results[name]["steps"][4][0] for name in CASES}
    assert len(others) == len(CASES) - 1  # projected is hetero, evaluated otherwise


@pytest.mark.processes
@pytest.mark.parametrize("name", ["hetero", "lossy", "constrained full", "unprojected", "uniform"])
def test_virtual_replicas_equal_real_ones(results, name):
    """Losses of every step and of the shared weights, with a replica in two processes or in one."""
    got, held_out = simulated(from_dict(BASE | CASES[name]), CASES[name]["evaluation"])
    want = results[name]
    assert got == pytest.approx([step[0] for step in want["steps"]], rel=2e-4)
    assert held_out == pytest.approx(want["val_loss"], rel=2e-4)


def simulated(config, evaluation):
    """Return the mean loss of each step, and the held-out loss."""
    layout = Layout.of(
        parse_replicas(config.mesh.replicas),
        mode=config.systems.pipeline.mode,
        constrain_full=config.systems.pipeline.constrain_full,
        anchor=config.systems.pipeline.anchor,
    )
    simulation = Simulation(
        layout,
        lambda stage, stages: build(config.model, T, config.seed, stage=stage, num_stages=stages),
        lambda params: adamw(config.optim, torch.nn.ParameterList(params.values())),
        Basis(DIM, DIM // 4, config.seed),
        options=Options(k=256, small_dense=False),
    )
    corpus = load_corpus("synthetic")
    batches, schedule = TrainBatches(corpus, T, SEQS, config.seed), lr_schedule(config)
    losses = []
    for step in range(config.steps):
        mean = 0.0
        for index, replica in enumerate(simulation.replicas):
            x, y = batches.share(index, len(simulation.replicas))
            for x_part, y_part in zip(x.chunk(M), y.chunk(M), strict=True):
                loss = token_loss(replica.forward(x_part), y_part) / M
                loss.backward()
                mean += loss.item() / len(simulation.replicas)
            replica.project_gradients()
            torch.nn.utils.clip_grad_norm_(replica.params.values(), config.optim.max_norm)
            for group in replica.optimizer.param_groups:
                group["lr"] = schedule(step)
            replica.optimizer.step()
            replica.optimizer.zero_grad()
            replica.tokens += x.numel()
        batches.advance()
        losses.append(mean)
        if (step + 1) % H == 0 or step + 1 == config.steps:
            simulation.end_round()
    x, y, _ = held_out_batch(corpus, T, evaluation["num_seqs"], 0, 1)
    return losses, simulation.shared_loss(
        lambda out: token_loss(out, y), x, evaluation["boundaries"]
    )


@pytest.mark.processes
def test_figures_of_every_replica_and_stage(root, results):
    last = metrics(root / "hetero")[-1]
    places = [(f["replica"], f["stage"], f["role"]) for f in last["replicas"]]
    assert places == [(0, 0, "full"), (1, 0, "compressed"), (1, 1, "compressed")]
    assert all(f["in_mean"] and f["residual_norm"] > 0 for f in last["replicas"])
    tokens = {str(r): SEQS // 2 * T for r in range(2)}
    assert last["outer"]["tokens"] == tokens  # one step since the second round
    assert all(line["boundary_off"] < 1e-3 for line in metrics(root / "hetero"))
    assert max(line["boundary_off"] for line in metrics(root / "lossy")) > 1e-2


@pytest.mark.processes
def test_bytes_of_the_boundary_and_of_rounds(root, results):
    run = json.loads((root / "hetero" / "run.json").read_text())
    ledgers = run["ledger_ranks"]
    tokens = SEQS // 2 * T
    rank = DIM // 4
    steps = BASE["steps"]
    assert "pipeline" not in ledgers[0]
    compressed = [ledgers[r]["pipeline"]["wire_bytes"] - ledgers[r]["pipeline"]["exempt_bytes"]
                  for r in (1, 2)]  # fmt: skip
    assert compressed == [
        steps * (tokens * (2 * rank + 2) + 16 * M),
        steps * tokens * 2 * rank,
    ]
    reasons = {e["reason"] for e in run["exemptions"]}
    assert reasons == {
        "evaluation without boundaries",
        "embedding rows, sent to the stages at set-up",
    }
    assert all(ledger["outer"]["compressed_ratio"] > 5 for ledger in ledgers)


@pytest.mark.processes
def test_evaluation_modes_are_recorded(root, results):
    assert results["hetero"]["steps"] == results["projected"]["steps"]
    assert results["hetero"]["val_loss"] != results["projected"]["val_loss"]
    for name in CASES:
        recorded = json.loads((root / name / "run.json").read_text())["result"]["val_boundaries"]
        assert recorded == CASES[name]["evaluation"]["boundaries"]


@pytest.mark.processes
@pytest.mark.parametrize("stop", [3, 4])
def test_resume_equals_the_uninterrupted_run(root, results, stop):
    assert metrics(root / f"stop{stop}") == metrics(root / "whole")
    runs = [
        json.loads((root / n / "run.json").read_text())["result"] for n in ("whole", f"stop{stop}")
    ]
    assert runs[0]["val_loss"] == runs[1]["val_loss"]


@pytest.mark.processes
def test_a_stage_with_nan_costs_its_replica_one_round(root, results):
    """Field case H8: the rounds before and after count both replicas, training goes on."""
    assert all(answer["finite"] for answer in results["poisoned"])
    rounds = [line["outer"] for line in metrics(root / "poisoned") if "outer" in line]
    assert [r["accepted"] for r in rounds] == [[0, 1], [0], [0, 1]]


@pytest.mark.processes
def test_a_partition_without_a_compressible_tensor_is_refused_by_all_ranks(results):
    """The small blocks of stage 0 alone: rank 2, which doesn't hold them, must not wait."""
    assert all("tensors can be compressed" in error for error in results["refused"])


def test_tables_and_text_say_the_same():
    cfg = from_dict(BASE | mixed(HETERO))
    assert cfg.mesh.replicas == "0 1,2:4"
    assert from_dict(to_dict(cfg)) == cfg
    assert parse_replicas(cfg.mesh.replicas) == [
        {"ranks": [0]},
        {"ranks": [1, 2], "rank_ratio": 4},
    ]
    assert check_ranks(cfg, 3)["pp"] == 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"replicas": [ONE, TWO | {"ratio": 2}]}, r"unknown setting 'replicas\[1\].ratio'"),
        ({"replicas": [ONE | {"stages": 2}]}, "one rank per stage"),
        ({"replicas": [{"rank_ratio": 2}]}, "needs a list of ranks"),
        ({"mesh": {"replicas": "0 1-2"}}, "'1-2' is no list of ranks"),
        ({"mesh": {"replicas": "0 1"}}, "names 2 ranks, but 3 run"),
        ({"systems": {}}, "method sparseloco"),
        ({"systems": {"outer": OUTER}}, "mode constrained or lossy"),
        ({"replicas": [ONE, TWO]}, "names no compressed replica"),
        ({"compute": {"dtype": "bfloat16"}}, "float32"),
        ({"evaluation": {"boundaries": "boundaries"}}, "no boundaries to evaluate"),
        ({"systems": {"outer": OUTER, "pipeline": SPACE | {"rank": 4}}}, "give ratios there"),
        ({"data": BASE["data"] | {"batch_seqs": 6}}, "must be a multiple"),
    ],
)
def test_configurations_that_cannot_run(changes, match):
    values = BASE | mixed(HETERO) | changes
    if "mesh" in changes:
        del values["replicas"]
    with pytest.raises(ConfigError, match=match):
        check_ranks(from_dict(values), 3)
