"""A small job and costs that tests can add up by hand."""

from dataclasses import dataclass, field

from thinwire.plan import Boundaries, Job, Layer, Stage

MESH = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}


@dataclass
class Flat:
    """1 s per 10^9 bytes handed in, 1 s per 10^12 flops; coding 1 s per 10^9 values."""

    latency_s: float = 0.0
    burst_s: float = 0.0
    woken_s: float = 0.0
    overrides: dict = field(default_factory=dict)

    def seconds(self, message):
        return self.overrides.get(message.link, self.latency_s + message.nbytes / 1e9)

    def wake_s(self, message):
        return self.woken_s

    def least_s(self, message):
        return self.latency_s

    def wire(self, axis):
        return axis

    def coding_s(self, coding):
        return coding.numel / 1e9

    def compute_s(self, compute, workload):
        return compute.flops / 1e12


def layer(name, rows=1000, flops=1e12):
    return Layer(name, ((f"{name}.weight", (rows, 1000)),), flops)


def job(num_blocks=3, stages=1, **changes):
    mesh = MESH | changes.pop("mesh", {})
    blocks = tuple(layer(f"b{i}") for i in range(num_blocks))
    root = Layer("root", (("embed.weight", (1000, 1000)),), 0.0)
    values = {
        "name": "job",
        "mesh": mesh,
        "stages": (Stage(blocks, root),) * stages,
        "dim": 100,
        "tokens": 64,
        "seq_len": 32,
        "micro_batches": 1,
        "params": 1000 * 1000 * (num_blocks + 1),
        "scalar_bytes": 0,
    }
    if stages > 1:
        crossing = Boundaries(forward_bytes=10**8, backward_bytes=10**8, dense_bytes=10**8)
        values |= {"boundaries": crossing}
    return Job(**(values | changes))
