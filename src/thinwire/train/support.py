"""Which methods go together: the one table behind the set-up check, `thinwire recipes --support`
and docs/support.md.

A set of methods is supported unless a rule below names a part of it. Rules of two methods come
first, then those of three; tests train every pair and triple without a rule, and have every other
one refused. Nothing here imports torch.
"""  # noqa: D205

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from thinwire.errors import ConfigError
from thinwire.train.config import Config

__all__ = ["METHODS", "Method", "asked_for", "check_together", "exclusive", "refusal"]


@dataclass(frozen=True)
class Method:
    """One thing that a configuration can ask for.

    Attributes:
        key: its name in the table.
        does: what it does, in a few words.
        setting: the setting that asks for it.
        values: of the setting, all that ask for it.
        axis: the mesh axis whose traffic it shrinks, "" for none.
    """

    key: str
    does: str
    setting: str
    values: tuple[str, ...]
    axis: str

    def asked(self, config: Config) -> bool:
        """Return whether the configuration asks for it."""
        return self.value(config) in self.values

    def value(self, config: Config) -> str:
        """Return what the setting is."""
        _, node, leaf = self.setting.split(".")
        return str(getattr(getattr(config.systems, node), leaf))

    def said(self, config: Config) -> str:
        """Return setting and value, as an error names them."""
        return f"{self.setting} {self.value(config)}"


METHODS: dict[str, Method] = {
    method.key: method
    for method in (
        Method(
            "weights",
            "compressed weight gathers: Aquavit and its rivals",
            "systems.weights.codec",
            ("bf16", "static", "aquavit", "difference"),
            "dp_shard",
        ),
        Method(
            "gradients",
            "compressed gradient reduce-scatter",
            "systems.gradients.codec",
            ("int8", "int4"),
            "dp_shard",
        ),
        Method(
            "tensor",
            "compressed tensor-parallel messages: TACO and its rivals",
            "systems.tensor.codec",
            ("hadamard", "tensorwise"),
            "tp",
        ),
        Method(
            "constrained",
            "pipeline boundaries in a subspace that weights keep to",
            "systems.pipeline.mode",
            ("constrained",),
            "pp",
        ),
        Method(
            "lossy",
            "pipeline boundaries projected on the wire alone",
            "systems.pipeline.mode",
            ("lossy",),
            "pp",
        ),
        Method(
            "storage",
            "weights stored quantized: ECO and its rivals",
            "systems.storage.fmt",
            ("fp8_e4m3", "int8", "int4", "bf16"),
            "",
        ),
        Method(
            "sparse",
            "sparse sync of replicas in every step: Scape, top-k",
            "systems.replicas.optimizer",
            ("scape", "topk-adamw"),
            "dp_replicate",
        ),
        Method(
            "baseline",
            "published syncs of whole replicas: DGC, DeMo, PowerSGD",
            "systems.replicas.optimizer",
            ("dgc", "demo", "powersgd", "powersgd-ddp"),
            "dp_replicate",
        ),
        Method(
            "sparseloco",
            "replicas that train apart and exchange sparse messages",
            "systems.outer.method",
            ("sparseloco",),
            "dp_replicate",
        ),
        Method(
            "diloco",
            "replicas that train apart and exchange dense averages",
            "systems.outer.method",
            ("diloco",),
            "dp_replicate",
        ),
    )
}

_WHOLE = (
    "the optimizer synchronizes whole replicas of one rank each: take scape, or set the other one "
    "to dense"
)
_STEPS = (
    "EcoAdamW, which steps stored weights, has no sparse form: set systems.replicas.optimizer "
    "adamw (systems.outer goes with stored weights)"
)
_APART = (
    "replicas that train apart exchange nothing in a step: set systems.replicas.optimizer adamw or "
    "adams, or systems.outer.method none"
)
_ONE_STAGE = (
    "a rank of mesh.replicas, where pipelines train apart, holds one whole float32 stage: set the "
    "third one to dense"
)

_PAIRS: Mapping[tuple[str, ...], str] = {
    **{
        (other, "baseline"): _WHOLE
        for other in ("weights", "gradients", "tensor", "constrained", "lossy")
    },
    ("storage", "sparse"): _STEPS,
    ("storage", "baseline"): _STEPS,
    ("constrained", "storage"): (
        "a stored weight lies on a grid and a constrained one in a subspace, it cannot do both: "
        "set systems.pipeline.mode lossy"
    ),
    **{
        (sync, outer): _APART
        for sync in ("sparse", "baseline")
        for outer in ("sparseloco", "diloco")
    },
    **{
        (mode, "diloco"): (
            "pipelines that train apart exchange messages per stage: set systems.outer.method "
            "sparseloco and mesh.replicas"
        )
        for mode in ("constrained", "lossy")
    },
}

_TRIPLES: Mapping[tuple[str, ...], str] = {
    tuple(sorted((mode, "sparseloco", third), key=list(METHODS).index)): _ONE_STAGE
    for mode in ("constrained", "lossy")
    for third in ("weights", "gradients", "tensor", "storage")
}


def exclusive(keys: Iterable[str]) -> bool:
    """Return whether two of the methods are values of one setting."""
    settings = [METHODS[key].setting for key in keys]
    return len(set(settings)) < len(settings)


def refusal(keys: Collection[str]) -> tuple[tuple[str, ...], str] | None:
    """Return which of the methods do not go together and why; None if all do."""
    ordered = [key for key in METHODS if key in keys]
    for rules, size in ((_PAIRS, 2), (_TRIPLES, 3)):
        for part in combinations(ordered, size):
            reason = rules.get(part)
            if reason is not None:
                return part, reason
    return None


def asked_for(config: Config) -> list[str]:
    """Return the methods that a configuration asks for."""
    return [key for key, method in METHODS.items() if method.asked(config)]


def check_together(config: Config) -> None:
    """Refuse methods that do not go together.

    Raises:
        ConfigError: names their settings and why.
    """
    found = refusal(asked_for(config))
    if found is not None:
        part, reason = found
        named = [METHODS[key].said(config) for key in part]
        raise ConfigError(f"{', '.join(named[:-1])} and {named[-1]} do not go together: {reason}")
    if config.mesh.replicas:
        return
    boundaries = config.systems.pipeline.mode != "none"
    if boundaries and config.systems.outer.method == "sparseloco" and config.mesh.pp != 1:
        ranks = _as_replicas(config)
        raise ConfigError(
            f"systems.pipeline.mode and systems.outer.method go together in mesh.replicas: say "
            f'--mesh.replicas "{ranks}" in place of the axes'
        )


def _as_replicas(config: Config) -> str:
    """Return two pipelines of the configuration's stages, as mesh.replicas spells them."""
    stages = max(2, config.mesh.pp)
    ratio = config.systems.pipeline.ratio
    ranks = [[str(first + i) for i in range(stages)] for first in (0, stages)]
    return " ".join(f"{','.join(replica)}:{ratio}" for replica in ranks)
