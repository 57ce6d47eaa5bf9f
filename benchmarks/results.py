"""Keep measured JSON files with where they come from, and render docs/results from them.

    python benchmarks/results.py keep aquavit-constant runs/compare.json \
        --title "Aquavit at a constant rate" --command "thinwire compare ..." --notes "..."
    python benchmarks/results.py pages          # rewrite docs/results/*.md
    python benchmarks/results.py pages --check  # status 1 where a page is not what JSON says
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

# Run as a script, this folder is on the path, not the one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.parity import parity_page
from benchmarks.quality_tables import mixed_table, outer_table, peers_table, sparse_table, table
from thinwire.lab.bench import cpu_name
from thinwire.train.metrics import versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"


def keep(given: argparse.Namespace) -> int:
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = given.commit or subprocess.check_output(head, text=True).strip()
    result = json.loads(Path(given.file).read_text())
    if "reference" in result:
        for arm in result["arms"]:
            arm.pop("curve")  # long, and drawn by `thinwire compare` itself
    result.setdefault("versions", versions())
    kept = {
        "title": given.title,
        "command": given.command or result.get("command", ""),
        "commit": commit,
        "machine": f"{cpu_name()}, {os.cpu_count()} shared cores, no GPU",
        "notes": given.notes,
        "result": result,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{given.name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def compare_table(result: dict[str, Any]) -> str:
    rows = []
    for arm in result["arms"]:
        loss, gap = arm["loss"], arm.get("difference")
        interval = "reference"
        verdict = ""
        if gap:
            relative = gap["relative"]
            interval = (
                f"{100 * relative['mean']:+.2f} % "
                f"({100 * relative['low']:+.2f} to {100 * relative['high']:+.2f})"
            )
            verdict = gap["verdict"]
        runs = str(len(arm["seeds"]))
        value = f"{loss['mean']:.4f} ± {loss['std_err']:.4f}"
        rows.append([f"`{arm['name']}`", runs, value, interval, verdict])
    head = ["arm", "seeds", "validation loss ± s.e., nats", "difference (95 % interval)", "verdict"]
    margin = f"\n\nVerdicts are against a margin of {100 * result['margin']:g} %."
    return table(head, rows) + (margin if result.get("margin") else "")


def bench_table(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        if row["size"] != "large":
            continue
        peers = ", ".join(f"{name} {speed:.1f}×" for name, speed in row["peers"].items())
        eager = f"{row['reference_speedup']:.1f}×" if row["reference_speedup"] else ""
        verdict = {None: "", True: "met", False: "missed"}[row["meets"]]
        rows.append(
            [f"`{row['codec']}`", row["direction"], row["dtype"], f"{row['gbps']:.1f}",
             f"{row['copy_ratio']:.2f}", f"{row['input_copy_ratio']:.2f}", eager,
             f"{row['limit']:g} {verdict}" if verdict else "", peers]
        )  # fmt: skip
    return table(
        ["codec", "direction", "dtype", "GB/s", "× copy of its bytes", "× copy of the input",
         "faster than plain torch", "limit", "faster than peers"],
        rows,
    )  # fmt: skip


def lab_table(result: dict[str, Any]) -> str:
    rows = [
        [f"`{a['recipe']}`", f"{a['step_s_median']:.3f} ({a['step_s_iqr']:.3f})",
         f"{a['speedup']:.2f}×", f"{a['ideal_speedup']:.2f}×", f"{100 * a['of_ideal']:.0f} %",
         f"{a['ledger_bytes'] / 1e6:.2f}", f"{a['interface_ratio']:.3f}",
         f"{a['unshaped_cost']:.2f}×"]
        for a in result["arms"]
    ]  # fmt: skip
    rates = ", ".join(f"{r / 1e6:g} Mbit/s" for r in result["rate_bits_per_s"])
    head = ["arm", "step, s (iqr)", "speed-up", "ideal", "of ideal", "MB per rank and step",
            "interface / ledger", "step without a limit"]  # fmt: skip
    steps = result.get("steps") or result["rounds"] * result["steps_per_round"]
    return (
        f"Rates of the ranks: {rates}. {steps} steps per arm; a step is their median, and "
        "speed-ups compare means over turns of medians.\n\n" + table(head, rows)
    )


def break_even_table(result: dict[str, Any]) -> str:
    rows = [
        [f"`{name}`", f"{1e3 * a['step_s_median']:.0f}", f"{a['wire_bytes_per_step'] / 1e6:.2f}",
         f"{1e3 * a['encode_s_per_step']:.1f}", f"{1e3 * a['decode_s_per_step']:.1f}",
         f"{a['break_even_gbps']:.1f}" if a.get("break_even_gbps") else ""]
        for name, a in result["arms"].items()
    ]  # fmt: skip
    head = ["arm", "step, ms", "MB sent", "encode, ms", "decode, ms", "pays below, Gbit/s"]
    return table(head, rows)


def claims_table(result: dict[str, Any]) -> str:
    rows = []
    for c in result["claims"]:
        unit = c["unit"] if c["unit"] == "x" else f" {c['unit']}"
        claim = f"{c['claimed']:.2f}{unit}" if c["claimed"] else ""
        error = f"{100 * c['error']:+.0f} %" if c["error"] is not None else ""
        said = "; ".join(part for part in (c["assumption"], c["reach"]) if part)
        rows.append([c["paper"], c["arm"], f"{c['predicted']:.2f}{unit}", claim, error, said])
    head = ["paper", "arm", "prediction", "claim", "error", "what matters most"]
    return table(head, rows)


def plan_error_table(result: dict[str, Any]) -> str:
    rows = []
    for kind in ("probed", "interpolated"):
        if kind not in result:
            continue
        found = result[kind]["summary"]
        rows.append(
            [kind, str(found["combinations"]), f"{100 * found['median_error']:.1f} %",
             f"{100 * found['p90_error']:.1f} %", f"{100 * found['worst_error']:.1f} %",
             f"{100 * found['right_verdicts']:.1f} % of {found['verdicts']}"]
        )  # fmt: skip
    head = ["messages", "combinations", "median error", "90 % below", "worst", "right verdicts"]
    parts = [table(head, rows), by_ranks_table(result["probed"]["rows"])]
    if "choices" in result["probed"]:
        parts.append(choices_table(result["probed"]["choices"]))
    return "\n\n".join([*parts, plan_error_rows(result["probed"]["rows"])])


def by_ranks_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for ranks in sorted({r["ranks"] for r in rows}):
        errors = sorted(abs(r["error"]) for r in rows if r["ranks"] == ranks)
        right = [r["right"] for r in rows if r["ranks"] == ranks and "right" in r]
        lines.append(
            [str(ranks), str(len(errors)), f"{100 * statistics.median(errors):.1f} %",
             f"{100 * errors[-1]:.1f} %", f"{sum(right)} of {len(right)}"]
        )  # fmt: skip
    return table(["ranks", "combinations", "median error", "worst", "right verdicts"], lines)


def choices_table(choices: list[dict[str, Any]]) -> str:
    lines = []
    for how, words in (
        ("predicted", "by prediction"), ("tried", "after real steps of the chosen arm")
    ):  # fmt: skip
        over = [c[f"over_{how}"] for c in choices]
        near = sum(o <= 0.02 for o in over)
        lines.append([words, f"{near} of {len(over)}", f"{100 * max(over):.1f} %"])
    head = ["what auto would choose", "within 2 % of the best arm or dense", "worst"]
    return table(head, lines)


def plan_error_rows(rows: list[dict[str, Any]]) -> str:
    lines = [
        [str(r["ranks"]), r["rate"], r["size"], f"`{r['arm'].split(':')[0]}`",
         f"{r['measured_s']:.4f}", f"{r['predicted_s']:.4f}", f"{100 * r['error']:+.1f} %",
         f"{r['speedup']:.2f}×" if "speedup" in r else "",
         f"{r['predicted_speedup']:.2f}×" if "speedup" in r else ""]
        for r in rows
    ]  # fmt: skip
    head = ["ranks", "rate", "model", "arm", "measured, s", "predicted, s", "error",
            "speed-up", "predicted"]  # fmt: skip
    return table(head, lines)


def mask_waits_table(result: dict[str, Any]) -> str:
    rows = [
        [r["rate"], f"{r['mask_message_bytes']:,.0f}", f"{1e3 * r['transfer_s']:.1f}",
         f"{1e3 * r['mask_window_s']:.1f}", f"{1e3 * r['mask_wait_s']:.2f}",
         f"{1e3 * r['mask_wait_max_s']:.2f}"]
        for r in result["mask_waits"]
    ]  # fmt: skip
    head = ["rate", "mask bytes of a step", "transfer, ms", "launch to wait, ms", "waited, ms",
            "longest, ms"]  # fmt: skip
    return table(head, rows)


def optimizer_table(result: dict[str, Any]) -> str:
    rows = [
        [r["arm"], f"{1e3 * r['step_s']:.1f}", f"{r['ratio']:.2f}×"]
        for r in result["optimizer_steps"]
    ]
    return table(["optimizer", "step, ms", "to torch's"], rows)


# A key that only such a result has -> its table, the first that fits.
KINDS = {
    "peers": peers_table,
    "claims": claims_table,
    "optimizer_steps": optimizer_table,
    "mask_waits": mask_waits_table,
    "probed": plan_error_table,
    "rows": bench_table,
    "rate_bits_per_s": lab_table,
    "reference": compare_table,
}


def kind_table(result: dict[str, Any]) -> str:
    if "runs" in result:
        kind = next(iter(result["runs"].values()))
        tables = {"plan": mixed_table, "warmup": sparse_table}
        return next((made for key, made in tables.items() if key in kind), outer_table)(
            result["runs"]
        )
    if isinstance(result.get("arms"), dict):
        return break_even_table(result)
    for key, made in KINDS.items():
        if key in result:
            return made(result)
    return "```json\n" + json.dumps(result, indent=1) + "\n```"


def page(kept: dict[str, Any]) -> str:
    versions = kept["result"].get("versions", {})
    versions = versions[0] if isinstance(versions, list) else versions
    named = ", ".join(f"{k} {v}" for k, v in versions.items() if k != "platform")
    made = "Predicted" if "claims" in kept["result"] else "Measured"
    return (
        f"# {kept['title']}\n\n{kept['notes']}\n\n{kind_table(kept['result'])}\n\n"
        f"{made} with `{kept['command']}` at commit {kept['commit']}; {kept['machine']}; "
        f"{named}.\n"
    )


def pages(given: argparse.Namespace) -> int:
    files = sorted(RESULTS.glob("*.json"))
    wanted = {file.stem: json.loads(file.read_text()) for file in files}
    texts = {f"{name}.md": page(kept) for name, kept in wanted.items()}
    texts["parity.md"] = parity_page(wanted)
    listed = "\n".join(f"- [{kept['title']}]({name}.md)" for name, kept in wanted.items())
    texts["index.md"] = (
        "# Results\n\nRendered from `benchmarks/results/*.json`.\n\n"
        f"- [Parity: one verdict per system](parity.md)\n{listed}\n"
    )
    if given.check:
        stale = [
            n for n, t in texts.items() if not (PAGES / n).exists() or (PAGES / n).read_text() != t
        ]
        for name in stale:
            print(
                f"docs/results/{name} is not what benchmarks/results says: run {sys.argv[0]} pages"
            )
        return 1 if stale else 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (PAGES / name).write_text(text)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command_name", required=True)
    keeper = commands.add_parser("keep")
    keeper.add_argument("name")
    keeper.add_argument("file")
    keeper.add_argument("--title", required=True)
    keeper.add_argument("--command", default="")
    keeper.add_argument("--notes", default="")
    keeper.add_argument("--commit", help="where it was measured (default: HEAD)")
    renderer = commands.add_parser("pages")
    renderer.add_argument("--check", action="store_true")
    given = parser.parse_args()
    return keep(given) if given.command_name == "keep" else pages(given)


if __name__ == "__main__":
    sys.exit(main())
