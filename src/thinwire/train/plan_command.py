"""`thinwire plan`: step time of the dense run and of every arm that fits, and what to use."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from thinwire.errors import ConfigError, RunError
from thinwire.plan import (
    Cluster,
    ClusterCosts,
    Costs,
    Links,
    MeasuredCosts,
    Prediction,
    Sites,
    predict,
)
from thinwire.plan.advice import Advice, advise
from thinwire.plan.cluster import MOST
from thinwire.plan.predict import Arm, crossing, seconds_text
from thinwire.plan.workload import Workload
from thinwire.train.arguments import Arguments
from thinwire.train.axes import check_ranks
from thinwire.train.candidates import AS_GIVEN, LINK_OF, candidates, dense_twin, joined, to_toml
from thinwire.train.config import Config
from thinwire.train.parse import config_from_args, load, near
from thinwire.train.recipes import DEFAULT, recipe
from thinwire.train.workload import workload

__all__ = ["main", "make_advice"]

# Link speeds, Gbit/s, between which a break-even is looked for where messages overlap.
SPEEDS = (1e-3, 1e5)
DESCRIPTION = """\
Predict the step time of the dense run and of the arms that fit a mesh, say which pay and why
others don't, and recommend one configuration. RECIPE gives model, batch and mesh; what it
compresses is one arm. Settings as for `thinwire train`: --model.dim 1024."""


def main(args: Sequence[str]) -> int:
    """Predict, print the table, write files."""
    words = list(args)
    name = words.pop(0) if words and not words[0].startswith("-") else None
    given, rest = _parser().parse_known_args(words)
    config = _config(name, given.config, rest)
    advice = make_advice(
        config, given.links, given.cluster, given.nproc, given.step_s, tuple(given.arms or ())
    )
    chosen = replace(joined(config, advice.chosen), out=config.out)
    runs = advice.fits(advice.best)
    if given.write and runs:
        _save(Path(given.write), to_toml(chosen))
    if given.json:
        _save(Path(given.json), json.dumps(advice.to_dict(), indent=1) + "\n")
    with suppress(BrokenPipeError):
        sys.stdout.write(_text(advice))
        if given.write and runs:
            sys.stdout.write(f"configuration in {given.write}: thinwire train --config "
                             f"{given.write}\n")  # fmt: skip
    if given.write and not runs:
        raise ConfigError(f"{given.write} is not written: no run fits [device] memory_gbyte")
    return 0


def make_advice(
    config: Config,
    links: str | Path | None,
    cluster: str | Path | None,
    num_ranks: int | None = None,
    step_s: float | None = None,
    arms: Sequence[str] = (),
) -> Advice:
    """Return the predictions and the recommendation for a configuration.

    Args:
        config: model, batch and mesh.
        links: links.json, or
        cluster: a cluster's TOML file.
        num_ranks: ranks; None: as many as the links or the cluster have.
        step_s: measured seconds of a step's arithmetic, in place of the links'.
        arms: recipes to try; empty: those that fit the mesh.

    Raises:
        ConfigError: not exactly one of links and cluster, or files, ranks and arms that don't fit.
    """
    if (links is None) == (cluster is None):
        raise ConfigError("give --links FILE (of `thinwire probe`) or --cluster FILE (TOML)")
    if links is not None and config.mesh.replicas:
        raise ConfigError("unlike replicas are planned on a described cluster: give --cluster FILE")
    probed = Links.read(links) if links is not None else None
    described = Cluster.read(cluster) if cluster is not None else None
    if described is not None and step_s is not None:
        raise ConfigError("--step-s goes with --links: a cluster's speed stands in its [device]")
    if step_s is not None and not 0 < step_s <= MOST:
        raise ConfigError(f"--step-s must be above 0 and finite, got {step_s}")
    if num_ranks is not None and num_ranks < 1:
        raise ConfigError(f"--nproc must be at least 1, got {num_ranks}")
    total = num_ranks or (
        probed.world_size if probed else described.num_devices if described else 0
    )
    sizes = check_ranks(config, total)
    costs: Costs
    if probed is not None:
        costs = MeasuredCosts(probed, sizes, step_s)
    else:
        assert described is not None
        costs = ClusterCosts(described, sizes, total if config.mesh.replicas else 0)
    return _Planner(config, sizes, total, costs, described).advice(arms)


ONLY_GIVEN = (
    "of unlike replicas, the configuration as given is weighed beside dense boundaries: give "
    "ratios in mesh.replicas (0 1,2:8) with systems.pipeline.mode constrained, and no arms"
)


def replica_speeds(config: Config, sites: Sites | None, num_replicas: int) -> tuple[float, ...]:
    """Return the speed of each unlike replica's site; empty for equal replicas or without sites."""
    if not config.mesh.replicas or sites is None or not sites.speeds:
        return ()
    return tuple(sites.speeds[i * sites.count // num_replicas] for i in range(num_replicas))


class _Planner:
    """Predicts configurations over one mesh and one set of costs."""

    def __init__(
        self,
        config: Config,
        sizes: Mapping[str, int],
        num_ranks: int,
        costs: Costs,
        cluster: Cluster | None,
    ) -> None:
        self.config, self.sizes, self.num_ranks, self.costs = config, sizes, num_ranks, costs
        self.cluster = cluster
        # Devices of a cluster overlap; links.json is of gloo on CPU, which doesn't.
        self.prefetch = cluster.prefetch if cluster is not None else 0
        sites = cluster.sites if cluster is not None else None
        self.speeds = replica_speeds(config, sites, sizes["dp_replicate"])
        self.slowdown = sites.slowest if sites is not None and not self.speeds else 1.0
        self.made: dict[str, Workload] = {}

    def predict(self, config: Config) -> Prediction:
        """Return a configuration's prediction."""
        overlap = self.prefetch > 0
        made = workload(
            config, self.num_ranks, overlap=overlap, prefetch=self.prefetch, speeds=self.speeds
        )
        self.made[made.name] = made
        return predict(made, self.costs, slowdown=self.slowdown)

    def _with_crossing(self, arm: Arm) -> Arm:
        """Return the arm with the break-even speed that overlapped messages give."""
        cluster, described = self.cluster, self.costs
        if cluster is None or not self.prefetch or not isinstance(described, ClusterCosts):
            return arm
        # Unlike replicas differ from their twin in what crosses between stages.
        wire = described.wire("pp") if self.config.mesh.replicas else described.slowest_wire

        def speedup(gbit_per_s: float) -> float:
            costs = replace(described, cluster=cluster.with_speed(wire, gbit_per_s))
            dense, other = (
                predict(self.made[n], costs, slowdown=self.slowdown)
                for n in ("dense", arm.prediction.name)
            )
            return dense.step_s / other.step_s

        found = crossing(speedup, *SPEEDS)
        return replace(arm, break_even_bits_per_s=None if found is None else 1e9 * found)

    def advice(self, names: Sequence[str]) -> Advice:
        """Return what to use among the named arms, or all that fit."""
        fitting = candidates(self.config, self.sizes)
        if self.config.mesh.replicas and (set(names) - {AS_GIVEN} or not fitting):
            raise ConfigError(ONLY_GIVEN)
        for name in names:
            if name == AS_GIVEN and name not in fitting:
                raise ConfigError("arm as given: what was given is dense here, or a recipe's arm")
            if name not in LINK_OF and name not in fitting:
                raise near("arm", name, list(LINK_OF))
            if name not in fitting:
                raise ConfigError(
                    f"arm {name} compresses link {LINK_OF[name]}, which this mesh doesn't have "
                    f"({_mesh(self.sizes)})"
                )
        chosen = {name: fitting[name] for name in names} if names else fitting
        dense = self.predict(dense_twin(self.config))
        arms, notes = {}, []
        for name, config in chosen.items():
            try:
                arms[name] = LINK_OF.get(name, ""), self.predict(config)
            except ConfigError as error:
                if name != AS_GIVEN or names:
                    raise ConfigError(f"arm {name}: {error}") from None
                notes.append(f"the configuration as given is not predicted: {error}")
        if notes and not arms:
            raise ConfigError(notes[0])
        limit = 1e9 * self.cluster.device.memory_gbyte if self.cluster is not None else 0.0
        advice = advise(dense, arms, self._together, limit)
        notes += self._beyond()
        crossed = tuple(map(self._with_crossing, advice.arms))
        return replace(advice, arms=crossed, notes=tuple(notes))

    def _beyond(self) -> list[str]:
        """Return lines about messages larger than any that was probed."""
        if not isinstance(self.costs, MeasuredCosts):
            return []
        largest: dict[tuple[str, str], tuple[int, int]] = {}
        for made in self.made.values():
            for key, sizes in self.costs.beyond(made).items():
                largest[key] = max(sizes, largest.get(key, sizes))
        return [
            f"{collective} on {axis}: messages of up to {_size(needed)} are beyond the largest "
            f"probed ({_size(probed)}), their seconds extrapolated: probe with larger --seconds "
            "and --max-mbytes"
            for (axis, collective), (needed, probed) in largest.items()
        ]

    def _together(self, names: Sequence[str]) -> Prediction | None:
        with suppress(ConfigError):
            return self.predict(joined(self.config, names))
        return None


def _config(name: str | None, file: str | None, rest: Sequence[str]) -> Config:
    if name is not None and file is not None:
        raise ConfigError("give a recipe or --config FILE, not both")
    base = load(file) if file is not None else recipe(name or DEFAULT)
    return config_from_args(rest, base)


def _parser() -> Arguments:
    parser = Arguments(
        prog="thinwire plan",
        usage=f"thinwire plan [RECIPE={DEFAULT}] (--links FILE | --cluster FILE) [options]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="a TOML file or run.json in place of a recipe")
    add("--links", metavar="FILE", help="links.json, which `thinwire probe` wrote")
    add("--cluster", metavar="FILE", help="a cluster in TOML, in place of links.json")
    add("--nproc", type=int, metavar="N", help="ranks (default: all of the links or cluster)")
    add("--step-s", type=float, metavar="S", help="seconds of a step's arithmetic, measured")
    add("--arms", nargs="+", metavar="ARM", help="recipes to try (default: all that fit the mesh)")
    add("--json", metavar="FILE", help="write the numbers")
    add("--write", metavar="FILE", help="write the recommended configuration as TOML")
    return parser


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def _mesh(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


def _text(advice: Advice) -> str:
    links = sorted({link for arm in (advice.dense, *(a.prediction for a in advice.arms))
                    for link in arm.exposed_s})  # fmt: skip
    head = ["arm", "step", "speed-up", "compute", "coding", *links]
    head += ["bubble", "sent", "memory", "pays below"]
    rows = [head, _row(advice, advice.dense, None, links)]
    rows += [_row(advice, arm.prediction, arm, links) for arm in advice.arms]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    lines += ["", *(f"{arm.prediction.name}: {arm.words}" for arm in advice.arms)]
    lines += ["", *(f"note: {note}" for note in advice.notes)] if advice.notes else []
    lines += ["", f"recommendation: {advice.words}", "", LEGEND]
    return "\n".join(lines) + "\n"


LEGEND = """\
seconds of a step, averaged over the run: compute, coding, waiting for each link's messages, and for
other pipeline stages (bubble); sent: bytes per rank and step, each link's of the pipeline
stage that sends most; memory: of a rank, an estimate, "!" where it is more than the device has;
pays below: speed of the slowest link at which the arm costs what it saves (with links.json: if
nothing were overlapped)."""


def _row(advice: Advice, found: Prediction, arm: Arm | None, links: Sequence[str]) -> list[str]:
    rate = arm.break_even_bits_per_s if arm is not None else None
    return [
        found.name,
        _seconds(found.step_s),
        "" if arm is None else f"{arm.speedup:.2f}x",
        _seconds(found.compute_s),
        _seconds(found.coding_s),
        *(_seconds(found.exposed_s.get(link, 0.0)) for link in links),
        _seconds(found.bubble_s),
        _size(sum(found.sent_bytes.values())),
        _size(sum(found.memory_bytes.values())) + ("" if advice.fits(found) else "!"),
        "" if rate is None else _rate(rate),
    ]


def _rate(bits_per_s: float) -> str:
    if bits_per_s == float("inf"):
        return "any"
    scale, unit = (1e12, "Tbit/s") if bits_per_s >= 1e12 else (1e9, "Gbit/s")
    return f"{bits_per_s / scale:.3g} {unit}"


def _seconds(value: float) -> str:
    return "-" if value == 0 else seconds_text(value)


def _size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.3g} {unit}"
        value /= 1000
    return ""
