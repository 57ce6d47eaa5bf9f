"""Whether compression pays: probe the links, predict step times, choose."""

from thinwire.plan.build import workload_of
from thinwire.plan.choose import Choice, Measured, choose
from thinwire.plan.cluster import Cluster, Device, Line, Sites
from thinwire.plan.described import ClusterCosts
from thinwire.plan.job import (
    Boundaries,
    Job,
    Layer,
    Outer,
    SparseSync,
    Stage,
    TensorLink,
    WeightsPhase,
)
from thinwire.plan.links import COLLECTIVES, CodecSpeed, Compute, Group, Links, Point, Speed
from thinwire.plan.measured import MeasuredCosts
from thinwire.plan.mixed import mixed_workload
from thinwire.plan.predict import Arm, Prediction, compare, predict
from thinwire.plan.probe_clock import ProbeError, ProbeInterrupted
from thinwire.plan.probe_device import Work
from thinwire.plan.probe_mesh import probe
from thinwire.plan.stored import Storage
from thinwire.plan.workload import Costs, Workload

__all__ = [
    "COLLECTIVES",
    "Arm",
    "Boundaries",
    "Choice",
    "Cluster",
    "ClusterCosts",
    "CodecSpeed",
    "Compute",
    "Costs",
    "Device",
    "Group",
    "Job",
    "Layer",
    "Line",
    "Links",
    "Measured",
    "MeasuredCosts",
    "Outer",
    "Point",
    "Prediction",
    "ProbeError",
    "ProbeInterrupted",
    "Sites",
    "SparseSync",
    "Speed",
    "Stage",
    "Storage",
    "TensorLink",
    "WeightsPhase",
    "Work",
    "Workload",
    "choose",
    "compare",
    "mixed_workload",
    "predict",
    "probe",
    "workload_of",
]
