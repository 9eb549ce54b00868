"""Reads a checkpoint's quantization config: the format of each weight, and how activations are quantized for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from inferplane.binding import FormatReader, TensorSource
from inferplane.errors import CheckpointError, PluginError, UnsupportedModelError, warn
from inferplane.ops import FORMATS
from inferplane.quant import gguf_blocks
from inferplane.quant.auto_round import is_auto_round, translate
from inferplane.quant.by_module import ModuleRules, Rule, read_dynamic, read_extra_config
from inferplane.quant.formats import READERS, SUFFIXES
from inferplane.quant.instructions import check_instructions, is_excluded
from inferplane.quant.integers import QuantScheme, warn_of_expansion
from inferplane.quant.microscaling import MICROSCALED
from inferplane.quant.microscaling import PACKED as PACKED_FP4
from inferplane.quant.mixed_groups import find_group, list_targets
from inferplane.quant.mxfp4 import MXFP4
from inferplane.quant.plugged import ShownWeights
from inferplane.quant.schemes import find_scheme, read_group
from inferplane.quant.spelling import spell
from inferplane.quant.unpack import WEIGHT, IntegerPacking, UnpackedSource
from inferplane.types import PLAIN, ActivationQuant, StoredWidths, WeightFormat

UNREAD = (
    "*.input_scale", "*.activation_scale", "*.input_scale_ub", "*.k_scale", "*.v_scale", "*.input_zero_point",
    "*.input_global_scale", "*.kv_scale", "*.k_proj.output_scale", "*.v_proj.output_scale",
)  # fmt: skip
"""Calibrated scales that may be left unread: those of the cache, which the cache reads by itself where its layout has
static ones, and those of activations unless the config says that their scales are static."""
SCALES_OF_CACHE = ("*.k_scale", "*.v_scale", "*.kv_scale")
BY_MODULE = ("gptq", "awq")
"""Methods whose settings may differ by module (`dynamic`)."""
PACKED = ".qweight"
"""Suffix of a module's name that gives its weight, packed by one of these."""


def _plain(name: str) -> str:
    return PLAIN


def _no_widths(name: str) -> None:
    return None


@dataclass(frozen=True)
class QuantFormats:
    """The weight formats of a checkpoint, as stored or as quantized on load.

    Args:
        format_of: a checkpoint tensor's name -> its weight format.
        activation_quants: weight format -> quantization that the checkpoint expects for the activations multiplied by
            such weights; for other formats there is none.
        readers: a reader per format.
        unread: shell patterns of tensors that nothing reads.
        packed: how integers are packed; None if they are not.
        shown: a view of the checkpoint that shows weights of a plugin's format; None where `packed` or nothing does.
        widths_of: a tensor's name -> what is known of its numbers beyond the format; None: nothing.
    """

    format_of: Callable[[str], str] = _plain
    activation_quants: Mapping[str, ActivationQuant] = field(default_factory=dict)
    readers: Mapping[str, FormatReader] = field(default_factory=lambda: READERS)
    unread: tuple[str, ...] = ()
    packed: IntegerPacking | None = None
    shown: Callable[[TensorSource], TensorSource] | None = None
    widths_of: Callable[[str], StoredWidths | None] = _no_widths

    def view(self, source: TensorSource) -> TensorSource:
        """The checkpoint without packing, as the readers need it."""
        if self.shown is not None:
            return self.shown(source)
        return source if self.packed is None else self.packed.view(source)


PluginFormats = Mapping[str, Callable[[Mapping[str, Any]], WeightFormat]]
"""Quantization method -> a function of the settings that opens the format that a plugin registered for it."""


def read_quant_config(
    settings: Mapping[str, Any] | None,
    names: Collection[str] | None,
    plugins: PluginFormats = MappingProxyType({}),
    vacant: Mapping[str, str] = MappingProxyType({}),
) -> QuantFormats:
    """The weight formats that a checkpoint's config and tensor names state. Methods of core come first; a plugin reads
    other methods, and settings of core's methods that core does not read.

    Args:
        settings: the config's `quantization_config`, or None.
        names: the checkpoint's tensors; None without a checkpoint (dummy weights): the config alone decides.
        plugins: the formats of plugins.
        vacant: methods that several plugins registered, each with the reason why none reads it.

    Raises:
        CheckpointError: the settings are not an object.
        UnsupportedModelError: the method is not implemented.
        PluginError: several plugins registered the method, or its plugin failed.

    Source: DeepSeek-V3's README_WEIGHTS.md; the configs of compressed-tensors, vLLM's "fp8", fbgemm_fp8, GPTQ, AWQ.
    """
    if settings is None:
        return QuantFormats(unread=SCALES_OF_CACHE)
    if not isinstance(settings, Mapping):
        raise CheckpointError(
            f"The config's quantization_config is {settings!r}, not an object with entries.",
            remedy="correct the entry, or fetch the file again",
        )
    if not settings:
        return QuantFormats()
    stated, is_read_here = str(settings.get("quant_method")), True
    try:
        settings, rules = _settle(settings, names)
        if rules:
            check_instructions(str(settings["quant_method"]), settings)
            return _read_by_module(settings, rules, names)
    except UnsupportedModelError:
        if stated not in plugins:
            raise
        is_read_here = False
    method = settings.get("quant_method")
    if method == "gguf":
        types = settings.get("types") or {}
        return QuantFormats(
            partial(gguf_blocks.find_format, types),
            readers=gguf_blocks.READERS,
            widths_of=partial(gguf_blocks.find_widths, types),
        )
    check_instructions(str(method), settings)
    if _leaves_weights(settings):
        return QuantFormats(unread=UNREAD)
    if method == "mxfp4" and names is None:
        return QuantFormats(lambda name: "mxfp4" if ".experts." in name else PLAIN)
    if method == "mxfp4":
        return _of_plugin(method, MXFP4, names)
    if method == "fp8" and settings.get("expert_dtype") == "fp4" and (dense := find_scheme(settings)) is not None:
        fp4 = QuantScheme("mxfp4")
        return _of_schemes(settings, {dense, fp4}, lambda name: fp4 if ".experts." in name else dense, names)
    if method == "compressed-tensors" and (mixed := _read_mixed(settings, names)) is not None:
        return mixed
    found = find_scheme(settings) if is_read_here else None
    if found is None and isinstance(method, str) and method in plugins:
        return _of_plugin(method, plugins[method](settings), names)
    if found is None and isinstance(method, str) and method in vacant:
        raise PluginError(
            f"Quantization method {vacant[method]}.",
            remedy=f"choose one by INFERPLANE_PLUGINS={method}@DISTRIBUTION, or uninstall the others",
        )
    if found is None:
        raise _refuse(settings, plugins)
    _warn_of_skipped(found)
    format, quant, packed = found.format, found.activation_quant, found.packed
    quants = {} if quant is None else {format: quant}
    warn_of_expansion(packed)
    if format in MICROSCALED and names is not None:
        microscaled = _of_plugin(format, MICROSCALED[format], names)
        return replace(microscaled, activation_quants=quants, unread=UNREAD)

    def by_scales(name: str) -> str:
        return format if _has_scales(name, names or (), packed) else PLAIN

    def by_config(name: str) -> str:
        return format if _is_projection(name) and not is_excluded(settings, name) else PLAIN

    return QuantFormats(by_config if names is None else by_scales, quants, unread=UNREAD, packed=packed)


def _leaves_weights(settings: Mapping[str, Any]) -> bool:
    """Whether settings are of the KV cache alone, or of nothing."""
    if settings.get("config_groups"):
        return False
    if settings.get("quant_method") == "modelopt":  # which writes the entry into every folder
        return "quant_algo" in settings and settings["quant_algo"] is None
    return settings.get("quant_method") == "compressed-tensors" and bool(settings.get("kv_cache_scheme"))


def _warn_of_skipped(found: QuantScheme) -> None:
    if found.skipped_quant:
        warn(
            f"The checkpoint says that activations are quantized ({found.skipped_quant}) before they are multiplied by "
            f"its {found.format} weights. That is not applied: they are multiplied as they are."
        )


def _settle(settings: Mapping[str, Any], names: Collection[str] | None) -> tuple[Mapping[str, Any], ModuleRules]:
    """Settings in the spelling of the method whose readers read them, and those of single modules."""
    settings = spell(settings)
    if is_auto_round(settings):
        return translate(settings), read_extra_config(settings, names)
    return settings, read_dynamic(settings) if settings.get("quant_method") in BY_MODULE else ModuleRules()


def _refuse(settings: Mapping[str, Any], plugins: Collection[str] = (), where: str = "") -> UnsupportedModelError:
    """The error for settings that nothing reads; `where` says of which modules they are."""
    of_plugins = f"; of plugins: {', '.join(map(repr, sorted(plugins)))}" if plugins else ""
    stated = ", ".join(f"{k} = {settings[k]!r}" for k in SHOWN_SETTINGS if settings.get(k) is not None)
    return UnsupportedModelError(
        f"Quantization method {settings.get('quant_method')!r}{' with ' if stated else ''}{stated}{where} is not "
        "implemented, or not with these settings.",
        there_is="'fp8' with weight_block_size [128, 128] or a scale a tensor; 'fbgemm_fp8'; 'compressed-tensors' "
        "with FP8 weights in blocks of [128, 128] or with a scale a tensor or channel, or with integers of 4 or "
        "8 bits, or nvfp4, mxfp4, mxfp8; 'gptq' of 4 or 8 bits; 'awq' (gemm) of 4; 'auto-round' in their packings; "
        "'modelopt' of FP8, NVFP4, W4A16_NVFP4, MXFP4, MXFP8. Integers have a scale a row or 128 columns, those of 4 "
        f"bits also 64 or 32; 'mxfp4' as gpt-oss has it{of_plugins}",
        remedy="load an unquantized checkpoint, or add a plugin that registers the format",
    )


def find_stored_format(settings: Mapping[str, Any]) -> str:
    """The one weight format that a checkpoint's settings state; "" if core reads none from them."""
    try:
        settings, rules = _settle(settings, None)
    except UnsupportedModelError:
        return ""
    found = None if rules else find_scheme(settings)
    return "" if found is None else found.format


def _has_scales(name: str, names: Collection[str], packed: IntegerPacking | None) -> bool:
    """Whether a checkpoint has scales of a weight, or has it packed."""
    there = [name + suffix for suffix in SUFFIXES]
    if packed is not None:
        there.append(name.removesuffix(WEIGHT) + packed.suffix)
    return any(n in names for n in there)


def _is_projection(name: str) -> bool:
    """Whether a weight is one that exporters quantize: of an expert, or of a linear layer in attention or MLP."""
    parts = name.removesuffix(".weight").split(".")
    expert = "experts" in parts and parts[-1] in ("w1", "w2", "w3")
    inside = "self_attn" in parts or "mlp" in parts
    if "compressor" in parts:  # whose projections are published in bfloat16
        return False
    if "indexer" in parts:  # whose weights of heads are published in float32
        return parts[-1] in ("wq_b", "wk", "q_b_proj")
    return expert or (inside and parts[-1].endswith(("_proj", "_proj_with_mqa")))


def _of_plugin(method: str, plugged: WeightFormat, names: Collection[str] | None) -> QuantFormats:
    """The weight formats of a checkpoint whose method a plugin reads, or core as if it were one."""
    format = plugged.kernels_format or method
    if names is None:  # random weights can be drawn in core's formats only
        known = format in FORMATS
        return QuantFormats(lambda name: format if known and _is_projection(name) else PLAIN)
    weights, shape = frozenset(plugged.weights(names)), plugged.shape
    return QuantFormats(
        lambda name: format if name in weights else PLAIN,
        readers={format: plugged.read},
        shown=None if shape is None else lambda source: ShownWeights(source, weights, shape),
    )


def format_of(settings: Mapping[str, Any] | None, names: Collection[str] | None) -> Callable[[str], str]:
    """A function from a checkpoint tensor's name to its weight format; arguments and errors are those of
    `read_quant_config`."""
    return read_quant_config(settings, names).format_of


SHOWN_SETTINGS = (
    "bits", "group_size", "sym", "zero_point", "version", "format", "checkpoint_format", "backend", "dynamic",
    "weight_block_size", "quant_algo",
)  # fmt: skip
"""Settings that an error message repeats."""


def _read_mixed(settings: Mapping[str, Any], names: Collection[str] | None) -> QuantFormats | None:
    """The formats of compressed-tensors whose groups differ; None if they are alike, or cannot be read together: with a
    format that several groups use with other activations."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) < 2:
        return None
    schemes: list[tuple[list[str], QuantScheme]] = []
    for group in groups.values():
        stated = (
            {**settings, "format": group.get("format") or settings.get("format")} if isinstance(group, Mapping) else {}
        )
        targets, found = list_targets(group) if stated else None, read_group(group, stated)
        if targets is None or found is None:
            return None
        schemes.append((targets, found))
    each = {scheme for _, scheme in schemes}
    quants = {(scheme.format, scheme.activation_quant) for scheme in each}
    if len(each) < 2 or len({format for format, _ in quants}) < len(quants):
        return None
    return _of_schemes(settings, each, find_group(schemes), names)


def _read_by_module(settings: Mapping[str, Any], rules: ModuleRules, names: Collection[str] | None) -> QuantFormats:
    """The formats of GPTQ's or AWQ's modules some of which have settings of their own.

    Raises:
        UnsupportedModelError: modules have settings that are not read; only those that modules have are needed.
    """
    made: dict[Rule | None, QuantScheme] = {}
    find = cache(rules.find)  # a model of experts has thousands of modules, and settings hundreds of expressions

    def scheme_of(name: str) -> QuantScheme | None:
        rule = find(name.removesuffix(WEIGHT))
        return None if rule is not None and rule.changes is None else made.get(rule)

    modules = [name.removesuffix(PACKED) for name in names or () if name.endswith(PACKED)]
    for rule in dict.fromkeys([None, *rules] if names is None else map(find, modules)):
        if rule is not None and rule.changes is None:
            continue
        changes = rule.changes or {} if rule is not None else {}
        check_instructions(str(settings.get("quant_method")), changes)
        found = find_scheme({**settings, **changes})
        if found is None:
            raise _refuse({**settings, **changes}, where="" if rule is None else f" by {rule.text}")
        made[rule] = found
    for rule in rules if names is not None else ():
        if rule.changes is not None and "sym" in rule.changes and rule not in made:
            warn(
                f"The checkpoint's quantization_config has sym = {rule.changes['sym']} by {rule.text}, which names no "
                "module that is read. If some are meant under another name, their zero points are read wrongly: "
                "correct the entry."
            )
    return _of_schemes(settings, set(made.values()), scheme_of, names)


def _of_schemes(
    settings: Mapping[str, Any],
    each: Collection[QuantScheme],
    scheme_of: Callable[[str], QuantScheme | None],
    names: Collection[str] | None,
) -> QuantFormats:
    """The formats of a checkpoint whose weights have several schemes.

    Args:
        settings: say which modules are excluded.
        each: all schemes.
        scheme_of: a weight's name -> its scheme; None: it is not quantized.
        names: as of `read_quant_config`.
    """
    for scheme in each:
        _warn_of_skipped(scheme)
        warn_of_expansion(scheme.packed)

    def format_of(name: str) -> str:
        scheme = scheme_of(name)
        if scheme is None or is_excluded(settings, name):
            return PLAIN
        if names is None:
            there = _is_projection(name)
        else:
            is_packed = scheme.format in MICROSCALED and name.removesuffix(WEIGHT) + PACKED_FP4 in names
            there = is_packed or _has_scales(name, names, scheme.packed)
        return scheme.format if there else PLAIN

    microscaled = {scheme.format: MICROSCALED[scheme.format] for scheme in each if scheme.format in MICROSCALED}
    blocks = {
        name: plugged.shape
        for format, plugged in microscaled.items()
        for name in plugged.weights(names or ())
        if plugged.shape is not None and format_of(name) == format
    }

    def view(source: TensorSource) -> TensorSource:
        if blocks:
            source = ShownWeights(source, blocks, lambda source, name: blocks[name](source, name))
        for packed in {scheme.packed for scheme in each if scheme.packed is not None}:
            source = UnpackedSource(source, packed, partial(_is_packed_so, packed=packed))
        return source

    def _is_packed_so(module: str, packed: IntegerPacking) -> bool:
        scheme = scheme_of(module + WEIGHT)
        return scheme is not None and scheme.packed == packed

    quants = {scheme.format: scheme.activation_quant for scheme in each if scheme.activation_quant is not None}
    readers = {**READERS, **{format: plugged.read for format, plugged in microscaled.items()}}
    return QuantFormats(format_of, quants, readers, UNREAD, shown=view)
