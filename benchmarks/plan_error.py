"""How far are the plan's step times off? Train arms over shaped links and compare.

One launch per (ranks, rate), each resumable: all ranks first probe their messages at that rate, as
`thinwire probe` does, then `thinwire lab`'s own rounds train every model size and arm. The launch
without a limit calibrates: codec speeds, and each dense run's step less its messages, which is the
computation; other launches scale it by what the model alone takes in them, since shared cores are
not always equally fast. Everything else is held out: all that was measured at a limited rate, and
the compressed arms of the launch without one.

Predictions are made twice: with the messages probed at the very rate ("probed"), and with messages
interpolated, linearly in 1/rate, from the probes at the other rates ("interpolated"). Either way
the model knows the burst that the lab's token bucket lets pass after a pause (`burst_nbytes`).

    python benchmarks/plan_error.py run --minutes 25 --out runs/plan-error     # again to go on
    python benchmarks/plan_error.py show --out runs/plan-error --json result.json
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire import plan
from thinwire.codecs import Codec
from thinwire.lab.arms import arm_config, parse_arm, parse_settings
from thinwire.lab.links import INTERFACE, burst_nbytes, parse_rate, shaped_links
from thinwire.lab.rounds import measure as train_rounds
from thinwire.plan import CodecSpeed, Compute, Group, Links, MeasuredCosts, Point, Speed, predict
from thinwire.plan.predict import PAYS
from thinwire.plan.workload import DENSE_STEP, Workload
from thinwire.train.launch import Place, launch
from thinwire.train.mesh import make_layout
from thinwire.train.metrics import versions
from thinwire.train.parse import from_dict
from thinwire.train.probing import recipe_work
from thinwire.train.workload import workload

HERE = Path(__file__).resolve().parent
WARMUP, ROUNDS, STEPS, ALONE_STEPS = 2, 2, 3, 7
BATCH = "data.seq_len_tokens=32", "data.batch_seqs=12", "compute.threads=1"
SIZES = {
    "0.3M": ("model.dim=96", "model.num_layers=2", "model.hidden_dim=288"),
    "0.9M": ("model.dim=192", "model.num_layers=2", "model.hidden_dim=432"),
    "4M": ("model.dim=288", "model.num_layers=4", "model.hidden_dim=864"),
}
HEADS = "model.num_heads=12", "model.num_kv_heads=12"
RATES = {
    "none": ("0.3M", "0.9M", "4M"),
    "500mbit": ("0.9M", "4M"),
    "100mbit": ("0.3M", "0.9M"),
    "2gbit": ("0.9M", "4M"),
    "20mbit": ("0.3M",),
    "5gbit": ("0.9M", "4M"),
}
RANKS = (2, 4, 3)
# Compressed arm -> its dense twin; the first arms of a launch are the twins.
SPARSE = "systems.replicas.dense_steps=0"
ARMS = {
    "static-6bit": "dense-fsdp",
    "static-4bit": "dense-fsdp",
    "zeropp": "dense-fsdp",
    "eco-fp8-sr": "dense-fsdp",
    f"scape-99:{SPARSE}": "dense-adams",
    "taco": "dense-tp",
}
TWINS = tuple(dict.fromkeys(ARMS.values()))
# Slow links need the time to reach the sizes that training sends.
PROBE_S = {"none": 20.0, "20mbit": 20.0, "100mbit": 15.0}
COLLECTIVES = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"


@cache
def made_of(size: str, name: str, num_ranks: int) -> Workload:
    return without_dense_steps(workload(from_dict(config_of(size, name)), num_ranks))


@cache
def config_of(size: str, name: str) -> dict:
    settings = parse_settings([*SIZES[size], *BATCH, *HEADS])
    steps = WARMUP + ROUNDS * STEPS
    words = ["--data.source", "synthetic", "--steps", str(steps)]
    return arm_config(parse_arm(name, settings), words)


def codecs_of(num_ranks: int) -> list[Codec]:
    found = [
        codec
        for size in SIZES
        for name in ARMS
        for codec in workload(from_dict(config_of(size, name)), num_ranks).codecs()
    ]
    return list(dict.fromkeys(found))


# In the ranks


def measure(payload: dict) -> dict:
    """Probe this link (and codecs, if asked) and the models, then train; runs in every rank."""
    codecs = codecs_of(payload["num_ranks"]) if payload["calibrate"] else []
    seconds = payload["probe_s"]
    links = plan.probe(codecs=codecs, seconds=seconds, max_nbytes=2**33, collectives=COLLECTIVES)
    before = {size: model_s(size) for size in payload["sizes"]}
    rounds = train_rounds(payload)
    alone = {size: (seconds + model_s(size)) / 2 for size, seconds in before.items()}
    return {"links": links.to_dict(), "alone": alone, "rounds": rounds}


def model_s(size: str) -> float:
    """Return the seconds that a step of the model takes without messages, of the slowest rank."""
    config = from_dict(config_of(size, "dense-fsdp"))
    work = recipe_work(config, make_layout(config, torch.device("cpu")))
    work.step()
    samples = []
    for _ in range(ALONE_STEPS):
        dist.barrier()
        start = time.perf_counter()
        work.step()
        samples.append(time.perf_counter() - start)
    numbers = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return statistics.median(numbers.tolist())


# The launches


def run_launch(num_ranks: int, rate: str) -> dict:
    cases = [(size, name) for size in RATES[rate] for name in (*TWINS, *ARMS)]
    payload = {
        "configs": [config_of(*case) for case in cases],
        "interface": INTERFACE,
        "warmup": WARMUP,
        "rounds": ROUNDS,
        "steps": STEPS,
        "pad_s": 0.0,
        "threads": 1,
        "num_ranks": num_ranks,
        "sizes": RATES[rate],
        "calibrate": rate == "none",
        "probe_s": PROBE_S.get(rate, 10.0),
    }
    with shaped_links([parse_rate(rate)] * num_ranks) as links:
        places = [Place(tuple(links.prefix(r)), links.environment) for r in range(num_ranks)]
        ranks = launch(num_ranks, "plan_error:measure", payload, places)
    steps = {}
    for index, (size, name) in enumerate(cases):
        rounds = [[r["step_s"] for r in rank["rounds"][index]] for rank in ranks]
        slowest = [
            statistics.median(max(step) for step in zip(*of_ranks, strict=True))
            for of_ranks in zip(*rounds, strict=True)
        ]
        steps[f"{size} {name}"] = {"step_s": statistics.mean(slowest), "rounds_s": slowest}
    return {
        "num_ranks": num_ranks,
        "rate": rate,
        "links": ranks[0]["links"],
        "alone": ranks[0]["alone"],
        "steps": steps,
        "versions": versions(),
    }


def run(given: argparse.Namespace) -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    given.out.mkdir(parents=True, exist_ok=True)
    until, longest = time.monotonic() + 60 * given.minutes, 30.0
    wanted = [(r, rate) for rate in RATES for r in RANKS if r in given.ranks]
    wanted = [(r, rate) for r, rate in wanted if rate == "none" or rate in given.rates]
    for num_ranks, rate in wanted:
        file = given.out / f"{num_ranks}-{rate}.json"
        if file.exists():
            continue
        left = until - time.monotonic()
        if left < 1.2 * longest:
            print(f"{left:.0f} s are left: run again to go on")
            return 1
        start = time.monotonic()
        result = run_launch(num_ranks, rate)
        longest = max(longest, time.monotonic() - start)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.rename(file)
        print(f"{num_ranks} ranks, {rate}: {time.monotonic() - start:.0f} s", flush=True)
    print("all launches are there")
    return 0


# Predictions


def read(folder: Path) -> dict:
    files = sorted(folder.glob("*-*.json"))
    found = [json.loads(file.read_text()) for file in files]
    return {(one["num_ranks"], one["rate"]): one for one in found}


def interpolated(by_rate: dict, rate: str) -> Group:
    """Return a group's speeds at a rate from the probes at the nearest other rates."""
    inverse = {r: 1 / parse_rate(r) if r != "none" else 0.0 for r in by_rate}
    at = 1 / parse_rate(rate)
    others = sorted((r for r in by_rate if r != rate), key=lambda r: inverse[r])
    above = [r for r in others if inverse[r] > at]
    # The next slower and the next faster link; beyond the slowest, the two slowest.
    pair = (others[others.index(above[0]) - 1], above[0]) if above else tuple(others[-2:])
    low, high = (by_rate[r] for r in pair)
    share = (at - inverse[pair[0]]) / (inverse[pair[1]] - inverse[pair[0]])
    speeds = {}
    for name in sorted(high.collectives.keys() & low.collectives.keys()):
        slow, fast = high.collectives[name], low.collectives[name]
        sizes = sorted({p.nbytes for p in (*slow.points, *fast.points)})
        mixed = [(n, (1 - share) * fast.seconds(n) + share * slow.seconds(n)) for n in sizes]
        points = [Point(nbytes=n, median_s=max(s, 1e-6)) for n, s in mixed]
        speeds[name] = Speed.fit(points)
    return replace(high, collectives=speeds)


def mesh_links(group: Group, codecs: dict[str, CodecSpeed], sizes: dict) -> Links:
    """Return the probe of all ranks as that of the one axis that a mesh has."""
    (axis,) = [axis for axis, size in sizes.items() if size > 1]
    return Links(
        world_size=group.size,
        mesh=dict(sizes),
        groups={axis: group},
        codecs=codecs,
        compute=Compute(recipe="dense twin", step_s=1.0),
    )


def without_dense_steps(made: Workload) -> Workload:
    """Return the steps that are measured: warm-up holds the dense first one."""
    phases = [p for p in made.phases if DENSE_STEP not in p.name]
    total = sum(p.share for p in phases)
    return replace(made, phases=tuple(replace(p, share=p.share / total) for p in phases))


def predicted_s(
    made: Workload, links: Links, step_s: float, rate: str = "none", free: Links | None = None
):
    speed = parse_rate(rate)
    burst_s = 8 * burst_nbytes(speed) / speed if speed else 0.0
    return predict(made, MeasuredCosts(links, made.mesh, step_s, burst_s, free))


def rows_of(launches: dict, kind: str) -> list[dict]:
    rows = []
    for num_ranks in sorted({ranks for ranks, _ in launches}):
        if (num_ranks, "none") not in launches:
            continue
        by_rate = {
            rate: Links.from_dict(one["links"]).group("world")
            for (ranks, rate), one in launches.items()
            if ranks == num_ranks
        }
        free = launches[num_ranks, "none"]
        codecs = dict(Links.from_dict(free["links"]).codecs)
        for rate in by_rate:
            if kind == "interpolated" and (rate == "none" or len(by_rate) < 3):
                continue
            group = by_rate[rate] if kind == "probed" else interpolated(by_rate, rate)
            launch = launches[num_ranks, rate]
            pace = {size: launch["alone"][size] / free["alone"][size] for size in RATES[rate]}
            case = Case(num_ranks, rate, group, by_rate["none"], codecs, free["steps"], pace)
            rows += case.rows(launch["steps"])
    return rows


class Case:
    """All sizes and arms of one launch.

    `pace` is, by size, what the model takes alone over the same in the launch without a limit.
    """

    def __init__(self, num_ranks, rate, group, free_group, codecs, free_steps, pace) -> None:
        self.num_ranks, self.rate, self.group, self.pace = num_ranks, rate, group, pace
        self.free_group, self.codecs, self.free_steps = free_group, codecs, free_steps

    def made(self, size: str, name: str) -> Workload:
        return made_of(size, name, self.num_ranks)

    def compute_s(self, size: str, twin: str) -> float:
        """Return the twin's free step less its messages on the free link."""
        made = self.made(size, twin)
        links = mesh_links(self.free_group, self.codecs, made.mesh)
        whole = self.free_steps[f"{size} {twin}"]["step_s"]
        return max(whole - predicted_s(made, links, whole).waiting_s, 0.2 * whole)

    def predict(self, size: str, name: str):
        made = self.made(size, name)
        links, free = (
            mesh_links(group, self.codecs, made.mesh) for group in (self.group, self.free_group)
        )
        step_s = self.pace[size] * self.compute_s(size, ARMS.get(name, name))
        return predicted_s(made, links, step_s, self.rate, free)

    def rows(self, steps: dict) -> list[dict]:
        rows = []
        for key, measured in steps.items():
            size, name = key.split(" ", 1)
            if self.rate == "none" and name in TWINS:
                continue  # calibrated with
            found = self.predict(size, name)
            row = {
                "ranks": self.num_ranks, "rate": self.rate, "size": size, "arm": name,
                "measured_s": measured["step_s"], "predicted_s": found.step_s,
                "error": found.step_s / measured["step_s"] - 1,
                "compute_s": found.compute_s, "coding_s": found.coding_s,
                "waiting_s": found.waiting_s,
                "rounds_spread": max(measured["rounds_s"]) / min(measured["rounds_s"]) - 1,
            }  # fmt: skip
            if name in ARMS:
                twin = ARMS[name]
                row["speedup"] = steps[f"{size} {twin}"]["step_s"] / measured["step_s"]
                row["predicted_speedup"] = self.predict(size, twin).step_s / found.step_s
                row["right"] = (row["speedup"] > PAYS) == (row["predicted_speedup"] > PAYS)
            rows.append(row)
        return rows


def choices(rows: list[dict], margin: float = 0.02) -> list[dict]:
    """Return what `compress = "auto"` would choose in each case, and what that costs.

    Per link, rate, model and dense twin: by predictions alone ("predicted"), and with real steps of
    the arms that promise most, as `train.trial.try_arms` takes them ("tried"). `over` is the chosen
    arm's measured step over the best's, less 1.
    """
    cases: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        twin = ARMS.get(row["arm"], row["arm"])
        if row["rate"] != "none":
            cases.setdefault((row["ranks"], row["rate"], row["size"], twin), {})[row["arm"]] = row
    found = []
    for (ranks, rate, size, twin), arms in cases.items():
        dense, others = arms[twin], [row for name, row in arms.items() if name != twin]
        others.sort(key=lambda row: row["predicted_s"])
        pays = [r for r in others if dense["predicted_s"] > (1 + margin) * r["predicted_s"]]
        tried: list[dict] = []
        for row in pays:
            if tried and row["predicted_s"] >= min(t["measured_s"] for t in tried):
                break
            tried.append(row)
        best = min(arms.values(), key=lambda row: row["measured_s"])
        chosen = {"predicted": pays[0] if pays else dense, "tried": dense}
        if tried:
            kept = min(tried, key=lambda row: row["measured_s"])
            faster = dense["measured_s"] > (1 + margin) * kept["measured_s"]
            chosen["tried"] = kept if faster else dense
        found.append(
            {"ranks": ranks, "rate": rate, "size": size, "twin": twin, "best": best["arm"]}
            | {how: row["arm"] for how, row in chosen.items()}
            | {
                f"over_{how}": row["measured_s"] / best["measured_s"] - 1
                for how, row in chosen.items()
            }
        )
    return found


def summary(rows: list[dict]) -> dict:
    errors = sorted(abs(row["error"]) for row in rows)
    verdicts = [row["right"] for row in rows if "right" in row]
    return {
        "combinations": len(rows),
        "median_error": statistics.median(errors),
        "p90_error": errors[int(0.9 * (len(errors) - 1))],
        "worst_error": errors[-1],
        "verdicts": len(verdicts),
        "right_verdicts": sum(verdicts) / len(verdicts) if verdicts else None,
    }


def show(given: argparse.Namespace) -> int:
    launches = read(given.out)
    result: dict = {"command": "python benchmarks/plan_error.py run", "versions": {}}
    for kind in ("probed", "interpolated"):
        rows = rows_of(launches, kind)
        if not rows:
            print(f"{kind}: no launch to compare (one without a limit is needed)")
            continue
        result["versions"] = next(iter(launches.values()))["versions"]
        chosen = choices(rows)
        result[kind] = {"summary": summary(rows), "rows": rows, "choices": chosen}
        found = summary(rows)
        print(
            f"{kind}: {found['combinations']} combinations, median error "
            f"{found['median_error']:.1%}, 90 % below {found['p90_error']:.1%}, worst "
            f"{found['worst_error']:.1%}; {found['right_verdicts'] or 0:.1%} of "
            f"{found['verdicts']} verdicts right"
        )
        for how in ("predicted", "tried"):
            over = [case[f"over_{how}"] for case in chosen]
            near = sum(o <= 0.02 for o in over)
            print(
                f"  auto, {how}: {near} of {len(over)} within 2 % of the best, "
                f"worst {max(over):.1%}"
            )
        if given.rows == kind:
            table(rows)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def table(rows: list[dict]) -> None:
    for r in sorted(rows, key=lambda r: -abs(r["error"])):
        verdict = ""
        if "right" in r:
            verdict = f"{r['speedup']:6.2f}x {r['predicted_speedup']:6.2f}x"
            verdict += "" if r["right"] else "  WRONG"
        print(
            f"{r['ranks']} {r['rate']:8} {r['size']:5} {r['arm'][:22]:22} {r['measured_s']:8.4f} "
            f"{r['predicted_s']:8.4f} s {r['error']:+7.1%}  (compute {r['compute_s']:.4f}, coding "
            f"{r['coding_s']:.4f}, waiting {r['waiting_s']:.4f}; rounds {r['rounds_spread']:.0%}) "
            f"{verdict}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runner, shower = commands.add_parser("run"), commands.add_parser("show")
    for one in (runner, shower):
        one.add_argument("--out", type=Path, default=Path("runs/plan-error"))
    runner.add_argument("--minutes", type=float, default=25.0)
    runner.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    runner.add_argument("--rates", nargs="+", default=list(RATES))
    shower.add_argument("--json", type=Path)
    shower.add_argument("--rows", choices=("probed", "interpolated"))
    given = parser.parse_args()
    return run(given) if given.command == "run" else show(given)


if __name__ == "__main__":
    sys.exit(main())
