"""The files of a run: metrics.jsonl, run.json, TensorBoard. Only rank 0 writes.

run.json's `ledger` holds what rank 0 sent; `ledger_ranks` has every rank's, since pipeline stages
differ.
"""

import importlib.metadata
import json
import math
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import ConfigError, DataError

__all__ = ["MetricsFile", "peak_nbytes", "read_metrics", "versions", "write_run"]


class MetricsFile:
    """Append a JSON line per step; continue a file from the step of a checkpoint.

    Args:
        folder: the run's folder, made if need be.
        after_step: lines of later steps are dropped; 0 starts an empty file.
        tensorboard: also write TensorBoard events into `folder/tensorboard`.

    Raises:
        ConfigError: the folder can't be written, or the tb extra is missing.
    """

    def __init__(self, folder: Path, after_step: int, tensorboard: bool) -> None:
        path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = [r for r in read_metrics(path) if r["step"] <= after_step] if after_step else []
            self._file = open(path, "w")  # noqa: SIM115  closed by close()
        except OSError as error:
            raise ConfigError(f"cannot write to out folder {folder}: {error.strerror}") from None
        for record in kept:
            self._file.write(json.dumps(record) + "\n")
        self.step_s: list[float] = [r["step_s"] for r in kept]
        self._board = _tensorboard(folder) if tensorboard else None

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.step_s.append(record["step_s"])
        if self._board is not None:
            for name, value in _flat(record):
                self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl; a line cut off by a kill ends it.

    Raises:
        DataError: a broken line that isn't the last.
    """
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise DataError(f"{path} line {number} is no JSON") from None
    return records


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Write run.json, never leaving a half-written one."""
    part = folder / ".run.json"
    part.write_text(json.dumps(_finite(run), indent=2) + "\n")
    part.rename(folder / "run.json")


def peak_nbytes(device: torch.device) -> int:
    """Return the most memory in use so far: of the device's tensors, or of a CPU rank's process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024


def versions() -> dict[str, str]:
    """Return the versions that a run's numbers depend on."""
    return {
        "thinwire": importlib.metadata.version("thinwire"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot hold, by None."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Return the numbers of a record by path; texts and lists are not for curves."""
    flat: list[tuple[str, float]] = []
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and prefix + key != "step":
            flat.append((prefix + key, value))
    return flat


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError("--tensorboard needs the extra: pip install 'thinwire[tb]'") from None
    return SummaryWriter(str(folder / "tensorboard"))
