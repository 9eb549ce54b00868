"""Loads the native kernels' library with torch's OpenMP and declares its C interface; or says why there is none.

The signatures mirror csrc/inferplane_cpu.h, which documents every function; the structs are in structs.py.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inferplane.plugin import Feature, UsageError, warn
from inferplane_cpu.structs import (
    Cache,
    ClampedGate,
    Convolution,
    DeltaRule,
    Experts,
    GateLimits,
    HeadRows,
    Hyper,
    Latent,
    Layer,
    LayerSteps,
    LogitScale,
    Matrix,
    Mixer,
    Model,
    ModelIO,
    Norm,
    NormWithGate,
    RaggedBatch,
    Sampling,
    Scan,
    Sequences,
    Step,
)

VARIABLE = "INFERPLANE_CPU_ISA"
"""Names the instruction set to use ("avx2", "avx512", "avx512_bf16", "amx"), or "none" for torch's operators alone."""
SKIPPED_BY = "INFERPLANE_NO_NATIVE"
"""First word of the note that an installation leaves if this variable made it skip the kernels."""

TILES = ("avx2", "avx512_bf16", "amx")
"""Instruction sets with products and attention for many tokens (csrc/attention/prefill.h)."""
FASTER_THAN_ONEDNN = ("avx2", "amx")
"""Instruction sets whose products with many rows are faster than oneDNN's, which has none in bf16 on AVX2."""
KINDS = BF16, INT8, INT4, FP8, W8A8, BF16_REORDERABLE, MXFP4, INT6 = range(8)
"""Kinds of `Matrix`, as in csrc/inferplane_cpu.h."""
INPUT_INT16, INPUT_INT8, INPUT_INT4, INPUT_MXFP4 = range(4)
"""What products with a `Matrix` round activations to (`ip_input`)."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}
"""Activation functions (`ip_activation`) by the names of op `activation_mul`."""
SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
"""How routers score (`ip_score`), by the names of op `moe_route`."""

_STRUCTS: tuple[type[Structure], ...] = (
    *(Matrix, Cache, RaggedBatch, Norm, Latent, ClampedGate, GateLimits, Experts, Hyper, Layer, Sampling),
    *(Step, LayerSteps, LogitScale, Model, ModelIO),
    *(Sequences, HeadRows, Convolution, DeltaRule, Scan, NormWithGate, Mixer),
)
"""In the order of `ip_struct_bytes`."""
_P, _I = c_void_p, c_int64
_SEQUENCES = POINTER(Sequences)
_MATRIX, _CACHE, _BATCH, _STEP = POINTER(Matrix), POINTER(Cache), POINTER(RaggedBatch), POINTER(Step)
_ThreadInit = ctypes.CFUNCTYPE(None)


@_ThreadInit
def _init_thread() -> None:
    """Make torch set this thread's number of OpenMP threads, which it does when it is first asked there."""
    torch.get_num_threads()


SIGNATURES = 10
"""IP_SIGNATURES of the library that is called here: it grows with every change of a function's arguments,
and of what it takes."""
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ip_select_isa": (c_int, c_char_p),
    "ip_set_thread_init": (None, _ThreadInit),
    "ip_num_threads": (c_int,),
    "ip_struct_bytes": (POINTER(c_int32),),
    "ip_num_kinds": (c_int,),
    "ip_signatures": (c_int,),
    "ip_available_isas": (c_char_p,),
    "ip_current_isa": (c_char_p,),
    "ip_linear": (None, _MATRIX, _P, _I, _I, _P, _I, c_int),
    "ip_linear_prefill": (c_int, _MATRIX, _P, _I, _I, _P, _I, c_int),
    "ip_dequantize_rows": (None, _MATRIX, _I, _I, _P),
    "ip_gather_rows": (None, _MATRIX, _P, _I, c_float, _P),
    "ip_scale_logits": (None, POINTER(LogitScale), _P, _I),
    "ip_packed_bytes": (_I, _MATRIX),
    "ip_pack_weight": (c_int, _MATRIX, _P, _P),
    "ip_rms_norm": (None, _P, _I, _P, POINTER(Norm), _I, _I, _P, _P),
    "ip_activation_mul": (None, _P, _I, _I, _I, c_int, POINTER(GateLimits), _P),
    "ip_rope": (None, _P, _I, _I, _P, _P, _I, _I, _I, c_int, _P),
    "ip_attention": (None, _P, _BATCH, _CACHE, _I, _I, _I, _I, c_float, _I, _P, c_float, _P),
    "ip_attention_prefill": (c_int, _P, _BATCH, _CACHE, _I, _I, _I, _I, c_float, _I, _P, c_float, _P),
    "ip_mla": (None, _P, _P, _P, _P, _MATRIX, _BATCH, _CACHE, _I, _I, _I, _I, _I, c_float, _P),
    "ip_index_select": (None, _P, _P, _BATCH, _CACHE, _I, _I, _I, _I, _P),
    "ip_sparse_mla": (None, _P, _P, _P, _P, _MATRIX, _BATCH, _CACHE, _I, _I, _I, _I, _I, c_float, _P, _I, _P),
    "ip_moe": (c_int, _MATRIX, _MATRIX, _I, _P, POINTER(GateLimits), _P, _I, _I, _P, _P, _I, _P),
    "ip_causal_conv1d": (None, POINTER(Convolution), _SEQUENCES, _P, _I, _P, _P, _P),
    "ip_delta_rule_gates": (None, _P, _P, _P, _I, _P, _I, _I, _I, _I, _P, _P),
    "ip_gated_delta_rule": (None, POINTER(DeltaRule), _SEQUENCES, _P, _P, _I, _P, _I, _P, _P, _P),
    "ip_gated_norm": (None, POINTER(NormWithGate), POINTER(HeadRows), POINTER(HeadRows), _I, _I, _I, _P),
    "ip_selective_scan": (None, POINTER(Scan), _SEQUENCES, _P, _P, _I, _P, _P, _P),
    "ip_recurrent_block": (None, POINTER(Mixer), _SEQUENCES, _P, _P, _P, _P),
    "ip_route_experts": (None, POINTER(Experts), _P, _I, _P, _P),
    "ip_expert_weights": (None, POINTER(Experts), _P, _I, _P, _P),
    "ip_hyper_pre": (None, POINTER(Hyper), _P, _I, _P, _P, _P),
    "ip_hyper_post": (None, POINTER(Hyper), _P, _P, _P, _P, _I, _P),
    "ip_sinkhorn": (None, _P, _I, _I, _I, c_float),
    "ip_sample": (None, POINTER(Sampling), _P),
    "ip_read_memory": (_I, _P, _I),
    "ip_time_phases": (c_char_p, _P),
    "ip_decoder_layer": (None, POINTER(Layer), _STEP, _P, _P, _P, _P),
    "ip_decoder_layers": (c_int, _P, _CACHE, _I, POINTER(LayerSteps), _P, _P, _P, _P),
    "ip_model_step": (c_int, POINTER(Model), _CACHE, POINTER(LayerSteps), POINTER(ModelIO)),
}
"""Result and arguments of each function of the C interface."""


class Native(NamedTuple):
    """The library, or None and why there is none, and what to do about it; empty if nothing has to be done."""

    library: ctypes.CDLL | None
    reason: str
    remedy: str = ""

    @property
    def feature(self) -> Feature:
        """The feature "native" of the device, which kernels need and explain shows."""
        return Feature(self.library is not None, self.reason)

    @property
    def tiles(self) -> Feature:
        """Whether there are products and attention for many tokens: the instruction set in use is one of `TILES`."""
        if self.library is None:
            return Feature(False, self.reason)
        has_tiles = self.library.ip_current_isa().decode() in TILES
        return Feature(has_tiles, f"{self.reason}; many tokens are native on {' and '.join(TILES)}")


@cache
def native() -> Native:
    """Load the library once. Never raises: an error becomes the reason.

    Warns if a library exists and does not load, since everything else then works, only slowly.
    """
    folder = Path(__file__).parent
    found = sorted(folder.glob("_native*.so"))
    if not found:
        note = folder / "native.txt"
        reason = note.read_text().strip() if note.exists() else "Inferplane runs from a source tree without them"
        remedy = "" if reason.startswith(SKIPPED_BY) else "install Inferplane again where there is a C++ compiler"
        return Native(None, f"the native kernels were not built: {reason}", remedy)
    openmp = _openmp()
    if not openmp:
        return Native(None, "torch has loaded no OpenMP library whose threads the native kernels could share")
    try:
        # Before the kernels: their OpenMP symbols are unresolved, and must bind to the library that torch uses.
        ctypes.CDLL(openmp[0], ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(found[0]))
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        different = [s.__name__ for s, size in zip(_STRUCTS, library.ip_struct_bytes()) if ctypes.sizeof(s) != size]
        if library.ip_signatures() != SIGNATURES:
            different.append("signatures of functions")
        if library.ip_num_kinds() != len(KINDS):
            different.append("kinds of weights")
        if different:
            raise OSError(f"{found[0]} was built from other sources: {', '.join(different)} differ")
    except (OSError, AttributeError) as error:
        reason = f"the native kernels cannot be loaded: {error}"
        remedy = "Install inferplane again, from a source tree with `pip install -e .`, to build them anew."
        warn(f"{reason}; torch's kernels work in their place, and slower. {remedy}")
        return Native(None, reason)
    return _select(library)


def _select(library: ctypes.CDLL) -> Native:
    """Use the instruction set that `VARIABLE` names, else the best of this processor."""
    available = library.ip_available_isas().decode()
    requested = os.environ.get(VARIABLE, "")
    if requested == "none":
        return Native(None, f"{VARIABLE}=none")
    if not available:
        return Native(None, "the native kernels need a processor with AVX2")
    if requested and library.ip_select_isa(requested.encode()):
        remedy = f"set {VARIABLE} to one of these or to none, or leave it out"
        return Native(None, f"{VARIABLE}={requested}, but this processor has {available}", remedy)
    library.ip_set_thread_init(_init_thread)
    return Native(library, f"native kernels on {library.ip_current_isa().decode()} (of {available})")


def _openmp() -> list[str]:
    """Paths of the OpenMP libraries that this process has loaded; torch loads one."""
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/") and len(line.split(maxsplit=5)) == 6}
    return sorted(p for p in paths if Path(p).name.startswith(("libgomp", "libiomp5", "libomp")))


def current_instruction_set() -> str:
    """The instruction set in use."""
    return str(library().ip_current_isa().decode())


def library() -> Any:
    """The loaded library; kernels that need the feature "native" are bound only if there is one."""
    found = native().library
    assert found is not None, native().reason
    return found


def instruction_sets() -> list[str]:
    """Names of the instruction sets that this machine can run, the best last; empty without the library."""
    found = native().library
    return found.ip_available_isas().decode().split() if found is not None else []


@contextmanager
def use_instruction_set(name: str) -> Iterator[None]:
    """Use another instruction set within a `with` block.

    Raises:
        UsageError: this machine has none of that name.
    """
    lib = library()
    before = lib.ip_current_isa()
    if lib.ip_select_isa(name.encode()):
        raise UsageError(f"Instruction set {name!r}.", there_is=", ".join(instruction_sets()))
    try:
        yield
    finally:
        lib.ip_select_isa(before)
