"""All that plugin authors are promised. Everything else may move between releases; these names keep their meaning
within a major of `API_VERSION`, and importing them imports no engine and no vendor's package.

A whole plugin, here a device that computes with torch on the host and brings one kernel of its own:

    from inferplane.plugin import HOST, Backend, DeviceState, Features, Kernels, Presence, Probe, hookimpl

    INFERPLANE_API = (1, 0)  # the API this was written for; not API_VERSION, which is the API that is installed

    kernels = Kernels()


    @kernels("rms_norm", "toy", rank=90)
    def rms_norm(op, x):
        return (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + op.eps).rsqrt()).to(x.dtype) * op.weight


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

It is found by an entry point of the wheel that brings it:

    [project.entry-points."inferplane.plugins"]
    toy = "inferplane_toy.plugin"

or, not installed, by `INFERPLANE_PLUGINS=inferplane_toy.plugin`. A larger backend registers the dotted name
"inferplane_toy.backend:ToyBackend" instead of the class, so that its module is imported only when the device is probed
or chosen. The other hooks are `inferplane_register_kernels(register)`, for kernels of a device that another plugin
serves, `inferplane_register_quantization(register)`, `inferplane_register_models(register)` and
`inferplane_on_event(event)`.
"""

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
from inferplane.kvcache.paged import latents, paged_layout
from inferplane.plugins.hookspecs import API_VERSION, Event, hookimpl
from inferplane.types import (
    CANONICAL,
    HOST,
    PLAIN,
    RANK_COMPOSED,
    RANK_PORTABLE,
    RANK_TUNED,
    Accelerator,
    Backend,
    Batch,
    Context,
    DeviceState,
    Feature,
    Features,
    HostLens,
    Kernel,
    Kernels,
    KVCache,
    KVKind,
    KVLayout,
    KVRequest,
    LayerKV,
    Layouts,
    Memory,
    Packing,
    Placement,
    Presence,
    Probe,
    QTensor,
    Row,
    StepKind,
    Weight,
    When,
)
from inferplane.types.backend import host_memory
from inferplane.types.packages import installed, libraries_of, load_library, minor_of, version_of

__all__ = [
    "API_VERSION",
    "CANONICAL",
    "HOST",
    "PLAIN",
    "RANK_COMPOSED",
    "RANK_PORTABLE",
    "RANK_TUNED",
    "Accelerator",
    "Backend",
    "Batch",
    "BindError",
    "BlockedKV",
    "CapacityError",
    "CheckpointError",
    "Context",
    "DeviceError",
    "DeviceState",
    "Event",
    "Feature",
    "Features",
    "HostLens",
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
    "Layouts",
    "Memory",
    "Packing",
    "Placement",
    "PluginError",
    "Presence",
    "Probe",
    "QTensor",
    "Row",
    "StepKind",
    "UnsupportedModelError",
    "UsageError",
    "Weight",
    "When",
    "hookimpl",
    "host_memory",
    "installed",
    "latents",
    "libraries_of",
    "load_library",
    "minor_of",
    "paged_layout",
    "version_of",
    "warn",
]
