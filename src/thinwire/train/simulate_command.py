"""`thinwire simulate`: a run on a described cluster, from 2 to 10,000 ranks, over link speeds."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, RunError
from thinwire.plan import Cluster, ClusterCosts, Costs, Workload
from thinwire.plan.cluster import LEAST, MOST
from thinwire.plan.simulate import MAX_RANKS, Stragglers, Sweep, sweep
from thinwire.train.arguments import Arguments
from thinwire.train.axes import check_ranks, parse_replicas, resolve_axes
from thinwire.train.candidates import LINK_OF, candidates, dense_twin
from thinwire.train.config import Config
from thinwire.train.parse import config_from_args, load, near
from thinwire.train.plan_command import ONLY_GIVEN, replica_speeds
from thinwire.train.recipes import DEFAULT, recipe
from thinwire.train.workload import workload

__all__ = ["FORMAT", "main", "simulate"]

FORMAT = "thinwire.simulate/1"
RANKS = "2,4,8,16,32,64,128,256,512,1024,2048,4096,10000"
DESCRIPTION = """\
Simulate a run on a cluster described in TOML: step time, scaling efficiency and hours over numbers
of ranks and over speeds of the slowest link. RECIPE gives model, mesh and the batch of its first
number of ranks. Settings as for `thinwire train`: --model.dim 1024."""

WritePage = Callable[[dict[str, Any], Path], Path]


def main(args: Sequence[str], write_page: WritePage) -> int:
    """Simulate, print a table, write page and JSON."""
    words = list(args)
    name = words.pop(0) if words and not words[0].startswith("-") else None
    given, rest = _parser().parse_known_args(words)
    if name is not None and given.config is not None:
        raise ConfigError("give a recipe or --config FILE, not both")
    base = load(given.config) if given.config is not None else recipe(name or DEFAULT)
    config = config_from_args(rest, base)
    for path in (given.out, given.json):
        if path:
            _check_writable(Path(path))
    if given.cluster is None:
        raise ConfigError("--cluster FILE is missing: nodes, links and devices in TOML")
    result = simulate(
        config,
        Cluster.read(given.cluster),
        ranks=_numbers(given.ranks or _ranks(config), int, "--ranks"),
        gbit_per_s=_numbers(given.gbit_per_s, float, "--gbit-per-s"),
        arms=tuple(given.arms or ()),
        scaling=given.scaling,
        tokens=given.tokens,
        stragglers=Stragglers(
            jitter=given.jitter, slow_share=given.slow_share, slow_factor=given.slow_factor
        ),
    )
    result["command"] = "thinwire simulate " + " ".join(args)
    if given.json:
        try:
            Path(given.json).write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise RunError(f"{given.json} cannot be written: {error.strerror}") from None
    page = write_page(result, Path(given.out))
    with suppress(BrokenPipeError):
        sys.stdout.write(_text(result) + f"\nreport: {page}\n")
    return 0


def simulate(
    config: Config,
    cluster: Cluster,
    *,
    ranks: Sequence[int],
    gbit_per_s: Sequence[float],
    arms: Sequence[str] = (),
    scaling: str = "weak",
    tokens: float | None = None,
    stragglers: Stragglers | None = None,
) -> dict[str, Any]:
    """Return the sweeps of the dense run, the configuration's own and further arms.

    Args:
        config: model, mesh (one axis -1), and the batch at the first number of ranks.
        cluster: the hardware; nodes are added or left away to hold the ranks.
        ranks: ascending numbers.
        gbit_per_s: ascending speeds of the slowest kind of link, at the largest number of ranks.
        arms: further recipes whose systems are simulated.
        scaling: "weak" lets the batch grow with the data ranks, "strong" keeps it.
        tokens: of the whole run, for its hours; None: no hours.
        stragglers: how ranks differ.

    Raises:
        ConfigError: ranks or arms that the mesh cannot take, or values out of range.
    """
    _check(ranks, gbit_per_s, scaling)
    scale = _Scale(config, cluster, ranks[0], scaling)
    configs = _arms(config, scale.sizes(ranks[0]), arms)
    slow_site = cluster.sites.slowest if cluster.sites is not None and not scale.speeds else 1.0
    found: dict[str, list[Sweep]] = {"ranks": [], "links": []}
    for name, one in configs.items():
        settings: dict[str, Any] = {
            "total_tokens": tokens, "stragglers": stragglers, "compute_scale": slow_site
        }  # fmt: skip
        found["ranks"].append(sweep(name, ranks, scale.by_ranks(one), **settings))
        if gbit_per_s:
            by_speed = scale.by_speed(one, ranks[-1])
            found["links"].append(sweep(name, gbit_per_s, by_speed, **settings))
    return {
        "format": FORMAT,
        "scaling": scaling,
        "tokens": tokens,
        "largest": ranks[-1],
        "by_ranks": [one.to_dict() for one in found["ranks"]],
        "by_link": [_over_dense(one, found["links"][0]) for one in found["links"]],
        "notes": _too_large(found["ranks"], cluster.device.memory_gbyte),
    }


def _over_dense(one: Sweep, dense: Sweep) -> dict[str, Any]:
    """Return a sweep over link speeds: over these, the speed-up counts in place of efficiency."""
    values = one.to_dict()
    del values["efficiency"]
    pairs = zip(dense.step_s, one.step_s, strict=True)
    return values | {"speedup": tuple(base / step_s for base, step_s in pairs)}


def _too_large(sweeps: Sequence[Sweep], memory_gbyte: float) -> list[str]:
    """Return one line that names the runs that don't fit a device's memory, or nothing."""
    if not memory_gbyte:
        return []
    found = []
    for one in sweeps:
        pairs = zip(one.at, one.memory_bytes, strict=True)
        large = {f"{at:.0f}": nbytes for at, nbytes in pairs if nbytes > 1e9 * memory_gbyte}
        if large:
            most = max(large.values()) / 1e9
            found.append(f"{one.name} on {', '.join(large)} ranks (up to {most:.3g} GB)")
    if not found:
        return []
    return [f"more than a device's {memory_gbyte:.3g} GB, an estimate: {'; '.join(found)}"]


def _check_writable(path: Path) -> None:
    """Refuse, before the work, a file that cannot be written after it."""
    if path.is_dir():
        raise RunError(f"{path} is a directory: name a file")
    there = path.parent
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(path if path.exists() else there, os.W_OK):
        raise RunError(f"{path} cannot be written: {there} is no folder to write in")


class _Scale:
    """Gives workload and costs of a configuration at a number of ranks or a link speed."""

    def __init__(self, config: Config, cluster: Cluster, first: int, scaling: str) -> None:
        self.cluster, self.scaling = cluster, scaling
        self.config = config
        sizes = self.sizes(first)
        self.parts = sizes["dp_replicate"] * sizes["dp_shard"]
        self.speeds = replica_speeds(config, cluster.sites, sizes["dp_replicate"])

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Return the mesh at a number of ranks."""
        if self.config.mesh.replicas:
            return check_ranks(self.config, num_ranks)
        return resolve_axes(self.config.mesh, num_ranks)

    def at(self, config: Config, num_ranks: int, cluster: Cluster) -> tuple[Workload, Costs]:
        """Return workload and costs."""
        sizes = self.sizes(num_ranks)
        data = config.data
        if self.scaling == "weak":
            parts = sizes["dp_replicate"] * sizes["dp_shard"]
            data = replace(data, batch_seqs=data.batch_seqs * parts // self.parts)
        made = workload(
            replace(config, data=data),
            num_ranks,
            overlap=cluster.prefetch > 0,
            prefetch=cluster.prefetch,
            speeds=self.speeds,
        )
        return made, self.costs(cluster.with_nodes(num_ranks), sizes, num_ranks)

    def costs(self, cluster: Cluster, sizes: dict[str, int], num_ranks: int) -> ClusterCosts:
        """Return what operations cost on a cluster."""
        return ClusterCosts(cluster, sizes, num_ranks if self.config.mesh.replicas else 0)

    def by_ranks(self, config: Config) -> Callable[[float], tuple[Workload, Costs]]:
        """Return what `sweep` asks over ranks."""
        return lambda num: self.at(config, int(num), self.cluster)

    def by_speed(self, config: Config, num_ranks: int) -> Callable[[float], tuple[Workload, Costs]]:
        """Return what `sweep` asks over link speeds."""
        made, _ = self.at(config, num_ranks, self.cluster)
        sizes, cluster = self.sizes(num_ranks), self.cluster.with_nodes(num_ranks)
        costs = self.costs(cluster, sizes, num_ranks)
        wire = costs.wire("pp") if self.config.mesh.replicas else costs.slowest_wire

        def make(speed: float) -> tuple[Workload, Costs]:
            return made, replace(costs, cluster=cluster.with_speed(wire, speed))

        return make


def _check(ranks: Sequence[int], gbit_per_s: Sequence[float], scaling: str) -> None:
    if scaling not in ("weak", "strong"):
        raise ConfigError(f"--scaling must be weak or strong, got {scaling!r}")
    if (
        not ranks
        or list(ranks) != sorted(set(ranks))
        or not 1 <= ranks[0] <= ranks[-1] <= MAX_RANKS
    ):
        raise ConfigError(f"--ranks must rise and lie between 1 and {MAX_RANKS}, got {list(ranks)}")
    speeds = list(gbit_per_s)
    if speeds != sorted(set(speeds)) or any(not LEAST <= speed <= MOST for speed in speeds):
        raise ConfigError(
            f"--gbit-per-s must rise and be above 0, from {LEAST:g} to {MOST:g}, got {speeds}"
        )


def _arms(config: Config, sizes: dict[str, int], names: Sequence[str]) -> dict[str, Config]:
    """Return the dense run, the configuration as it is, and the arms asked for."""
    found = {"dense": dense_twin(config)}
    if config.systems != found["dense"].systems:
        found[config.recipe or "as configured"] = config
    fitting = candidates(config, sizes)
    if names and config.mesh.replicas:
        raise ConfigError(ONLY_GIVEN)
    for name in names:
        if name not in LINK_OF:
            raise near("arm", name, list(LINK_OF))
        if name not in fitting:
            raise ConfigError(f"arm {name} compresses link {LINK_OF[name]}: not on this mesh")
        found[name] = fitting[name]
    return found


def _ranks(config: Config) -> str:
    """Return the numbers of ranks that are simulated unless told otherwise."""
    replicas = parse_replicas(config.mesh.replicas)
    return str(sum(len(table["ranks"]) for table in replicas)) if replicas else RANKS


def _numbers(text: str, kind: type, flag: str) -> list[Any]:
    try:
        return [kind(word) for word in text.split(",") if word]
    except ValueError:
        raise ConfigError(f"{flag} must be numbers like 2,8,64, got {text!r}") from None


def _parser() -> Arguments:
    parser = Arguments(
        prog="thinwire simulate",
        usage=f"thinwire simulate [RECIPE={DEFAULT}] --cluster FILE [options]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="a TOML file or run.json in place of a recipe")
    add("--cluster", metavar="FILE", help="the cluster, TOML")
    add(
        "--ranks",
        help=f"numbers of ranks (default {RANKS}; of mesh.replicas, those that it names)",
    )
    add("--gbit-per-s", default="0.1,0.3,1,3,10,30,100,300,1000", help="speeds of the slowest link")
    add("--arms", nargs="+", metavar="ARM", help="further recipes whose systems are simulated")
    add("--scaling", default="weak", help="weak: the batch grows with the ranks; strong: it stays")
    add("--tokens", type=float, help="tokens of the whole run: gives its hours")
    add("--jitter", type=float, default=0.0, help="relative deviation of a rank's computation")
    add("--slow-share", type=float, default=0.0, help="probability that a rank is slow")
    add("--slow-factor", type=float, default=1.0, help="how many times slower it is")
    add("--json", metavar="FILE", help="write the numbers")
    add("--out", default="simulate.html", help="the page (default simulate.html)")
    return parser


def _text(result: dict[str, Any]) -> str:
    timed = result["tokens"] is not None
    rows = [["arm", "ranks", "step", "efficiency", *["hours"] * timed]]
    for one in result["by_ranks"]:
        for i, at in enumerate(one["at"]):
            row = [one["name"], f"{at:.0f}", f"{one['step_s'][i]:.4f} s"]
            row += [f"{one['efficiency'][i]:.1%}", *[_hours(h) for h in one["hours"][i : i + 1]]]
            rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join([*lines, *result["notes"]])


def _hours(value: float) -> str:
    return "under 0.001" if value < 0.001 else f"{value:,.3f}" if value < 100 else f"{value:,.0f}"
