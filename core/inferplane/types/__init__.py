"""Plain data that every floor speaks: tensors, weights, batches, caches, kernels, devices. Nothing here computes."""

from inferplane.types.accelerator import Accelerator
from inferplane.types.backend import Backend
from inferplane.types.batch import FEW_TOKENS, STEP_KINDS, Batch, HostLens, Row, StepKind
from inferplane.types.device import HOST, DeviceState, Feature, Features, Memory, Presence, Probe
from inferplane.types.kernel import (
    RANK_COMPOSED,
    RANK_PORTABLE,
    RANK_TUNED,
    Context,
    Kernel,
    Kernels,
    When,
)
from inferplane.types.kv import KVCache, KVKind, KVLayout, KVRequest, LayerKV, Layouts
from inferplane.types.placement import WHOLE, Placement, Shard
from inferplane.types.qtensor import QTensor
from inferplane.types.weight import CANONICAL, PLAIN, STATIC, Packing, Weight

__all__ = [
    "CANONICAL",
    "FEW_TOKENS",
    "HOST",
    "PLAIN",
    "RANK_COMPOSED",
    "RANK_PORTABLE",
    "RANK_TUNED",
    "STATIC",
    "STEP_KINDS",
    "WHOLE",
    "Accelerator",
    "Backend",
    "Batch",
    "Context",
    "DeviceState",
    "Feature",
    "Features",
    "HostLens",
    "KVCache",
    "KVKind",
    "KVLayout",
    "KVRequest",
    "Kernel",
    "Kernels",
    "LayerKV",
    "Layouts",
    "Memory",
    "Packing",
    "Placement",
    "Presence",
    "Probe",
    "QTensor",
    "Row",
    "Shard",
    "StepKind",
    "Weight",
    "When",
]
