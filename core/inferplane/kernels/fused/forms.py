"""The name of `vllm_calls` until 0.2, which goes with the next minor release."""

from __future__ import annotations

from inferplane.renamed import old_names_of_module

_HOME = "inferplane.kernels.fused.vllm_calls"
_CALLS = ("rms_norm", "add_rms_norm", "silu_mul", "kv_write", "mla_kv_write")

__getattr__ = old_names_of_module(
    __name__, {"AS_IT_IS": f"{_HOME}:CACHE_DTYPE", **{name: f"{_HOME}:{name}" for name in _CALLS}}
)
