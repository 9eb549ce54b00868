"""The public API for plugin authors. These names keep their meaning within a major of `API_VERSION`; everything else in
Inferplane may change between releases. Importing them imports neither the engine nor a vendor's package.

A complete plugin: a device that computes with torch on the host and has one kernel.

    from inferplane.plugin import HOST, Backend, DeviceState, Features, Kernels, Presence, Probe, hookimpl

    INFERPLANE_API = (1, 1)  # the API version this plugin is written for; API_VERSION is the installed one

    kernels = Kernels()


    @kernels("rms_norm", "toy", rank=90)
    def rms_norm(view, x):
        return (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + view.eps).rsqrt()).to(x.dtype) * view.weight


    class ToyBackend(Backend):
        name = "toy"
        torch_device = HOST

        @classmethod
        def probe(cls):
            return Probe(Presence.AVAILABLE, "needs nothing but torch", devices=1)

        def open(self):
            return DeviceState(self.torch_device, "a toy", "toy1", Features(["bf16"]), self.memory())

        def kernels(self):
            return kernels


    @hookimpl
    def inferplane_register_backends(register):
        register("toy", ToyBackend)

Inferplane finds the plugin by an entry point of its wheel:

    [project.entry-points."inferplane.plugins"]
    toy = "inferplane_toy.plugin"

or, without installation, by `INFERPLANE_PLUGINS=inferplane_toy.plugin`. A larger backend registers the dotted name
"inferplane_toy.backend:ToyBackend" instead of the class, so that its module is imported only if the device is probed
or chosen. The other hooks are `inferplane_register_kernels(register)`, which adds kernels to another plugin's device,
`inferplane_register_quantization(register)`, `inferplane_register_models(register)`,
`inferplane_register_reply_forms(register)`, `inferplane_register_calibration(register)`,
`inferplane_register_proposers(register)` and `inferplane_on_event(event)`.
"""

import typing

from inferplane.dialogue.replies.forms import ReasoningForm, ReplyForm, ToolForm
from inferplane.errors import (
    BindError,
    CapacityError,
    CheckpointError,
    DeviceError,
    InferplaneError,
    InferplaneWarning,
    KernelError,
    PluginError,
    UnsupportedModelError,
    UsageError,
    warn,
)
from inferplane.kvcache.blocked import BlockedKV
from inferplane.kvcache.paged import latents, list_kv_dtypes, paged_layout
from inferplane.kvcache.static import StaticKV, static_layout, static_name
from inferplane.plugins.hookspecs import API_VERSION, Event, hookimpl
from inferplane.renamed import warn_of_old_name as _warn_of_old_name
from inferplane.types import (
    CANONICAL,
    HOST,
    PLAIN,
    RANK_COMPOSED,
    RANK_FUSED,
    RANK_PORTABLE,
    RANK_TUNED,
    Accelerator,
    ActivationQuant,
    Backend,
    Batch,
    CachePart,
    CompressedCache,
    CompressorCache,
    Context,
    DeviceState,
    Feature,
    Features,
    HostLens,
    HybridCache,
    IndexedCache,
    Kernel,
    Kernels,
    KVCache,
    KVKind,
    KVLayout,
    KVRequest,
    LayerKV,
    LayerPlace,
    Layouts,
    Memory,
    ModelOutput,
    PackedStorage,
    Packing,
    Placement,
    Presence,
    Probe,
    QTensor,
    Row,
    Selection,
    StateCache,
    StateRequest,
    StateRows,
    StateSlots,
    StateTensor,
    StepKind,
    StoredWeight,
    Weight,
    WeightFormat,
    When,
    read_tensor,
    register_kv_kind,
)
from inferplane.types.backend import host_memory
from inferplane.types.packages import is_installed, libraries_of, load_library, minor_of, version_of

_OLD_NAMES = {"installed": "is_installed"}

__all__ = [
    "API_VERSION",
    "CANONICAL",
    "HOST",
    "PLAIN",
    "RANK_COMPOSED",
    "RANK_FUSED",
    "RANK_PORTABLE",
    "RANK_TUNED",
    "Accelerator",
    "ActivationQuant",
    "Backend",
    "Batch",
    "BindError",
    "BlockedKV",
    "CachePart",
    "CapacityError",
    "CheckpointError",
    "CompressedCache",
    "CompressorCache",
    "Context",
    "DeviceError",
    "DeviceState",
    "Event",
    "Feature",
    "Features",
    "HostLens",
    "HybridCache",
    "IndexedCache",
    "InferplaneError",
    "InferplaneWarning",
    "KVCache",
    "KVKind",
    "KVLayout",
    "KVRequest",
    "Kernel",
    "KernelError",
    "Kernels",
    "LayerKV",
    "LayerPlace",
    "Layouts",
    "Memory",
    "ModelOutput",
    "PackedStorage",
    "Packing",
    "Placement",
    "PluginError",
    "Presence",
    "Probe",
    "QTensor",
    "ReasoningForm",
    "ReplyForm",
    "Row",
    "Selection",
    "StateCache",
    "StateRequest",
    "StateRows",
    "StateSlots",
    "StateTensor",
    "StaticKV",
    "StepKind",
    "StoredWeight",
    "ToolForm",
    "UnsupportedModelError",
    "UsageError",
    "Weight",
    "WeightFormat",
    "When",
    "hookimpl",
    "host_memory",
    "is_installed",
    "latents",
    "libraries_of",
    "list_kv_dtypes",
    "load_library",
    "minor_of",
    "paged_layout",
    "read_tensor",
    "register_kv_kind",
    "static_layout",
    "static_name",
    "version_of",
    "warn",
]


if not typing.TYPE_CHECKING:  # type checkers know the present names alone

    def __getattr__(name: str) -> object:
        """Names of 0.1, for one minor release."""
        if name not in _OLD_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _warn_of_old_name(f"inferplane.plugin.{name}", _OLD_NAMES[name])
        return globals()[_OLD_NAMES[name]]
