"""Reads what a training run wrote: run.json and metrics.jsonl (design: trainer outputs)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import RunError

__all__ = ["KNOWN_KEYS", "Run", "load_run", "read_json_object"]

# Keys of a metrics line with a place of their own on the page; every other number gets a chart.
KNOWN_KEYS = frozenset(
    {"step", "loss", "val_loss", "val_bits_per_byte", "tokens", "wire", "eval_wire", "layer_errors"}
)


@dataclass(kw_only=True, slots=True)
class Run:
    """One training run as its files tell it.

    Attributes:
        name: the directory's name, as shown on the page.
        recipe_name: the recipe it was started from, empty where none was recorded.
        config: the tree of settings.
        versions: package or tool to version.
        result: `steps, tokens, train_loss, val_loss, val_bits_per_byte, wall_s, step_s_median`;
            empty while the run has not ended.
        ledger: per link the totals of `comm.LinkTotals.to_dict`, bytes sent by one rank.
        ledger_ranks: the same of every rank, in order; empty where not recorded.
        setting: what the run ran on: `num_ranks`, `mesh`, `device`, `data`, as far as recorded.
        memory: `weight_bytes, optimizer_bytes, params`.
        exemptions: `link, name, reason, nbytes` of each tensor sent uncompressed.
        layer_errors: parameter name to relative error of its compressed form.
        metrics: one mapping per step, in order of steps.
        notes: what a reader should know about the files, in sentences.
    """

    name: str
    recipe_name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    ledger: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    ledger_ranks: list[Mapping[str, Mapping[str, float]]] = field(default_factory=list)
    setting: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    exemptions: list[Mapping[str, Any]] = field(default_factory=list)
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def recipe(self) -> str:
        """Return the recipe's name, or the directory's where the configuration has none."""
        return self.recipe_name or self.name

    def total(self, key: str) -> float:
        """Return a ledger sum (`wire_bytes`, `dense_bytes`, ...) over all links."""
        return sum(link.get(key, 0) for link in self.ledger.values())

    @property
    def ratio(self) -> float | None:
        """Return dense over wire bytes of the whole run, None when nothing was sent."""
        wire = self.total("wire_bytes")
        return self.total("dense_bytes") / wire if wire else None


def load_run(run_dir: Path) -> Run:
    """Read a run directory.

    A last metrics line that a crash cut off, repeated steps after a resume and a missing result
    are tolerated and told in `Run.notes`.

    Raises:
        RunError: the directory, run.json or metrics.jsonl is missing or unreadable.
    """
    _check_directory(run_dir)
    path = run_dir / "run.json"
    raw = read_json_object(path)
    config = _mapping(raw, "config", path)
    recipe_name = str(raw.get("recipe") or config.get("recipe") or "")
    run = Run(name=run_dir.resolve().name, recipe_name=recipe_name)
    for key in ("config", "versions", "result", "memory"):
        setattr(run, key, _mapping(raw, key, path))
    run.setting = {key: raw[key] for key in ("num_ranks", "mesh", "device", "data") if key in raw}
    run.ledger = _check_ledger(_mapping(raw, "ledger", path), path)
    run.ledger_ranks = [_check_ledger(ledger, path) for ledger in raw.get("ledger_ranks") or []]
    run.exemptions = _exemptions(raw, path)
    run.layer_errors = {k: v for k, v in _mapping(raw, "layer_errors", path).items() if finite(v)}
    run.metrics, run.notes = _read_metrics(run_dir / "metrics.jsonl")
    if isinstance(auto := raw.get("auto"), dict):
        run.notes.append(_choice(auto))
    if not run.result:
        run.notes.append("The run has not ended: run.json holds no result yet.")
    return run


def _choice(auto: Mapping[str, Any]) -> str:
    """Return what compress "auto" chose and how well it foresaw the steps, in a sentence."""
    measured = auto.get("measured")
    ratio = measured.get("over_expected") if isinstance(measured, dict) else None
    held = f"; steps took {ratio:.2f} times what was expected" if finite(ratio) else ""
    return f"compress auto {auto.get('words', 'chose ' + str(auto.get('chosen')))}{held}."


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise RunError with one line that says what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: give the --out directory of a run") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RunError(f"{path} is not UTF-8 text: it was not written by thinwire") from None
    except json.JSONDecodeError as error:
        raise RunError(
            f"{path} is not valid JSON (line {error.lineno}: {error.msg}): "
            "the run was cut off while writing it, run it again"
        ) from None
    if not isinstance(value, dict):
        raise RunError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def finite(value: object) -> bool:
    """Return whether a JSON value is a finite number (booleans are not numbers here)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_directory(run_dir: Path) -> None:
    if not run_dir.is_dir():
        what = "is a file" if run_dir.exists() else "does not exist"
        raise RunError(f"{run_dir} {what}: give the --out directory of a run")
    if (run_dir / "run.json").exists():
        return
    inside = sorted(child.parent.name for child in run_dir.glob("*/run.json"))
    if inside:
        raise RunError(
            f"{run_dir} is not a run but holds some: give {run_dir / inside[0]} and so on"
        )
    empty = " (it is empty)" if not any(run_dir.iterdir()) else ""
    raise RunError(f"{run_dir} has no run.json{empty}: give the --out directory of a run")


def _mapping(raw: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise RunError(f"{path}: key {key!r} must be an object, got {type(value).__name__}")
    return value


def _check_ledger(ledger: Any, path: Path) -> dict[str, dict[str, float]]:
    if not isinstance(ledger, dict):
        raise RunError(f"{path}: a ledger must be an object, got {type(ledger).__name__}")
    for link, totals in ledger.items():
        if not isinstance(totals, dict) or not all(finite(v) for v in totals.values()):
            raise RunError(f"{path}: ledger[{link!r}] must map names to numbers")
    return ledger


def _exemptions(raw: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    items = raw.get("exemptions") or []
    if not isinstance(items, list):
        raise RunError(f"{path}: key 'exemptions' must be a list, got {type(items).__name__}")
    for i, item in enumerate(items):
        if not isinstance(item, dict) or not finite(item.get("nbytes")):
            raise RunError(f"{path}: exemptions[{i}] must hold link, name, reason and nbytes")
    return items


def _read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise RunError(f"{path} does not exist: the run wrote no steps") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None
    by_step: dict[int, dict[str, Any]] = {}
    notes, repeated = [], 0
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        line = _metrics_line(text)
        if line is None and number == len(lines):
            notes.append(
                f"The last line of metrics.jsonl (line {number}) was cut off and is left out."
            )
            break
        if line is None:
            raise RunError(f"{path}, line {number}, is not a JSON object with a step number")
        repeated += line["step"] in by_step
        by_step[line["step"]] = line
    if repeated:
        notes.append(f"{repeated} steps were run twice (after a resume); the later ones are shown.")
    if not by_step:
        notes.append("metrics.jsonl holds no step, so there are no curves.")
    return [by_step[step] for step in sorted(by_step)], notes


def _metrics_line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(line, dict) or not finite(line.get("step")):
        return None
    return line
