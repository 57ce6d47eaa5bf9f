"""From a trainer's configuration to what its steps do, in the cost model's terms."""

from collections.abc import Sequence

from thinwire.plan import Workload, mixed_workload, workload_of
from thinwire.train.config import Config
from thinwire.train.job import job_of
from thinwire.train.mixed_job import jobs_of

__all__ = ["workload"]


def workload(
    config: Config,
    num_ranks: int,
    *,
    overlap: bool = False,
    prefetch: int = 1,
    speeds: Sequence[float] = (),
) -> Workload:
    """Return what a configuration's steps do.

    Args:
        config: the run.
        num_ranks: ranks in all.
        overlap: see `job.job_of`.
        prefetch: likewise.
        speeds: of unlike replicas, each one's computing speed; empty: 1 each.

    Raises:
        ConfigError: a configuration that doesn't fit the ranks, or that the model doesn't cover.
    """
    if config.mesh.replicas:
        jobs = jobs_of(config, num_ranks, overlap=overlap, prefetch=prefetch)
        return mixed_workload(config.recipe or "run", jobs, speeds)
    return workload_of(job_of(config, num_ranks, overlap=overlap, prefetch=prefetch))
