"""Which compressed arms fit a configuration's mesh, by link; and a configuration as a TOML file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.train.config import Config, Systems
from thinwire.train.recipes import recipe
from thinwire.train.support import asked_for, refusal

__all__ = [
    "AS_GIVEN", "AXIS_OF", "BRIEF", "LINK_OF", "candidates", "check_used", "dense_twin", "joined",
    "to_toml",
]  # fmt: skip

# The name of the arm that is the configuration as it stands, where no recipe's arm is that.
AS_GIVEN = "as given"

# Recipes whose systems are tried, per link they concern; an arm of "weights" may bring gradients.
_ARMS = {
    "weights": ("static-8bit", "static-6bit", "aquavit", "aquavit-keep-wire", "aquavit-grad4",
                "zeropp"),
    "tensor": ("taco", "taco-merged", "taco-int8"),
    "gradients": ("scape-90", "scape-99"),
    "pipeline": ("subspace-pp",),
    "outer": ("diloco-int8", "sparseloco"),
}  # fmt: skip
LINK_OF = {name: link for link, names in _ARMS.items() for name in names}
# What `compress = "auto"` weighs, alone and joined: few, as its brief probe times all their codecs.
BRIEF = {
    "weights": ("static-8bit", "aquavit", "aquavit-grad4", "zeropp"),
    "gradients": ("scape-90",),
    "tensor": ("taco",),
}
AXIS_OF = {
    "weights": "dp_shard",
    "tensor": "tp",
    "gradients": "dp_replicate",
    "pipeline": "pp",
    "outer": "dp_replicate",
}
_NODES = {
    "weights": ("weights", "gradients"),
    "tensor": ("tensor",),
    "gradients": ("replicas",),
    "pipeline": ("pipeline",),
    "outer": ("outer",),
}


def dense_twin(config: Config) -> Config:
    """Return the configuration with nothing compressed, replicas that agree every step.

    Unlike replicas keep their rounds, which they can't do without; their boundaries are dense.
    """
    kept = replace(config.systems.replicas, optimizer="adamw")
    if config.systems.replicas.optimizer in ("adams", "scape"):
        kept = replace(kept, optimizer="adams")
    systems = Systems(storage=config.systems.storage, replicas=kept)
    if config.mesh.replicas:
        bare = " ".join(word.partition(":")[0] for word in config.mesh.replicas.split())
        systems = replace(systems, outer=config.systems.outer)
        config = replace(config, mesh=replace(config.mesh, replicas=bare))
    return replace(config, recipe="dense", compress="given", systems=systems)


def candidates(config: Config, sizes: Mapping[str, int]) -> dict[str, Config]:
    """Return arm name -> the dense twin with that arm's systems, for the axes that have ranks.

    Arms that do not go together with what stays of the configuration are left out; the
    configuration itself is one, `AS_GIVEN`, where it is neither dense nor one of the others.
    Replicas that train apart (outer rounds) change what is learnt in a step; they are offered where
    the configuration asks for rounds already.
    """
    dense, found = dense_twin(config), {}
    for link, names in () if config.mesh.replicas else _ARMS.items():
        if sizes[AXIS_OF[link]] == 1:
            continue
        if link == "outer" and config.systems.outer.method == "none":
            continue
        for name in names:
            arm = _with_arm(dense, config, link, name)
            if refusal(asked_for(arm)) is None:
                found[name] = arm
    known = [dense.systems, *(arm.systems for arm in found.values())]
    if config.systems not in known and _used(config.systems, sizes):
        found[AS_GIVEN] = replace(config, recipe=AS_GIVEN, compress="given")
    return found


def check_used(systems: Systems, sizes: Mapping[str, int]) -> None:
    """Refuse systems whose link has no ranks here: set-up would refuse them later.

    Raises:
        ConfigError: naming the axis.
    """
    plain = Systems()
    uses = {
        "dp_shard": (systems.weights, systems.gradients) != (plain.weights, plain.gradients),
        "tp": systems.tensor != plain.tensor,
        "dp_replicate": systems.replicas.optimizer not in ("adamw", "adams"),
    }
    for axis, used in uses.items():
        if used and sizes[axis] == 1 and sum(sizes.values()) > len(sizes):
            raise ConfigError(f"it compresses what crosses mesh.{axis}, which has one rank here")


def _used(systems: Systems, sizes: Mapping[str, int]) -> bool:
    try:
        check_used(systems, sizes)
    except ConfigError:
        return False
    return True


def _with_arm(dense: Config, config: Config, link: str, name: str) -> Config:
    arm = recipe(name)
    nodes = {node: getattr(arm.systems, node) for node in _NODES[link]}
    if link == "outer":
        every = config.systems.outer.sync_every
        nodes["outer"] = replace(arm.systems.outer, sync_every=every)
    return replace(dense, recipe=name, systems=replace(dense.systems, **nodes))


def joined(config: Config, names: Sequence[str]) -> Config:
    """Return the dense twin with the systems of several arms, one per link, or what was given."""
    if AS_GIVEN in names:
        return replace(config, compress="given")
    made = dense_twin(config)
    for name in names:
        made = _with_arm(made, config, LINK_OF[name], name)
    return replace(made, recipe="+".join(names) or "dense")


def to_toml(config: Config) -> str:
    """Return the settings that differ from the defaults, as TOML that `--config` reads.

    Raises:
        ConfigError: a value that TOML cannot hold.
    """
    lines: list[str] = []
    _write(asdict(config), asdict(Config()), "", lines)
    return "\n".join(lines) + "\n"


def _write(values: Mapping[str, Any], base: Mapping[str, Any], prefix: str, lines: list[str]
           ) -> None:  # fmt: skip
    plain = {k: v for k, v in values.items() if not isinstance(v, dict) and v != base[k]}
    if plain and prefix:
        lines += ["", f"[{prefix[:-1]}]"]
    lines += [f"{key} = {_text(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, dict):
            _write(value, base[key], f"{prefix}{key}.", lines)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)  # a TOML basic string where no character is beyond U+FFFF
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_text(v) for v in value) + "]"
    raise ConfigError(f"a configuration file cannot hold {value!r}")
