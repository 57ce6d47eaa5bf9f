"""Check every CUDA kernel against its reference on this machine's GPU, then time it.

    python benchmarks/gpu.py [--only NAME ...] [--out FILE]   # needs torch, numpy and triton alone
    python benchmarks/gpu.py --interpret                      # the checks, on the CPU, no GPU

Prints JSON: per check how many comparisons were made and which differed; per kernel, where its
check passed, the median time and GB/s beside the device's own copy (bytes read and written, once
each). Exit status: 0 all
equal, 1 something differs, 2 no GPU.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

Timed = tuple[str, Callable[[], object], int]
COPY_BYTES = 2**30


def commit() -> str:
    """Return the checkout's commit, marked where files were changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def median_ms(run: Callable[[], object], queued: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a call on the device, after three calls that warm up.

    `queued` keeps the device busy while the call is being launched, so that the time is the
    device's own (but for calls that look at a result), and empties its cache.
    """
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        queued()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def timed_blockwise(device: torch.device, n: int) -> Iterator[Timed]:
    from thinwire.codecs import Blockwise

    x = torch.randn(n, device=device, dtype=torch.bfloat16)
    for bits in (2, 4, 6, 8):
        codec = Blockwise(bits=bits)
        wire = codec.encode(x)
        wires = wire.expand(8, -1).contiguous()
        total = torch.empty(n, device=device)
        yield (
            f"blockwise encode {bits} bits",
            lambda c=codec, w=wire: c.encode(x, out=w),
            nbytes(x, wire),
        )
        yield (
            f"blockwise decode {bits} bits",
            lambda c=codec, w=wire: c.decode(w, n, x.dtype, out=x),
            nbytes(x, wire),
        )
        yield (
            f"blockwise sum of 8, {bits} bits",
            lambda c=codec, w=wires: c.decode_sum(w, n, x.dtype),
            nbytes(wires, total),
        )


def timed_hadamard(device: torch.device, n: int) -> Iterator[Timed]:
    from thinwire.codecs import Hadamard

    x = torch.randn(n, device=device, dtype=torch.bfloat16)
    for fmt in ("e4m3", "e5m2", "int8", "int4"):
        codec = Hadamard(fmt=fmt)
        wire = codec.encode(x)
        wires = wire.expand(8, -1).contiguous()
        yield f"hadamard encode {fmt}", lambda c=codec, w=wire: c.encode(x, out=w), nbytes(x, wire)
        yield (
            f"hadamard decode {fmt}",
            lambda c=codec, w=wire: c.decode(w, n, x.dtype, out=x),
            nbytes(x, wire),
        )
        yield (
            f"hadamard middle of 8, {fmt}",
            lambda c=codec, w=wires, o=wire: c.decode_sum_encode(w, n, x.dtype, out=o),
            nbytes(wires, wire),
        )


def timed_topk(device: torch.device, n: int) -> Iterator[Timed]:
    from thinwire.codecs import TopK

    x = torch.randn(n, device=device)
    residual, rest = torch.randn_like(x), torch.empty_like(x)
    for quant in ("sym", "none"):
        codec = TopK(shape=(n // 4096, 4096), k=64, quant=quant)
        wire = codec.encode(x)
        yield f"topk encode {quant}", lambda c=codec, w=wire: c.encode(x, out=w), nbytes(x, wire)
        yield (
            f"topk encode with feedback, {quant}",
            lambda c=codec, w=wire: c.encode_feedback(x, residual, 0.9, new_residual=rest, out=w),
            nbytes(x, residual, rest, wire),
        )
        yield (
            f"topk decode {quant}",
            lambda c=codec, w=wire: c.decode(w, n, x.dtype, out=x),
            nbytes(x, wire),
        )


def timed_bitmask(device: torch.device, n: int) -> Iterator[Timed]:
    from thinwire.kernels import bitmask

    for density in (0.01, 0.25):
        k = int(n * density)
        index = torch.randperm(n, device=device)[:k].sort().values
        bits = torch.empty(bitmask.bits_nbytes(n), dtype=torch.uint8, device=device)
        pairs = torch.empty(bitmask.index12_nbytes(n, k), dtype=torch.uint8, device=device)
        for name, wire, write, read in (
            ("bits", bits, bitmask.to_bits, bitmask.from_bits),
            ("index12", pairs, bitmask.to_index12, bitmask.from_index12),
        ):
            moved = nbytes(index, wire)
            write(index, n, wire)
            yield f"{name} write, {density:.0%}", partial(write, index, n, wire), moved
            yield f"{name} read, {density:.0%}", partial(read, wire, n, k), moved


def timed_eco(device: torch.device, n: int) -> Iterator[Timed]:
    from thinwire.kernels import eco

    h = eco.Step(1e-3, 0.9, 0.98, 1e-9, 0.1, 0.02, 0.1, -1.2)
    rows, columns = n // 4096, 4096
    g = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    m, v = torch.zeros(2, rows, columns, device=device)
    for fmt, group in (("fp8_e4m3", 0), ("int8", 0), ("int4", 128)):
        quantizer = eco.Quantizer(fmt, group)
        codes, scales = eco.quantize(g, quantizer)
        state = (codes, scales, g, m, v)
        yield (
            f"eco step {fmt}",
            partial(eco.step_, *state, quantizer, h),
            nbytes(*state, codes, scales, m, v),
        )
        yield f"eco quantize {fmt}", partial(eco.quantize, g, quantizer), nbytes(g, codes, scales)
        yield (
            f"eco dequantize {fmt}",
            partial(eco.dequantize, codes, scales, columns, quantizer, g.dtype, out=g),
            nbytes(g, codes, scales),
        )


def timed_adams(device: torch.device, n: int) -> Iterator[Timed]:
    from thinwire.kernels import adams

    h = adams.Step(1e-3)
    theta, m, r = torch.zeros(3, n, device=device)
    g = torch.randn(n, device=device, dtype=torch.bfloat16)
    yield "adams dense step", partial(adams.adams_, theta, m, g, h), nbytes(theta, m, theta, m, g)
    for density in (0.01, 0.1):
        index = torch.randperm(n, device=device)[: int(n * density)].sort().values
        mean = adams.gather(m, g, r, index, h.b1)
        yield (
            f"scape gather, {density:.0%}",
            partial(adams.gather, m, g, r, index, h.b1, out=mean),
            nbytes(index, mean) + 10 * index.numel(),
        )
        yield (
            f"scape sweep, {density:.0%}",
            partial(adams.sweep_, theta, m, g, r, index, mean, None, h),
            nbytes(theta, m, r, theta, m, r, g, index, mean),
        )
    yield "scape mask, 1%", partial(adams.largest, r, n // 100), nbytes(r)


TIMED = {
    "blockwise": timed_blockwise,
    "hadamard": timed_hadamard,
    "topk": timed_topk,
    "bitmask": timed_bitmask,
    "eco": timed_eco,
    "adams": timed_adams,
}


def check(name: str, device: torch.device) -> dict[str, object]:
    """Return the number of comparisons, what differed and the seconds it took."""
    from thinwire.testing.device_checks import mismatches

    start = time.perf_counter()
    count, wrong = mismatches(name, device)
    return {"compared": count, "wrong": wrong, "seconds": round(time.perf_counter() - start, 2)}


def check_apart(name: str) -> dict[str, object]:
    """Run one check in a process of its own: kernels compile side by side, a fault stays there."""
    command = [sys.executable, __file__, "--only", name, "--no-timing"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        result: dict[str, object] = json.loads(done.stdout)["checks"][name]
    except (ValueError, KeyError):
        tail = done.stderr.strip().splitlines()[-3:]
        return {"compared": 0, "wrong": [f"{name} died ({done.returncode}): {' | '.join(tail)}"]}
    return result


def checks(names: list[str], device: torch.device, apart: bool) -> dict[str, dict[str, object]]:
    """Return the result of each check."""
    if apart:
        with ThreadPoolExecutor(len(names)) as pool:
            results = dict(zip(names, pool.map(check_apart, names), strict=True))
    else:
        results = {name: check(name, device) for name in names}
    for name, result in results.items():
        print(f"{name}: {result}"[:2000], file=sys.stderr)
    return results


def timings(
    names: list[str], device: torch.device, n: int
) -> tuple[float, list[dict[str, object]]]:
    """Return the copy's GB/s and median time and bandwidth of each kernel of these checks."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    queued = partial(target.copy_, source)
    copy = 2 * COPY_BYTES / median_ms(queued, queued) / 1e6
    rows: list[dict[str, object]] = []
    for name in names:
        for label, run, moved in TIMED[name](device, n) if name in TIMED else ():
            ms = median_ms(run, queued)
            gbps = moved / ms / 1e6
            row = {"name": label, "ms": ms, "bytes": moved, "gbps": gbps, "of_copy": gbps / copy}
            rows.append(row)
            print(f"{label}: {ms:.3f} ms, {gbps:.0f} GB/s", file=sys.stderr)
        torch.cuda.empty_cache()
    return copy, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="check on the CPU, time nothing")
    parser.add_argument("--no-timing", action="store_true", help="check alone, in this process")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks alone")
    parser.add_argument("--elements", type=int, default=2**26, help="per timed tensor")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args()
    if not args.interpret and not torch.cuda.is_available():
        print("gpu.py: no CUDA device here: run it where torch sees one, or --interpret",
              file=sys.stderr)  # fmt: skip
        return 2
    if args.interpret:  # read when Triton is imported, which nothing has done yet
        os.environ["TRITON_INTERPRET"] = "1"
        warnings.simplefilter("ignore", RuntimeWarning)
    import triton

    from thinwire.testing.device_checks import CHECKS

    started = time.perf_counter()
    names = args.only or list(CHECKS)
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        print(f"gpu.py: no check {unknown[0]!r}: choose from {sorted(CHECKS)}", file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.interpret else "cuda")
    report: dict[str, object] = {
        "device": "interpreter" if args.interpret else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }
    alone = args.interpret or args.no_timing
    results = checks(names, device, apart=not alone)
    report["checks"] = results
    if not alone:
        sound = [name for name in names if not results[name]["wrong"]]
        report["copy_gbps"], report["timings"] = timings(sound, device, args.elements)
    report["seconds"] = round(time.perf_counter() - started, 1)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 1 if any(result["wrong"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
