"""One training run per arm and seed, each in a process of its own; finished ones are kept.

Files of a comparison, below its directory: `ARM/seed-S/` is what `thinwire train --out` wrote,
`ARM/seed-S.log` its standard error, `ARM/seed-S.out` its standard output.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, RunError
from thinwire.lab.arms import Arm, arm_config
from thinwire.lab.summary import TrainedRun

__all__ = ["Trial", "make_trial", "read_trial"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One arm with one seed.

    Attributes:
        arm: the arm.
        seed: of the initial weights and the data order.
        steps: training steps.
        nproc: ranks.
        out: the run's directory.
        words: arguments of `thinwire train`.
        config: the configuration that run.json must hold.
    """

    arm: Arm
    seed: int
    steps: int
    nproc: int
    out: Path
    words: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def log(self) -> Path:
        """Return the file of the run's standard error."""
        return self.out.with_name(f"{self.out.name}.log")

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `thinwire train`; an interrupted run goes on if it can."""
        can_resume = any(self.out.glob("checkpoints/step-*/thinwire.json"))
        return [*self.words, *(["--resume"] if can_resume else [])]


def make_trial(arm: Arm, *, seed: int, steps: int, data: str, nproc: int, root: Path) -> Trial:
    """Return the trial of an arm and a seed below the directory `root` of a comparison."""
    out = root / arm.folder / f"seed-{seed}"
    settings = {"--steps": steps, "--seed": seed, "--data.source": data, "--out": out}
    shared = [word for key, value in settings.items() for word in (key, str(value))]
    return Trial(
        arm=arm,
        seed=seed,
        steps=steps,
        nproc=nproc,
        out=out,
        words=(arm.recipe, "--nproc", str(nproc), *shared, *arm.arguments),
        config=arm_config(arm, shared),
    )


def read_trial(trial: Trial) -> TrainedRun | None:
    """Return the run of a finished trial, None if it has not finished.

    Raises:
        ConfigError: the directory holds a run of another configuration.
        RunError: the run ended without what a comparison needs.
    """
    try:
        run = json.loads((trial.out / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    except OSError as error:
        raise RunError(f"cannot read {trial.out / 'run.json'}: {error.strerror}") from None
    result = run.get("result") if isinstance(run, dict) else None
    if not result or result.get("steps") != trial.steps:
        return None
    _check_config(trial, run)
    losses = [result.get(key) for key in ("train_loss", "val_loss")]
    if not any(isinstance(v, float) and math.isfinite(v) for v in losses):
        raise RunError("the run ended without a finite loss")
    metrics = _read_metrics(trial.out / "metrics.jsonl")
    return TrainedRun(trial.arm.name, trial.seed, run, metrics)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None


def _check_config(trial: Trial, run: Mapping[str, Any]) -> None:
    want = _flatten(trial.config, "") | {"nproc": trial.nproc}
    found = _flatten(run.get("config") or {}, "") | {"nproc": run.get("num_ranks")}
    # Where a run was written changes nothing, and a comparison may have been moved.
    differ = [key for key in want | found if key != "out" and want.get(key) != found.get(key)]
    if differ:
        key = differ[0]
        raise ConfigError(
            f"{trial.out} holds a finished run with {key} = {found.get(key)}, asked for "
            f"{want.get(key)}: choose another --out, or delete that directory"
        )


def _flatten(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
