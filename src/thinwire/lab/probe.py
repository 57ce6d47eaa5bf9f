"""`thinwire probe`: measure a mesh's links, codec speeds and a step's computation: links.json."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.lab.arms import parse_arm, parse_settings, setting_words
from thinwire.lab.running import terminate_as_interrupt
from thinwire.train.arguments import Arguments
from thinwire.train.axes import check_ranks
from thinwire.train.config import Config
from thinwire.train.launch import RankFailure, launch
from thinwire.train.parse import config_from_args, load, to_dict
from thinwire.train.recipes import DEFAULT, recipe

__all__ = ["main"]

# A message that took this many times as long as a larger one tells of a disturbed probe.
DISTURBED = 1.5
_INTERRUPTED = 130
# Batches are made up, one step is timed, and --out is a file.
_UNREAD = ("data", "data.source", "steps", "seed", "out", "stop_after")
_JOB = "thinwire.train.probing:probe_job"


def main(args: Sequence[str]) -> int:
    """Probe, write the file, print the table."""
    given = _parser().parse_intermixed_args(list(args))
    out = Path(given.out)
    under_torchrun = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    config = _config(given)
    payload = _payload(given, config, under_torchrun)
    _check_out(out)
    if under_torchrun:
        found = _join(payload)
    else:
        try:
            with terminate_as_interrupt():
                found = launch(given.nproc or 2, _JOB, payload)[0]
        except KeyboardInterrupt:
            raise _interrupted(out) from None
        except RankFailure as error:
            # Signals to the whole process group may reach the ranks first.
            raise _interrupted(out) if error.status == _INTERRUPTED else error from None
    if found:  # rank 0
        _write(found, out)
    return 0


def _interrupted(out: Path) -> RankFailure:
    return RankFailure(f"the probe was interrupted: {out} was not written", _INTERRUPTED)


def _join(payload: dict[str, Any]) -> dict[str, Any]:
    from thinwire.train.probing import probe_job  # noqa: PLC0415  torch, in ranks alone
    from thinwire.train.worker import run_under_torchrun  # noqa: PLC0415

    return run_under_torchrun(payload, probe_job)


def _config(given: argparse.Namespace) -> Config:
    """Return the configuration whose mesh and step are probed."""
    settings = parse_settings(given.set)
    for key, _ in settings:
        if key in _UNREAD:
            raise ConfigError(f"--set {key}: the probe reads no such setting, leave it out")
    if given.config is None:
        arm = parse_arm(given.arm or DEFAULT, settings)
        config = config_from_args(arm.arguments, recipe(arm.recipe))
    elif given.arm is not None:
        raise ConfigError("give a recipe or --config, not both")
    else:
        base = load(given.config)
        words = [word for key, value in settings for word in setting_words(key, value)]
        config = config_from_args(words, base)
    if config.mesh.replicas:
        raise ConfigError(
            "mesh.replicas cannot be probed: give the axes of mesh, or plain replicas"
        )
    return config


def _payload(given: argparse.Namespace, config: Config, under_torchrun: bool) -> dict[str, Any]:
    if under_torchrun and given.nproc is not None:
        raise ConfigError("--nproc starts local ranks itself: leave it out under torchrun")
    for flag in ("seconds", "max_mbytes", "timeout"):
        if not 0 < getattr(given, flag) < math.inf:
            raise ConfigError(f"--{flag.replace('_', '-')} must be above 0 and finite")
    if given.nproc is not None and given.nproc < 1:
        raise ConfigError("--nproc must be at least 1")
    if given.step not in ("", "none") and not all(given.step.partition(":")):
        raise ConfigError(f"--step {given.step!r} must be module:function, or none")
    check_ranks(config, int(os.environ["WORLD_SIZE"]) if under_torchrun else given.nproc or 2)
    return {
        "config": to_dict(config),
        "step": given.step,
        "seconds": given.seconds,
        "max_nbytes": int(given.max_mbytes * 1e6),
        "timeout_s": given.timeout,
        "progress": sys.stderr.isatty(),
        "device": config.compute.device,
        "threads": config.compute.threads,
    }


def _check_out(out: Path) -> None:
    """Refuse before minutes of work what could not be written after them."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file in it")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: the folder cannot be written")


def _write(found: dict[str, Any], out: Path) -> None:
    from thinwire.plan.links import Links  # noqa: PLC0415  imports torch

    links = Links.from_dict(found)
    links.write(out)
    with suppress(BrokenPipeError):
        sys.stdout.write(_table(links) + f"\nnumbers in {out}\n")


def _table(links: Any) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in links.mesh.items())
    lines = [
        f"mesh {mesh}",
        f"{'group':<14}{'collective':<16}{'latency':>12}{'MB/s':>10}{'to':>10}{'spread':>9}",
    ]
    for axis, group in links.groups.items():
        for name, speed in group.collectives.items():
            largest = speed.points[-1]
            spread = max(p.iqr_s / p.median_s for p in speed.points)
            mark = "  disturbed" if speed.disturbed > DISTURBED else ""
            lines.append(
                f"{axis:<14}{name:<16}{speed.latency_s * 1e6:9.0f} us"
                f"{speed.bytes_per_s / 1e6:10.1f}{largest.nbytes / 1e6:7.2f} MB{spread:9.0%}{mark}"
            )
    if links.codecs:
        encode = [1e-6 / codec.encode_s_per_value for codec in links.codecs.values()]
        decode = [1e-6 / codec.decode_s_per_value for codec in links.codecs.values()]
        lines.append(
            f"{len(encode)} codecs: encode {min(encode):.0f} to {max(encode):.0f}, decode "
            f"{min(decode):.0f} to {max(decode):.0f} million values/s"
        )
    if links.compute is not None:
        lines.append(f"step of {links.compute.recipe}: {links.compute.step_s:.4f} s on each rank")
    return "\n".join([*lines, _LEGEND])


_LEGEND = (
    "latency: of the smallest message; MB/s: of what a rank hands in, beyond the latency; to: the\n"
    "largest message measured; spread: quartile distance over the median, of the worst size.\n"
    "disturbed: a message took much longer than a larger one; probe again on quieter machines."
)


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(prog="thinwire probe", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("arm", nargs="?", metavar="RECIPE", help="whose mesh and step (default aquavit); also "
        "recipe:key=value,...")  # fmt: skip
    add("--config", metavar="FILE", help="a TOML file or run.json in place of a recipe")
    add("--nproc", type=int, help="local ranks (default 2); under torchrun leave it out")
    add("--seconds", type=float, default=30.0, help="time to take, beside compiling (default 30)")
    add("--max-mbytes", type=float, default=1000.0, help="what a rank may send (default 1000)")
    add("--step", default="", metavar="MODULE:FUNCTION", help="time your own step(), or none; "
        "default: the recipe's step")  # fmt: skip
    add("--timeout", type=float, default=120.0, help="seconds until a silent rank ends the probe")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    add("--out", default="links.json", help="file to write (default links.json)")
    return parser
