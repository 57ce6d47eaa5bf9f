"""Whether compression pays: probe the links, predict step times, choose."""

from thinwire.plan.build import workload_of
from thinwire.plan.cluster import Cluster, ClusterCosts, Device, Line, Sites
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
from thinwire.plan.links import CodecSpeed, Compute, Group, Links, Point, Speed
from thinwire.plan.measured import MeasuredCosts
from thinwire.plan.predict import Arm, Prediction, compare, predict
from thinwire.plan.workload import Costs, Workload

__all__ = [
    "Arm",
    "Boundaries",
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
    "MeasuredCosts",
    "Outer",
    "Point",
    "Prediction",
    "Sites",
    "SparseSync",
    "Speed",
    "Stage",
    "TensorLink",
    "WeightsPhase",
    "Workload",
    "compare",
    "predict",
    "workload_of",
]
