"""compress = "auto": probe the links at the start, choose dense or compressed, compare as it runs.

1. List the arms: recipes that compress a link of this mesh, one link or several at once.
2. Probe links, the arms' codecs and this model's computation, for half of `auto.seconds`.
3. Take real dense steps for 15 %, if that holds some, with weights that are thrown away; what they
   took beyond the prediction is counted as computation.
4. Choose by predicted step time (`plan.choose`): the same on every rank.
5. Where dense steps were taken, take some with the chosen arm too, in what is left of the time; if
   they are slower than predicted, the next arm gets its turn; dense stays if none is faster.
6. The run goes on with the chosen settings, as if they had been given; run.json holds the choice,
   what was expected and what was measured.

What stands besides links (storage, pipeline, outer rounds, AdamS) stays as configured in every arm.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from thinwire import plan
from thinwire.errors import ConfigError
from thinwire.train.axes import check_ranks
from thinwire.train.candidates import AS_GIVEN, AXIS_OF, BRIEF, check_used
from thinwire.train.config import Config, Replicas, Systems
from thinwire.train.mesh import Layout
from thinwire.train.probing import probe_recipe, recipe_work
from thinwire.train.recipes import recipe
from thinwire.train.trial import Steps, calibrated_s, try_arms
from thinwire.train.workload import workload

__all__ = ["AutoRun", "arms_of", "choose_systems", "settled"]

LINKS = ("weights", "gradients", "tensor", "replicas")
MAX_NBYTES = 2**28
# Of `auto.seconds`: the probe, then dense steps; arms are tried in the rest.
PROBE_SHARE, DENSE_SHARE = 0.5, 0.15


@dataclass
class AutoRun:
    """An automatic choice on its way through the run.

    Attributes:
        choice: what was chosen.
        measured: the run's steps beside it.
        links: what the probe found, as links.json holds it.
        left_out: arms that could not be weighed, with the reason.
        probe_s: seconds of probe, trials and choice.
    """

    choice: plan.Choice
    measured: plan.Measured
    links: dict[str, Any]
    left_out: dict[str, str]
    probe_s: float

    def step(self, step: int, seconds: float) -> None:
        """Count a step, and say so once when the prediction was off."""
        line = self.measured.add(step, seconds)
        if line is not None:
            say(line)

    def to_dict(self) -> dict[str, Any]:
        """Return what run.json holds about it."""
        return self.choice.to_dict() | {
            "words": self.choice.words(),
            "measured": self.measured.to_dict(),
            "left_out": self.left_out,
            "probe_s": self.probe_s,
            "links": self.links,
        }


def choose_systems(
    config: Config, layout: Layout, build: Callable[[Config], Steps]
) -> tuple[Config, AutoRun | None]:
    """Return the configuration with the chosen systems, and the choice; collective.

    A single rank sends nothing: it runs dense, without a probe or a choice.

    Args:
        config: with compress "auto".
        layout: where this rank stands.
        build: from a configuration to a trainer whose weights are thrown away.

    Raises:
        ConfigError: an arm of `auto.arms` that doesn't fit, or a run that the cost model doesn't
            cover; on every rank alike.
        PeerError, ProbeInterrupted: see `plan.probe`.
    """
    started = time.perf_counter()
    ranks = dist.get_world_size()
    dense, arms = arms_of(config, layout.sizes)
    if ranks == 1:
        say("one rank sends nothing: dense")
        return dense, None
    base = workload(replace(dense, recipe="dense"), ranks, overlap=_overlaps(layout))
    weighed, left_out = _weigh(config, arms, layout)
    codecs = [codec for load in (base, *weighed.values()) for codec in load.codecs()]
    links = probe_recipe(
        layout,
        codecs=codecs,
        work=recipe_work(dense, layout),
        seconds=PROBE_SHARE * config.auto.seconds,
        max_nbytes=MAX_NBYTES,
    )
    seconds = config.auto.seconds
    step_s = calibrated_s(links, base, lambda: build(dense), DENSE_SHARE * seconds)
    choice = plan.choose(
        links,
        base,
        list(weighed.values()),
        margin=config.auto.margin,
        step_s=step_s,
    )
    left_s = (1 - PROBE_SHARE - DENSE_SHARE) * seconds
    if step_s is not None:
        choice = try_arms(choice, lambda name: build(without_warmup(arms[name])), left_s)
    chosen = dense if choice.name == base.name else arms[choice.name]
    run = AutoRun(
        choice=choice,
        measured=plan.Measured(choice, config.steps),
        links=links.to_dict(),
        left_out=left_out,
        probe_s=time.perf_counter() - started,
    )
    if dist.get_rank() == 0:
        say(f"probed and tried for {run.probe_s:.1f} s; {choice.words()}")
    return settled(config, chosen.systems), run


def without_warmup(config: Config) -> Config:
    """Return an arm whose first steps are as those of most of the run: no dense ones, no ramp."""
    replicas = replace(config.systems.replicas, dense_steps=0, ramp_steps=0)
    return replace(config, systems=replace(config.systems, replicas=replicas))


def settled(config: Config, systems: Systems) -> Config:
    """Return a configuration that runs with `systems` and chooses nothing."""
    return replace(config, compress="given", systems=systems)


def arms_of(config: Config, sizes: dict[str, int]) -> tuple[Config, dict[str, Config]]:
    """Return the dense run and the compressed ones to choose among, by name.

    Args:
        config: with compress "auto".
        sizes: ranks per axis.

    Raises:
        ConfigError: a name in `auto.arms` that no recipe has.
    """
    given = config.systems
    sync = given.replicas if given.replicas.optimizer in ("adamw", "adams") else Replicas()
    dense = Systems(
        storage=given.storage, pipeline=given.pipeline, outer=given.outer, replicas=sync
    )
    names = [name.strip() for name in config.auto.arms.split(",") if name.strip()]
    arms = {name: _with(dense, name.split("+")) for name in names or _offered(config, sizes)}
    if given != dense:
        arms[AS_GIVEN] = given
    start = replace(config, compress="given", systems=dense)
    return start, {name: replace(start, systems=systems) for name, systems in arms.items()}


def _offered(config: Config, sizes: dict[str, int]) -> list[str]:
    """Return names of offered recipes that fit, joined by + where several links are compressed."""
    apart = config.systems.outer.method != "none"
    links = [
        link for link in BRIEF if sizes[AXIS_OF[link]] > 1 and not (apart and link == "gradients")
    ]
    choices = product(*(("", *BRIEF[link]) for link in links))
    return [name for words in choices if (name := "+".join(word for word in words if word))]


def _with(dense: Systems, names: Sequence[str]) -> Systems:
    """Return `dense` with the links that the named recipes compress."""
    plain, systems = Systems(), dense
    for name in names:
        arm = recipe(name).systems
        changed = {
            f.name: getattr(arm, f.name)
            for f in fields(Systems)
            if f.name in LINKS and getattr(arm, f.name) != getattr(plain, f.name)
        }
        if not changed:
            raise ConfigError(
                f"auto.arms: recipe {name} compresses none of the links {', '.join(LINKS)}, which "
                "auto chooses for"
            )
        systems = replace(systems, **changed)
    return systems


def _weigh(
    config: Config, arms: dict[str, Config], layout: Layout
) -> tuple[dict[str, plan.Workload], dict[str, str]]:
    """Return the arms' workloads, and why others were left out; those asked for must fit."""
    ranks = dist.get_world_size()
    weighed: dict[str, plan.Workload] = {}
    left_out: dict[str, str] = {}
    for name, arm in arms.items():
        try:
            check_used(arm.systems, layout.sizes)
            check_ranks(arm, ranks)
            load = workload(replace(arm, recipe=name), ranks, overlap=_overlaps(layout))
        except ConfigError as error:
            if config.auto.arms or name == AS_GIVEN:
                raise ConfigError(f"auto: arm {name}: {error}") from None
            left_out[name] = str(error)
            continue
        weighed[name] = load
    return weighed, left_out


def _overlaps(layout: Layout) -> bool:
    """Return whether messages fly beside the computation: gloo on CPU holds the host up."""
    return layout.device.type == "cuda"


def say(text: str) -> None:
    """Write a line about the choice."""
    tqdm.write(f"auto: {text}", file=sys.stdout)
    sys.stdout.flush()
