"""The arms of a comparison: recipes with settings of their own, as text and as configurations."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError
from thinwire.train.parse import config_from_args, to_dict
from thinwire.train.recipes import recipe

__all__ = ["Arm", "arm_config", "parse_arm", "parse_settings", "setting_words"]

# What all arms of a comparison share; an arm that changed one would not be comparable.
_SHARED = {
    "steps": "--steps",
    "seed": "--seeds",
    "out": "--out",
    "nproc": "--nproc",
    "data": "--data",
    "data.source": "--data",
    "stop_after": "--steps",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """A recipe with the settings it changes.

    Attributes:
        name: the text the arm was given as.
        recipe: the recipe's name.
        settings: (dotted key, value) pairs, the arm's own ones last.
    """

    name: str
    recipe: str
    settings: tuple[tuple[str, str], ...]

    @property
    def folder(self) -> str:
        """Return a directory name; a hash keeps arms apart whose names had to be changed."""
        name = re.sub(r"[^A-Za-z0-9._=-]+", "_", self.name)[:80].strip("._")
        if name == self.name:
            return name
        return f"{name}-{hashlib.sha256(self.name.encode()).hexdigest()[:6]}"

    @property
    def arguments(self) -> list[str]:
        """Return the settings as arguments of `thinwire train`."""
        return [word for key, value in self.settings for word in setting_words(key, value)]


def parse_arm(text: str, common: Sequence[tuple[str, str]] = ()) -> Arm:
    """Read an arm: `recipe` or `recipe:key=value,key=value`.

    A key is dotted (`model.dim`) or the last part of one where that is unique (`lr`).

    Args:
        text: the arm.
        common: settings of all arms, which the arm's own ones override.

    Raises:
        ConfigError: malformed text, an unknown recipe or key, a value that doesn't fit, or a
            setting that all arms must share.
    """
    name, colon, rest = text.partition(":")
    if colon and not rest:
        raise ConfigError(f"arm {text!r} ends with a colon: recipe:key=value,key=value")
    try:
        known = _leaves(to_dict(recipe(name)), "")
        own = parse_settings(rest.split(",") if rest else [])
        settings = {_full_key(key, known): value for key, value in (*common, *own)}
        arm = Arm(text, name, tuple(settings.items()))
        arm_config(arm, [])
    except ConfigError as error:
        raise ConfigError(f"arm {text!r}: {error}") from None
    return arm


def parse_settings(items: Sequence[str]) -> list[tuple[str, str]]:
    """Read `key=value` items.

    Raises:
        ConfigError: an item of another form, or a key given twice.
    """
    settings: dict[str, str] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals or not value:
            raise ConfigError(f"{item!r} is not of the form key=value")
        if key in settings:
            raise ConfigError(f"{key} is set twice")
        settings[key] = value
    return list(settings.items())


def arm_config(arm: Arm, shared: Sequence[str]) -> dict[str, Any]:
    """Return the whole configuration of an arm, as run.json would hold it.

    Args:
        arm: the arm.
        shared: further arguments of `thinwire train`.

    Raises:
        ConfigError: a setting that doesn't exist or a value that doesn't fit.
    """
    return to_dict(config_from_args([*shared, *arm.arguments], recipe(arm.recipe)))


def setting_words(key: str, value: str) -> list[str]:
    """Return `--key value`; truth values are flags there, and tuples several words."""
    if value in ("true", "True"):
        return [f"--{key}"]
    if value in ("false", "False"):
        section, dot, leaf = key.rpartition(".")
        return [f"--{section}{dot}no-{leaf}"]
    return [f"--{key}", *value.split()]


def _full_key(key: str, known: Sequence[str]) -> str:
    full = key.replace("-", "_")
    if full not in known and "." not in full:
        matches = [name for name in known if name.endswith(f".{full}")]
        if len(matches) > 1:
            raise ConfigError(f"setting {key!r} could be {' or '.join(matches)}: give it in full")
        full = matches[0] if matches else full
    if full in _SHARED:
        raise ConfigError(f"{key} must be the same for all arms: set it with {_SHARED[full]}")
    return full


def _leaves(tree: Mapping[str, Any], prefix: str) -> list[str]:
    leaves: list[str] = []
    for key, value in tree.items():
        leaves += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return leaves
