"""Compile what a kernel module launches, ahead of time and without a GPU, and read the result."""

import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.float64: "fp64",
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@contextmanager
def recorded(module):
    """Collect the launches of a kernel module in place of running them."""
    calls, original = [], module.launch

    def record(kernel, blocks, *args, warps=4, **constants):
        calls.append((kernel, args, warps, constants))

    module.launch = record
    try:
        yield calls
    finally:
        module.launch = original


def _argument(value, plain):
    """Return type, constant or None, and divisibility by 16, as a launch specializes them."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype], None, value.data_ptr() % 16 == 0 and not plain
    if isinstance(value, bool):
        return "u1", None, False
    if isinstance(value, int):
        if value == 1 and not plain:
            return "constexpr", 1, False
        kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        return kind, None, value % 16 == 0 and not plain
    if value is None:
        return "constexpr", None, False
    return "fp32", None, False


def compile_launch(launch, arch):
    kernel, args, warps, constants = launch
    signature, fixed, attributes = {}, dict(constants), {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        kind, constant, aligned = _argument(value, kernel.params[i].do_not_specialize)
        signature[name] = kind
        if kind == "constexpr":
            fixed[name] = constant
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    for name in kernel.arg_names[len(args) :]:
        signature[name] = "constexpr"
    source = ASTSource(kernel, signature, fixed, attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def usage(binary):
    """Return registers, stack and local bytes per thread that the assembler reports."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [os.fspath(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(re.search(rf"\b{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "LOCAL")}


def wide(ptx, kind):
    """Return how many 16-byte global loads ("ld") or stores ("st") a kernel has."""
    return len(
        re.findall(rf"{kind}\.global[.\w]*\.(?:v4\.(?:b32|u32|f32)|v2\.(?:b64|u64|f64))", ptx)
    )
