"""`thinwire bench codecs`: rows that add up, limits that are judged, errors of one line."""

import json

import pytest
import torch

from thinwire.cli import main
from thinwire.lab import bench
from thinwire.lab.bench_cases import CODECS, STEPS, codec_cases, step_cases
from thinwire.testing.contracts import same_bits

NUMEL = 40_000


def run(capsys, *args):
    status = main(["bench", *args])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("name", [*CODECS, *STEPS])
def test_kernel_and_plain_form_of_a_case_do_the_same(name):
    make = codec_cases if name in CODECS else step_cases
    for case in make(name, NUMEL, torch.bfloat16):
        assert case.moved_nbytes > 0
        result = case.kernel()
        if case.reference is None:
            continue
        plain = case.reference()
        # Steps in place and sums into a buffer return nothing to compare: tests/kernels does.
        if isinstance(result, torch.Tensor) and isinstance(plain, torch.Tensor):
            assert same_bits(result.float(), plain.float())


def test_rows_carry_ratios_of_one_run(capsys, tmp_path):
    file = tmp_path / "bench.json"
    names = ["block8", "topk-sym", "mask-bits", "adams-step"]
    args = ["--codecs", *names, "--sizes", "small", "--dtypes", "fp32", "--rounds", "3"]
    status, out, err = run(capsys, "codecs", *args, "--json", str(file), "--threads", "1")
    assert (status, err) == (0, "")
    report = json.loads(file.read_text())
    assert report["threads"] == 1
    assert {"torch", "numba"} <= set(report["versions"])
    rows = report["rows"]
    assert [(r["codec"], r["direction"]) for r in rows] == [
        ("block8", "encode"), ("block8", "decode"), ("block8", "sum"),
        ("topk-sym", "encode"), ("topk-sym", "decode"), ("topk-sym", "sum"),
        ("mask-bits", "encode"), ("mask-bits", "decode"), ("adams-step", "step"),
    ]  # fmt: skip
    encode = rows[0]
    # 4 bytes read; 8 bits and 4 bytes per 256 elements written
    assert encode["moved_nbytes"] == 2**16 * 4 + 2**16 + 2**16 // 256 * 4
    assert encode["gbps"] == pytest.approx(encode["moved_nbytes"] / encode["time_s"] / 1e9)
    for row in rows:
        assert row["copy_ratio"] > 0
        assert row["reference_speedup"] > 0
        assert row["meets"] is None  # only large fp32 cases are judged
        assert row["codec"] in out


def row(**changes):
    base = {
        "limit": 2.0, "dtype": "fp32", "numel": bench.SIZES["large"], "copy_ratio": 9.0,
        "input_copy_ratio": 1.9, "reference_speedup": 4.0,
    }  # fmt: skip
    return base | changes


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, True),
        ({"input_copy_ratio": 2.1}, False),
        ({"reference_speedup": 3.9}, False),
        ({"reference_speedup": None}, True),
        ({"limit": 4.0, "copy_ratio": 4.0, "input_copy_ratio": 9.0}, True),
        ({"limit": 4.0, "copy_ratio": 4.1}, False),
        ({"limit": None}, None),
        ({"dtype": "bf16"}, None),
        ({"numel": bench.SIZES["small"]}, None),
    ],
)
def test_limits(changes, verdict):
    assert bench._meets(row(**changes)) is verdict


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["codecs", "--codecs", "block9"], "unknown codec 'block9': did you mean 'block"),
        (["codecs", "--rounds", "0"], "--rounds must be at least 1"),
        (["codecs", "--json", "/nowhere/at/all.json"], "the folder does not exist"),
        (["codecs", "--dtypes", "fp8"], "invalid choice: 'fp8'"),
        (["codecs", "--peers"], "--peers: nopackage not installed"),
    ],
)
def test_errors_are_one_line(capsys, monkeypatch, args, message):
    monkeypatch.setattr(bench, "PEER_PACKAGES", ("json", "nopackage"))
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
