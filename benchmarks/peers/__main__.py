"""Peers and recipes side by side: held-out loss over seeds, and step time over shaped links.

    python -m benchmarks.peers loss --steps 300 --seeds 5 --out runs/peers
    python -m benchmarks.peers speed --rate 200mbit --out runs/peers
    python -m benchmarks.peers join --out runs/peers      # peers.json, to be kept as a result

Peers come with `pip install thinwire[peers]`; an arm whose package is missing is named and left
out. Bytes are the interface's own counters, so a peer's bytes are counted by us. The first arm is
the reference. Finished losses are kept: a second call goes on.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.peers.methods import PEERS
from thinwire.errors import ThinwireError
from thinwire.lab.links import INTERFACE, parse_rate, shaped_links
from thinwire.lab.statistics import paired
from thinwire.train.launch import Place, launch
from thinwire.train.metrics import versions
from thinwire.train.parse import config_from_args, to_dict
from thinwire.train.recipes import recipe

OURS = (
    "dense-ddp",
    "bf16-fsdp",
    "aquavit",
    "aquavit-keep-wire",
    "aquavit-grad4",
    "scape-90",
    "scape-99",
    "powersgd",
    "bf16-sr",
    "eco-fp8-sr",
    "diloco",
    "sparseloco",
)
ARMS = (*PEERS, *OURS)
LOSS = (
    "--data.seq-len-tokens", "64", "--data.batch-seqs", "8", "--model.hidden-dim", "512",
    "--optim.lr", "1e-3", "--evaluation.num-seqs", "512", "--compute.threads", "1",
)  # fmt: skip
SPEED = (
    "--model.dim", "512", "--model.hidden-dim", "2048", "--data.seq-len-tokens", "32",
    "--data.batch-seqs", "4", "--compute.threads", "1",
)  # fmt: skip


# FSDP2 arms gather and reduce in bf16, as the peers' do; SCAPE's dense first steps, a small part of
# a run, would be all that a speed run sees.
BF16 = ("--compute.dtype", "bfloat16", "--compute.reduce-dtype", "bfloat16")
OWN = dict.fromkeys(("bf16-fsdp", "aquavit", "aquavit-keep-wire", "aquavit-grad4"), BF16)
SPARSE = dict.fromkeys(("scape-90", "scape-99"), ("--systems.replicas.dense-steps", "0"))


def config_of(name: str, words: list[str], *, sparse: bool = False) -> dict[str, Any]:
    """Return an arm's whole configuration; a peer takes that of the recipe it competes with."""
    own = {"torchft-diloco": "diloco"}.get(name, "dense-ddp") if name in PEERS else name
    extra = [*OWN.get(name, ()), *(SPARSE.get(name, ()) if sparse else ())]
    return to_dict(config_from_args([*words, *extra], recipe(own)))


def run_losses(given: argparse.Namespace) -> dict[str, Any]:
    path = given.out / "losses.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"losses": {}}
    for name in given.arms:
        keys = {seed: f"{name}/steps{given.steps}/seed{seed}" for seed in range(given.seeds)}
        keys = {seed: key for seed, key in keys.items() if key not in found["losses"]}
        if not keys:
            continue
        words = [*LOSS, "--steps", str(given.steps), "--data.source", given.data]
        words += ["--out", str(given.out / "scratch")]
        arms = {key: (name, config_of(name, [*words, "--seed", str(s)])) for s, key in keys.items()}
        # One launch for all seeds, as some peers compile for a minute; if one ends it, one each.
        done = train_losses(given, arms) or {}
        for key, arm in arms.items() if not done else ():
            done |= train_losses(given, {key: arm}) or {}
        for key, loss in done.items():
            print(f"{key}: {loss:.4f}", flush=True)
        found["losses"] |= done
        save(path, found | about(given))
    print(loss_table(found["losses"], given))
    return found


def train_losses(
    given: argparse.Namespace, arms: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, float] | None:
    """Return the held-out losses of one launch, None (and say why) where it ended early."""
    payload = {"arms": list(arms.values()), "threads": 1}
    try:
        losses = launch(given.nproc, "benchmarks.peers.training:losses", payload)[0]
    except ThinwireError as error:
        print(f"{', '.join(arms)}: {str(error).splitlines()[-1]}", flush=True)
        return None
    return dict(zip(arms, losses, strict=True))


def loss_table(losses: dict[str, float], given: argparse.Namespace) -> str:
    """Return mean, and paired difference to the first arm with its 95 % interval."""
    by_arm = {
        name: {
            s: losses[key]
            for s in range(given.seeds)
            if (key := f"{name}/steps{given.steps}/seed{s}") in losses
        }
        for name in given.arms
    }
    first = by_arm[given.arms[0]]
    lines = [f"{'arm':<22}{'seeds':>6}{'loss':>9}{'to first':>10}{'95 % interval':>20}"]
    for name, values in by_arm.items():
        if not values:
            continue
        line = f"{name:<22}{len(values):>6}{statistics.fmean(values.values()):>9.4f}"
        common = sorted(set(values) & set(first))
        if name != given.arms[0] and len(common) > 1:
            pair = paired([values[s] for s in common], [first[s] for s in common], margin=0.01)
            line += f"{pair.mean:>+10.4f}{pair.low:>+10.4f}{pair.high:>+10.4f}"
        lines.append(line)
    return "\n".join(lines)


def run_speeds(given: argparse.Namespace) -> dict[str, Any]:
    rate = parse_rate(given.rate)
    path = given.out / "speeds.json"
    rows: dict[str, Any] = json.loads(path.read_text())["speeds"] if path.exists() else {}
    for name in [n for n in given.arms[1:] if n not in rows]:
        # A turn of a method with outer rounds holds one whole round of them.
        outer = config_of(name, [])["systems"]["outer"]
        every = outer["sync_every"] if outer["method"] != "none" else 0
        warmup, steps = max(3, every), every or given.round_steps
        words = [*SPEED, "--steps", str(warmup + given.rounds * steps)]
        words += ["--data.source", "synthetic", "--out", str(given.out / "scratch")]
        payload = {
            "arms": [(n, config_of(n, words, sparse=True)) for n in (given.arms[0], name)],
            "interface": INTERFACE, "warmup": warmup, "rounds": given.rounds, "steps": steps,
            "threads": 1, "pad_s": 0.0,
        }  # fmt: skip
        try:
            with shaped_links([rate] * given.nproc) as links:
                places = [
                    Place(tuple(links.prefix(r)), links.environment) for r in range(given.nproc)
                ]
                ranks = launch(given.nproc, "benchmarks.peers.training:speeds", payload, places)
        except ThinwireError as error:
            print(f"{name}: {str(error).splitlines()[-1]}", flush=True)
            continue
        rows[name] = row(ranks, given.nproc)
        r = rows[name]
        print(
            f"{name:<22}{r['step_s']:8.3f} s, {r['first_step_s']:8.3f} s for {given.arms[0]}: "
            f"{r['speedup']:5.2f}x, {r['bytes'] / 1e6:8.3f} MB per rank and step",
            flush=True,
        )
        found = {"speeds": rows, "rate_bits_per_s": rate} | about(given)
        save(path, found)
    return rows


def join(given: argparse.Namespace) -> dict[str, Any]:
    """Write losses and speeds as one result."""
    losses, speeds = (
        json.loads((given.out / f"{n}.json").read_text()) for n in ("losses", "speeds")
    )
    joined = {
        "peers": list(PEERS),
        "losses": losses["losses"],
        "speeds": speeds["speeds"],
        "rate_bits_per_s": speeds["rate_bits_per_s"],
        "settings": {"loss": losses["settings"], "speed": speeds["settings"]},
        "versions": losses["versions"],
    }
    save(given.out / "peers.json", joined)
    return joined


def row(ranks: list[Any], nproc: int) -> dict[str, float]:
    """Return mean step time (over rounds, the slowest rank's), speed-up and interface bytes.

    Means, not medians: a method that syncs every H steps pays in one of them.
    """
    step_s = [
        max(statistics.fmean(s for r in rank[arm] for s in r["step_s"]) for rank in ranks)
        for arm in (0, 1)
    ]
    steps = sum(len(r["step_s"]) for r in ranks[0][1])
    sent = sum(r["interface_bytes"] for rank in ranks for r in rank[1]) / nproc
    return {
        "step_s": step_s[1], "first_step_s": step_s[0], "speedup": step_s[0] / step_s[1],
        "bytes": sent / steps,
    }  # fmt: skip


def about(given: argparse.Namespace) -> dict[str, Any]:
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}
    return {"settings": settings, "versions": versions()}


def save(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("loss", "speed", "join"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300, help="of a loss run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", default="sotu")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    given = parser.parse_args()
    {"loss": run_losses, "speed": run_speeds, "join": join}[given.what](given)


if __name__ == "__main__":
    main()
