"""The data types that all packages share: weights, batches, caches, kernels, devices. Nothing here computes."""

from inferplane.types.accelerator import Accelerator
from inferplane.types.backend import Backend
from inferplane.types.batch import FEW_TOKENS, STEP_KINDS, Batch, HostLens, Row, StepKind
from inferplane.types.device import HOST, DeviceState, Feature, Features, Memory, Presence, Probe
from inferplane.types.kernel import (
    RANK_COMPOSED,
    RANK_FUSED,
    RANK_PORTABLE,
    RANK_TUNED,
    Context,
    Kernel,
    Kernels,
    When,
)
from inferplane.types.kv import (
    CachePart,
    CompressedCache,
    CompressorCache,
    HybridCache,
    IndexedCache,
    KVCache,
    KVLayout,
    LayerCache,
    LayerKV,
    LayerPlace,
    Layouts,
    Selection,
)
from inferplane.types.kv_request import KVKind, KVRequest, register_kv_kind
from inferplane.types.packed import PackedStorage, StoredWeight
from inferplane.types.placement import WHOLE, Placement, Shard
from inferplane.types.qtensor import QTensor
from inferplane.types.state import StateCache, StateRequest, StateRows, StateSlots, StateTensor
from inferplane.types.step_parts import ModelOutput
from inferplane.types.weight import CANONICAL, PLAIN, ActivationQuant, Packing, StoredWidths, Weight
from inferplane.types.weight_format import WeightFormat, read_tensor

__all__ = [
    "CANONICAL",
    "FEW_TOKENS",
    "HOST",
    "PLAIN",
    "RANK_COMPOSED",
    "RANK_FUSED",
    "RANK_PORTABLE",
    "RANK_TUNED",
    "STEP_KINDS",
    "WHOLE",
    "Accelerator",
    "ActivationQuant",
    "Backend",
    "Batch",
    "CachePart",
    "CompressedCache",
    "CompressorCache",
    "Context",
    "DeviceState",
    "Feature",
    "Features",
    "HostLens",
    "HybridCache",
    "IndexedCache",
    "KVCache",
    "KVKind",
    "KVLayout",
    "KVRequest",
    "Kernel",
    "Kernels",
    "LayerCache",
    "LayerKV",
    "LayerPlace",
    "Layouts",
    "Memory",
    "ModelOutput",
    "PackedStorage",
    "Packing",
    "Placement",
    "Presence",
    "Probe",
    "QTensor",
    "Row",
    "Selection",
    "Shard",
    "StateCache",
    "StateRequest",
    "StateRows",
    "StateSlots",
    "StateTensor",
    "StepKind",
    "StoredWeight",
    "StoredWidths",
    "Weight",
    "WeightFormat",
    "When",
    "read_tensor",
    "register_kv_kind",
]
