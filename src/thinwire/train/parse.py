"""From files and arguments to a `Config`, and back; whatever isn't known is refused by name."""

import contextlib
import difflib
import hashlib
import io
import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.train.config import Config

__all__ = [
    "config_from_args",
    "config_hash",
    "flat_settings",
    "from_dict",
    "load",
    "near",
    "numeric_settings",
    "to_dict",
]

# Settings that a resumed run may change: they don't touch the numbers of a step.
FREE = (
    "recipe", "out", "stop_after", "tensorboard", "timing", "mesh", "evaluation", "checkpoints",
    "compute.device", "auto",
)  # fmt: skip


# More names than these are looked up in a list of their own.
LISTED = 12


def near(what: str, name: str, known: Sequence[str], where: str = "") -> ConfigError:
    """Return the error for an unknown name, with the nearest known ones.

    Args:
        what: what the name should have been.
        name: the name.
        known: names that there are.
        where: the command that lists them, for errors about long lists.
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        hint = f"did you mean {close[0]!r}?"
    elif len(known) <= LISTED:
        hint = f"known: {', '.join(known)}"
    else:
        few = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
        hint = f"the nearest are {', '.join(few)}"
    more = f"; {where} lists all" if where and not close else ""
    return ConfigError(f"unknown {what} {name!r}: {hint}{more}")


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as plain JSON values."""
    return json.loads(json.dumps(asdict(config)))


def from_dict(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """Return `base` (default: `Config()`) with the nested `values` set.

    Raises:
        ConfigError: a key that doesn't exist or a value of the wrong type, named in full.
    """
    return _merge(base or Config(), _with_replicas(values), "")


def _with_replicas(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write tables [[replicas]] as mesh.replicas, which the command line can say too."""
    tables = values.get("replicas")
    if not isinstance(tables, list):
        return values
    words = []
    for index, table in enumerate(tables):
        known = ["ranks", "stages", "rank_ratio"]
        if not isinstance(table, Mapping) or not isinstance(table.get("ranks"), list):
            raise ConfigError(f"replicas[{index}] needs a list of ranks, got {table!r}")
        for key in table:
            if key not in known:
                raise near("setting", f"replicas[{index}].{key}", known)
        ranks = table["ranks"]
        if table.get("stages", len(ranks)) != len(ranks):
            raise ConfigError(
                f"replicas[{index}] has {len(ranks)} ranks for {table['stages']} stages: give one "
                "rank per stage"
            )
        ratio = f":{table['rank_ratio']}" if table.get("rank_ratio") else ""
        words.append(",".join(str(rank) for rank in ranks) + ratio)
    rest = {k: v for k, v in values.items() if k != "replicas"}
    mesh = rest.get("mesh", {})
    if mesh.get("replicas"):
        raise ConfigError("mesh.replicas and [[replicas]] say the same: give one of them")
    return rest | {"mesh": {**mesh, "replicas": " ".join(words)}}


def load(path: str | Path, base: Config | None = None) -> Config:
    """Read a TOML file, or the configuration in a previous run.json.

    Raises:
        ConfigError: unreadable file, bad syntax, unknown keys.
    """
    path = Path(path)
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"cannot read configuration {path}: {error}") from None
    if path.suffix == ".json" and isinstance(values, dict) and "config" in values:
        values = values["config"]
    if not isinstance(values, dict):
        raise ConfigError(f"configuration {path} holds no table of settings")
    return from_dict(values, base)


def config_hash(config: Config) -> str:
    """Return a short hash of every setting that changes the numbers of a step."""
    text = json.dumps(numeric_settings(to_dict(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def numeric_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that `config_hash` covers, flat: dotted name -> value."""
    flat = flat_settings(values)
    return {k: v for k, v in flat.items() if not any(k == f or k.startswith(f + ".") for f in FREE)}


def flat_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a configuration as plain values, flat: dotted name -> value."""
    return _flatten(values, "")


def config_from_args(args: Sequence[str], base: Config) -> Config:
    """Apply `--section.key value` arguments to `base`; `--help` prints all keys and exits.

    Raises:
        ConfigError: unknown key (with the nearest), value that doesn't parse.
    """
    import tyro  # noqa: PLC0415  half a second that other commands need not pay

    wants_help = any(a in ("-h", "--help") for a in args)
    known = [name.replace("_", "-") for name in _flatten(asdict(base), "")]
    for arg in args:
        if arg.startswith("--") and not wants_help:
            _check_key(arg[2:].split("=")[0].replace("_", "-"), known)
    if wants_help:
        return tyro.cli(Config, default=base, args=list(args), prog="thinwire train RECIPE")
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught), contextlib.redirect_stdout(caught):
            return tyro.cli(Config, default=base, args=list(args), prog="thinwire train")
    except SystemExit:
        raise ConfigError(_one_line(caught.getvalue())) from None


def _check_key(key: str, known: list[str]) -> None:
    plain = re.sub(r"(^|\.)no-", r"\1", key)  # the negative of a flag
    if key in known or plain in known:
        return
    error = near("setting", key, known)
    leaf = [k for k in known if k.rsplit(".")[-1] == key]
    if leaf:
        error = ConfigError(f"unknown setting {key!r}: did you mean {leaf[0]!r}?")
    raise error


def _one_line(text: str) -> str:
    """Return the message inside tyro's box."""
    text = re.sub(r"[│╭╮╰╯─┃]|-{4,}", " ", re.split("Argument helptext|For full helptext", text)[0])
    text = re.sub(r"^\s*(Value error|Parsing error|Invalid choice)", " ", text)
    words = " ".join(text.split()).removeprefix("Error parsing ")
    words = re.sub(r"^([A-Z][a-z]+ options) (?=\1: )", "", words)  # title and text alike
    return re.sub(r"^[A-Za-z.]+: (?=[a-z])", "", words) or "the arguments cannot be parsed"


def _merge(node: Any, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(type(node))
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in hints:
            siblings = [prefix + f.name for f in fields(node)]
            raise near("setting", prefix + key, siblings)
        current = getattr(node, name)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"setting {prefix + key!r} is a section, got {value!r}")
            changes[name] = _merge(current, value, f"{prefix}{name}.")
        else:
            changes[name] = _convert(prefix + name, value, hints[name])
    return replace(node, **changes)


def _convert(name: str, value: Any, hint: Any) -> Any:
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value in choices and not isinstance(value, bool):
            return value
        raise ConfigError(f"setting {name!r} must be one of {choices}, got {value!r}")
    if origin is tuple:
        if isinstance(value, list | tuple) and len(value) == len(choices):
            return tuple(_convert(name, v, c) for v, c in zip(value, choices, strict=True))
        raise ConfigError(f"setting {name!r} must be {len(choices)} values, got {value!r}")
    if isinstance(hint, types.UnionType):
        raise ConfigError(f"setting {name!r} has a type that files cannot hold")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"setting {name!r} must be {hint.__name__}, got {value!r}")
    return value


def _flatten(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
