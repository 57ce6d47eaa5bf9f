"""`thinwire bench codecs`: GB/s of every codec, against a copy of as many bytes in the same run.

1. Build an operation, call it once (compiles it), and find how many calls a sample needs.
2. In each round, one sample of the copies, of the kernel, of its plain torch form and of peers.
3. A ratio is the median over rounds of the ratio inside a round, so that drift hits both alike.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import ConfigError, RunError
from thinwire.lab.bench_cases import CODECS, STEPS, Call, Case, codec_cases, step_cases
from thinwire.lab.bench_peers import PEER_PACKAGES, peer_calls
from thinwire.train.arguments import Arguments
from thinwire.train.metrics import versions
from thinwire.train.parse import near

__all__ = ["SIZES", "cpu_name", "main", "measure"]

# One that stays in the cache, and one that does not (with an odd end).
SIZES = {"small": 2**16, "large": 2**24 + 3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SAMPLE_S = 0.002
_MAX_CALLS = 1000
# How much faster than its plain torch form every kernel is to be.
EAGER_SPEEDUP = 4.0


def _seconds(call: Call, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def _copier(nbytes: int) -> Call:
    source = torch.randint(0, 255, (max(nbytes, 1),), dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _calls(call: Call) -> int:
    """Return how many calls make a sample long enough for the clock; compiles on the way."""
    call()
    once = max(_seconds(call, 1), 1e-7)
    return max(1, min(_MAX_CALLS, round(_SAMPLE_S / once)))


def _rounds(arms: dict[str, Call], rounds: int, slow_rounds: int) -> dict[str, list[float]]:
    counts = {name: _calls(call) for name, call in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds):
        for name, call in arms.items():
            # A plain form can take seconds: fewer rounds tell enough.
            if name == "reference" and i >= slow_rounds:
                continue
            times[name].append(_seconds(call, counts[name]))
    return times


def _ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    pairs = zip(times[over], times[under], strict=False)
    return statistics.median(a / b for a, b in pairs)


def measure(case: Case, rounds: int = 15, slow_rounds: int = 3) -> dict[str, Any]:
    """Time a case.

    Args:
        case: what to time.
        rounds: samples of everything but the plain form.
        slow_rounds: samples of the plain form.

    Returns:
        A row: names, `numel`, `moved_nbytes`, `time_s` (median), `gbps`, `copy_ratio` (time over
        that of copying `moved_nbytes` bytes, which reads and writes each), `input_copy_ratio`
        (over that of a copy of the fp32 input), `reference_speedup`, `limit`, `meets`, and `peers`
        (how many times faster than each).
    """
    arms: dict[str, Call] = {
        "copy": _copier(case.moved_nbytes),
        "input": _copier(4 * case.numel),
        "kernel": case.kernel,
        **{f"peer {name}": call for name, call in case.peers.items()},
    }
    if case.reference is not None:
        arms["reference"] = case.reference
    times = _rounds(arms, rounds, slow_rounds)
    time_s = statistics.median(times["kernel"])
    quartiles = statistics.quantiles(times["kernel"], n=4) if rounds > 1 else [time_s] * 3
    row = {
        "codec": case.name,
        "direction": case.direction,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == case.dtype),
        "numel": case.numel,
        "moved_nbytes": case.moved_nbytes,
        "time_s": time_s,
        "time_iqr_s": quartiles[2] - quartiles[0],
        "gbps": case.moved_nbytes / time_s / 1e9,
        "copy_ratio": _ratio(times, "kernel", "copy"),
        "input_copy_ratio": _ratio(times, "kernel", "input"),
        "reference_speedup": _ratio(times, "reference", "kernel") if case.reference else None,
        "peers": {name: _ratio(times, f"peer {name}", "kernel") for name in case.peers},
        "limit": case.limit,
    }
    return row | {"meets": _meets(row)}


def _meets(row: dict[str, Any]) -> bool | None:
    """Tell whether a large fp32 case keeps its limits (None: nothing is promised for it)."""
    if row["limit"] is None or row["dtype"] != "fp32" or row["numel"] < SIZES["large"] // 2:
        return None
    against = "input_copy_ratio" if row["limit"] == 2.0 else "copy_ratio"
    faster = row["reference_speedup"] is None or row["reference_speedup"] >= EAGER_SPEEDUP
    return row[against] <= row["limit"] and faster


def _cases(name: str, numel: int, dtype: torch.dtype, peers: bool) -> Iterator[Case]:
    if name not in CODECS:
        yield from step_cases(name, numel, dtype)
        return
    others = {}
    if peers:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
        others = peer_calls(name, x)
    for case in codec_cases(name, numel, dtype):
        at = {"encode": 0, "decode": 1}.get(case.direction)
        if at is not None:
            case.peers.update({peer: calls[at] for peer, calls in others.items()})
        yield case


def _run(given: argparse.Namespace, write: Callable[[str], object]) -> list[dict[str, Any]]:
    """Measure all that is asked for, and write each row of the table as it is known."""
    rows = []
    for name in given.codecs:
        for size in given.sizes:
            for dtype in given.dtypes:
                for case in _cases(name, SIZES[size], DTYPES[dtype], given.peers):
                    row = {"size": size} | measure(case, given.rounds, given.slow_rounds)
                    write(_line(row) + "\n")
                    rows.append(row)
    return rows


_HEAD = (
    f"{'codec':<20}{'direction':<10}{'dtype':<6}{'size':<7}{'GB/s':>7}{'copy':>7}{'input':>7}"
    f"{'eager':>8}  {'limit':<12}peers\n"
)
_LEGEND = """
copy: time over that of copying as many bytes as the operation touches; input: over that of a
copy of the fp32 tensor; eager: how many times faster than plain torch; peers: how many times
faster than theirs. Medians over rounds.
"""


def _line(row: dict[str, Any]) -> str:
    eager = f"{row['reference_speedup']:.1f}x" if row["reference_speedup"] else "-"
    verdict = {None: "", True: "met", False: "MISSED"}[row["meets"]]
    limit = "" if row["meets"] is None else f"{row['limit']:g} {verdict}"
    peers = ", ".join(f"{name} {speed:.1f}x" for name, speed in row["peers"].items())
    return (
        f"{row['codec']:<20}{row['direction']:<10}{row['dtype']:<6}{row['size']:<7}"
        f"{row['gbps']:7.2f}{row['copy_ratio']:7.2f}{row['input_copy_ratio']:7.2f}"
        f"{eager:>8}  {limit:<12}{peers}"
    ).rstrip()


def _parser() -> Arguments:
    parser = Arguments(prog="thinwire bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["codecs"])
    names = [*CODECS, *STEPS]
    parser.add_argument("--codecs", nargs="+", default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15, help="samples of each operation")
    parser.add_argument("--slow-rounds", type=int, default=3, help="samples of plain torch")
    parser.add_argument("--peers", action="store_true", help="time torchao and bitsandbytes too")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    return parser


def _check(given: argparse.Namespace) -> None:
    for name in given.codecs:
        if name not in CODECS and name not in STEPS:
            raise near("codec", name, [*CODECS, *STEPS])
    for flag in ("threads", "rounds", "slow_rounds"):
        if getattr(given, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1")
    missing = [p for p in PEER_PACKAGES if importlib.util.find_spec(p) is None]
    if given.peers and missing:
        raise ConfigError(
            f"--peers: {' and '.join(missing)} not installed: pip install thinwire[peers], "
            "or leave --peers out"
        )
    if given.json and not Path(given.json).parent.is_dir():
        raise ConfigError(f"--json {given.json}: the folder does not exist")


def _versions_of(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """Return the processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(args: Sequence[str]) -> int:
    """Measure, print the table, write the JSON; status 1 where a promised ratio is missed."""
    given = _parser().parse_args(list(args))
    _check(given)
    before = torch.get_num_threads()
    torch.set_num_threads(given.threads)
    try:
        _write(_HEAD)
        rows = _run(given, _write)
        _write(_LEGEND)
    finally:
        torch.set_num_threads(before)
    if given.json:
        report = {
            "command": "thinwire bench " + " ".join(args),
            "versions": versions() | _versions_of("numba", *PEER_PACKAGES),
            "machine": {"cpu": cpu_name(), "cores": os.cpu_count()},
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
            "threads": given.threads,
            "rounds": given.rounds,
            "rows": rows,
        }
        try:
            Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:
            raise RunError(f"--json {given.json} cannot be written: {error.strerror}") from error
    return 1 if any(row["meets"] is False for row in rows) else 0
