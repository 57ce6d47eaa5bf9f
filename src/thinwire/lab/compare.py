"""Loss parity: recipes trained over the same seeds, compared in pairs with the first.

1. For each seed, each arm is trained by `thinwire train` in a process of its own; the seed fixes
   the data order, so that arms are paired by seed. Seeds are the outer loop: an interrupted
   comparison has whole pairs.
2. Runs that have finished before, recognised by run.json and its configuration, are kept;
   half-finished ones go on from their checkpoint if they have one, and start anew otherwise.
3. The runs are summed up (`summary.summarise`) into compare.json, which the page is made from.

compare.json: `format` (below), `settings` (`steps, data, nproc, seeds, margin, set`),
the keys of `summarise`, `failures` (`arm, seed, message, log`) and `versions` (one mapping per
distinct set of versions among the runs).
"""

import fcntl
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, RunError
from thinwire.lab.arms import parse_arm, parse_settings
from thinwire.lab.running import Failure, run_all
from thinwire.lab.summary import TrainedRun, format_summary, summarise
from thinwire.lab.trials import Trial, make_trial, read_trial
from thinwire.train.arguments import Arguments

__all__ = ["CompareConfig", "Comparison", "compare", "main"]

FORMAT = "thinwire.compare/1"
TRAIN_COMMAND = (sys.executable, "-m", "thinwire", "train")
# Name in `CompareConfig`, type, help.
_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("steps", int, "training steps of each run"),
    ("seeds", int, "number of seeds"),
    ("first_seed", int, "the first seed"),
    ("data", str, "the text, as for `thinwire train`"),
    ("nproc", int, "ranks of each run"),
    ("margin", float, "relative difference of loss that still counts as equal"),
    ("jobs", int, "runs at the same time"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig:
    """Train recipes over several seeds and compare their losses with the first.

    Attributes:
        recipes: the arms, `recipe` or `recipe:key=value,key=value`; the first is the reference.
        out: directory for the runs, compare.json and the page.
        steps: training steps of each run.
        seeds: number of seeds; each fixes the data order and the initial weights of all arms.
        first_seed: the seeds are first_seed, first_seed + 1, ...
        data: the text, as for `thinwire train`.
        settings: `key=value` settings of every arm.
        nproc: ranks of each run.
        margin: relative difference of loss that still counts as equal (0.01 is one per cent).
        jobs: runs at the same time; more than one makes the step times incomparable.
    """

    recipes: tuple[str, ...]
    out: Path
    steps: int = 200
    seeds: int = 3
    first_seed: int = 0
    data: str = "stdlib"
    settings: tuple[str, ...] = ()
    nproc: int = 2
    margin: float = 0.01
    jobs: int = 1

    def __post_init__(self) -> None:
        if len(self.recipes) < 2:
            raise ConfigError("compare needs at least two recipes: the reference and another")
        for name in ("steps", "seeds", "nproc", "jobs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.margin) and self.margin > 0):
            raise ConfigError(f"--margin must be above 0 (0.01 is one per cent), got {self.margin}")

    @property
    def all_seeds(self) -> list[int]:
        """Return the seeds in order."""
        return list(range(self.first_seed, self.first_seed + self.seeds))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison gave.

    Attributes:
        path: compare.json, None when no run finished.
        summary: the contents of compare.json, None when no run finished.
        failures: the trials that gave no result; with any, the exit status should be 1.
    """

    path: Path | None
    summary: dict[str, Any] | None
    failures: list[Failure]


def main(args: Sequence[str], write_page: Callable[[Path], Path] | None = None) -> int:
    """Run `thinwire compare`: progress on standard error, the table on standard output.

    Args:
        args: the command's arguments.
        write_page: makes a page of compare.json and returns its path.

    Returns:
        The exit status: 0, or 1 if a run failed.

    Raises:
        ConfigError: arguments that make no comparison.
    """
    config = config_from_arguments(args)
    found = compare(config, _say)
    if found.summary is not None:
        sys.stdout.write(f"{format_summary(found.summary)}\n\nnumbers in {found.path}\n")
    if found.path is not None and write_page is not None:
        sys.stdout.write(f"page: {write_page(found.path)}\n")
    for failure in found.failures:
        sys.stderr.write(f"thinwire: {failure}\n")
    return 1 if found.failures else 0


def config_from_arguments(args: Sequence[str]) -> CompareConfig:
    """Read the arguments of `thinwire compare`; `--help` prints them and exits.

    Raises:
        ConfigError: arguments that are missing, unknown or malformed.
    """
    parser = Arguments(
        prog="thinwire compare",
        description="Train recipes over several seeds and compare their losses with the first "
        "one's. The same command goes on where an interrupted one stopped.",
    )
    parser.add_argument(
        "recipes",
        nargs="+",
        metavar="ARM",
        help="RECIPE or RECIPE:key=value,key=value, e.g. static-6bit:lr=1e-3,model.dim=128; "
        "the first is the reference",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the runs, compare.json and the page",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="a setting of every arm; may be repeated",
    )
    default = {f.name: f.default for f in fields(CompareConfig)}
    for name, kind, text in _OPTIONS:
        flag = f"--{name.replace('_', '-')}"
        text += " (default: %(default)s)"
        parser.add_argument(flag, type=kind, default=default[name], help=text)
    found: dict[str, Any] = vars(parser.parse_args(args))
    for name in ("recipes", "settings"):
        found[name] = tuple(found[name])
    return CompareConfig(**found)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def compare(
    config: CompareConfig,
    say: Callable[[str], None],
    train_command: Sequence[str] = TRAIN_COMMAND,
) -> Comparison:
    """Train every arm over every seed, sum up, and write compare.json.

    A run that fails leaves the others alone and is told in `Comparison.failures`. An interruption
    (Ctrl-C, SIGTERM) ends the running trials; the same call later goes on from the finished ones.

    Args:
        config: arms, seeds and margin.
        say: takes one line of progress at a time.
        train_command: the words of `thinwire train`, before its arguments.

    Raises:
        ConfigError: malformed or repeated arms, or a directory that holds other runs.
    """
    trials = _trials(config)
    _make_directory(config.out)
    with _locked(config.out):
        # Foreign or changed directories are refused before anything is run.
        kept = [trial for trial in trials if _finished(trial)]
        if kept:
            say(f"{len(kept)} of {len(trials)} runs have finished before and are kept")
        failures = run_all([t for t in trials if t not in kept], config.jobs, say, train_command)
        failed = {(f.arm, f.seed) for f in failures}
        done = [t for t in trials if (t.arm.name, t.seed) not in failed]
        if not done:
            return Comparison(None, None, failures)
        summary = _summary(config, [_load(trial) for trial in done], failures)
        path = config.out / "compare.json"
        _write_json(path, summary)
    return Comparison(path, summary, failures)


def _trials(config: CompareConfig) -> list[Trial]:
    common = parse_settings(config.settings)
    arms = [parse_arm(text, common) for text in config.recipes]
    for i, arm in enumerate(arms):
        if any((a.recipe, a.settings) == (arm.recipe, arm.settings) for a in arms[:i]):
            raise ConfigError(f"arm {arm.name!r} is given twice")
    return [
        make_trial(
            arm,
            seed=seed,
            steps=config.steps,
            data=config.data,
            nproc=config.nproc,
            root=config.out,
        )
        for seed in config.all_seeds
        for arm in arms
    ]


def _finished(trial: Trial) -> bool:
    try:
        return read_trial(trial) is not None
    except RunError:
        return False


def _load(trial: Trial) -> TrainedRun:
    found = read_trial(trial)
    if found is None:
        raise RunError(f"{trial.out} holds no finished run any more: was it deleted meanwhile?")
    return found


def _summary(
    config: CompareConfig, runs: Sequence[TrainedRun], failures: Sequence[Failure]
) -> dict[str, Any]:
    versions: list[Any] = []
    for run in runs:
        if (found := run.record.get("versions")) and found not in versions:
            versions.append(found)
    settings = {
        "steps": config.steps,
        "data": config.data,
        "nproc": config.nproc,
        "seeds": config.all_seeds,
        "margin": config.margin,
        "set": list(config.settings),
    }
    return {
        "format": FORMAT,
        "settings": settings,
        **summarise(runs, margin=config.margin, arms=config.recipes),
        "failures": [asdict(failure) for failure in failures],
        "versions": versions,
    }


def _make_directory(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make --out {out}: {error.strerror}") from None


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Refuse a second comparison in the same directory: it would delete the first one's runs."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another comparison is running in {out}: wait, or choose another --out"
            ) from None
        yield


def _write_json(path: Path, value: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)
