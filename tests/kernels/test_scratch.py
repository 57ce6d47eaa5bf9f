"""No codec or step allocates more than its output and a block of scratch per thread."""

import ctypes
import gc
import sys
from pathlib import Path

import pytest
import torch

from thinwire.lab.bench_cases import CODECS, STEPS, codec_cases, step_cases

NUMEL = 2**22
# Blocks of scratch, tables of chunks (a few words per 4096 elements), the interpreter's own.
SLACK_BYTES = 3 * 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module", autouse=True)
def freed_at_once():
    """Let glibc hand freed buffers back: else a later call hides in what an earlier one left."""
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 2**20)


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def grown_bytes(call):
    """Return how far the process's memory rises while `call` runs."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    result = call()
    return status("VmHWM") - before, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CODECS, *STEPS])
def test_memory(name, dtype):
    make = codec_cases if name in CODECS else step_cases
    for case in make(name, NUMEL, dtype):
        case.kernel()  # compiled, tables cached
        grown, result = grown_bytes(case.kernel)
        output = result.nbytes if isinstance(result, torch.Tensor) else 0
        assert grown <= output + SLACK_BYTES, (case.name, case.direction)
