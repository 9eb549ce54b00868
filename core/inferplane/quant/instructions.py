"""What a quantization config tells a reader to do beside reading weights: refused by name where it is not done here.

Of compressed-tensors' rotations (`transform_config`), what is folded into weights needs nothing. Of the others,
Hadamard matrices without random signs before a module are carried out, by blocks of a power of two (`head_dim`).

Source: compressed-tensors' transforms (`TransformScheme`, `TransformArgs`, `HadamardFactory`).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inferplane.errors import UnsupportedModelError, warn
from inferplane.quant.mixed_groups import REGEX

CONFIG_KEYS = (
    "config_groups", "format", "global_compression_ratio", "ignore", "kv_cache_scheme", "quant_method",
    "quantization_status", "sparsity_config", "transform_config", "version",
)  # fmt: skip
GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
ARGS_KEYS = (
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip
"""Entries of compressed-tensors that are carried out, checked, or without effect on results."""
ORDERS = (None, "static", "weight", "dynamic", "group", False)
"""Activation orders of compressed-tensors; `UnpackedSource` checks that columns of a group are adjacent."""
CORE_METHODS = ("fp8", "fbgemm_fp8", "gptq", "awq", "modelopt", "mxfp4")
MORE_LAYERS = (
    "adapter", "hadamard_config", "rotation", "rotation_config", "rotation_configs", "sparsity_config",
    "spinquant_config", "transform_config", "transforms",
)  # fmt: skip
"""Entries of other methods that add arithmetic around the quantized layers (GPTQModel, AutoRound)."""
EXPECTED: Mapping[str, tuple[Any, ...]] = {
    "act_bits": (16, 32),
    "activation": (),
    "act_data_type": ("float", "float16", "bfloat16", "int"),
    "data_type": ("int", "int_sym", "int_asym"),
    "expert_dtype": ("fp8", "fp4"),
    "extra_config": (),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "is_marlin_format": (),
    "method": CORE_METHODS,
    "pack_dtype": ("int32", "torch.int32"),
    "regex_config": (),
    "super_bits": (),
    "super_group_size": (),
}
"""Entries of other methods that change how weights are read, or what is computed with them, unless they have one of
these values (AutoRound's other types and its settings a layer, another packing, FP8 of another form)."""
NO_EFFECT = (
    "act_dynamic", "act_group_aware", "act_group_size", "act_sym", "activation_scheme", "amp", "auto_mixed_precision",
    "autoround_version", "backend", "batch_size", "bits", "block_name_to_quantize", "cache_block_outputs",
    "calibration", "checkpoint_format", "compute_dtype", "damp_auto_increment", "damp_percent", "dataset",
    "dequantize", "desc_act", "disable_exllama", "do_fuse", "dynamic", "enable_minmax_tuning",
    "enable_norm_bias_tuning", "enable_quanted_input", "exclude_modules", "exllama_config", "failsafe", "fallback",
    "format", "fuse_max_seq_len", "gptaq", "gptaq_alpha", "gradient_accumulate_steps", "group_size", "ignore",
    "ignored_layers", "iters", "kv_cache_group", "lm_head", "low_gpu_mem_usage", "lr", "max_input_length", "meta",
    "minmax_lr", "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "modules_to_fuse", "modules_to_not_convert", "mse", "not_use_best_mse",
    "nsamples", "offload_to_disk", "offload_to_disk_path", "packing_format", "pad_token_id", "parallel_packing",
    "process", "producer", "provider", "q_group_size", "quant_algo", "quant_block_list", "quant_method", "quant_type",
    "sampler", "scale_dtype", "scale_fmt", "seed", "seqlen", "static_attention_granularity", "static_groups",
    "static_kv_granularity", "supported_types", "sym", "to_quant_block_names", "tokenizer", "true_sequential",
    "use_exllama", "v2", "version", "vram_strategy", "w_bit", "weight_block_size", "zero_point",
)  # fmt: skip
"""Entries of other methods that are carried out, checked, shown by the tensors' names, or of use to exporters only."""
TRANSFORMS = "transform_config"
"""Entry of a quantization config; of a model's config where nothing is quantized yet."""
FOLDED = ("weight_input", "weight_output")
INPUT = "input"
TRANSFORM_KEYS = ("type", "apply", "randomize", "requires_grad", "precision", "head_dim", "block_size")
APPLY_KEYS = ("targets", "location", "inverse", "ignore")
KV_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method", "static_kv_dtype")


def check_instructions(method: str, settings: Mapping[str, Any]) -> None:
    """Refuse what a checkpoint says is to be done with it and that is not done here. What it says of the KV cache is
    read where the cache is chosen.

    Raises:
        UnsupportedModelError: the instruction, by name.
    """
    if method == "compressed-tensors":
        found = _instructions(settings)
    else:
        found = ((k, settings.get(k)) for k in (*MORE_LAYERS, *EXPECTED) if settings.get(k) not in EXPECTED.get(k, ()))
    groups = {"config_groups"} if method == "modelopt" else set()  # what quant_algo says, in another form
    known = {*KV_CACHE, *MORE_LAYERS, *EXPECTED, *NO_EFFECT, *groups}
    unknown = [k for k, value in settings.items() if k not in known and value] if method in CORE_METHODS else []
    if unknown:
        warn(
            f"quantization_config of the checkpoint has entries that are not known for {method!r} and not applied: "
            f"{', '.join(map(repr, unknown))[:200]}. If they change results, load a checkpoint without them."
        )
    for name, value in found:
        if value:
            raise UnsupportedModelError(
                f"The checkpoint's quantization_config has {name} = {str(value)[:100]}, which is not implemented: "
                "without it the results would be wrong.",
                there_is="weights and activations without transforms, sparsity, adapters and quantized outputs",
                remedy="load a checkpoint that was quantized without it",
            )


def _instructions(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries of a compressed-tensors config that are not carried out, with their values; empty values do nothing."""
    yield from ((key, value) for key, value in settings.items() if key not in CONFIG_KEYS)
    if read_rotations(settings.get(TRANSFORMS)) is None:
        yield TRANSFORMS, settings[TRANSFORMS]
    sparsity = settings.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"):
        yield "sparsity_config", sparsity
    groups = settings.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping):
            continue
        yield from ((f"{name}.{key}", value) for key, value in group.items() if key not in GROUP_KEYS)
        yield f"{name}.output_activations", group.get("output_activations")
        for part in ("weights", "input_activations"):
            args = group.get(part)
            if not isinstance(args, Mapping):
                continue
            yield from ((f"{name}.{part}.{k}", v) for k, v in args.items() if k not in ARGS_KEYS)
            if args.get("actorder") not in ORDERS:
                yield f"{name}.{part}.actorder", args["actorder"]


EXCLUDED = ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert")
"""Entries that name modules which are not quantized."""


def is_excluded(settings: Mapping[str, Any], name: str) -> bool:
    """Whether a config says that a weight is not quantized: its module, or one around it, has one of the names.

    Args:
        settings: the config's `quantization_config`.
        name: the weight's name.

    Source: ModelOpt writes shell patterns, compressed-tensors names or "re:" with a regular expression.
    """
    module = name.removesuffix(".weight")
    lists = [settings.get(key) for key in EXCLUDED]
    patterns = [p for found in lists if isinstance(found, (list, tuple)) for p in found if isinstance(p, str)]
    return any(_names_module(pattern, module) for pattern in patterns)


def _names_module(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), module) is not None
        except re.error:
            return False
    return fnmatch.fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")


@dataclass(frozen=True)
class InputRotation:
    """Modules whose input is rotated.

    Args:
        targets: names of modules, or "re:" with a regular expression that matches the beginning of one.
        ignore: likewise; modules that are left out.
        block: columns that are rotated together; 0: all.
    """

    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    block: int

    def includes(self, module: str) -> bool:
        """Whether the input of a module is rotated."""
        return _matches(self.targets, module) and not _matches(self.ignore, module)


def _matches(patterns: Sequence[str], module: str) -> bool:
    return any(
        re.match(pattern.removeprefix(REGEX), module) if pattern.startswith(REGEX) else pattern == module
        for pattern in patterns
    )


def read_rotations(transforms: Any) -> tuple[InputRotation, ...] | None:
    """The rotations of a `transform_config`; None if it states something that is not carried out."""
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    if not transforms or groups == {}:
        return ()
    if not isinstance(groups, Mapping) or set(transforms) != {"config_groups"}:
        return None
    found: list[InputRotation] = []
    for scheme in groups.values():
        rotations = _read_scheme(scheme)
        if rotations is None:
            return None
        found += rotations
    return tuple(found)


def _read_scheme(scheme: Any) -> list[InputRotation] | None:
    if not isinstance(scheme, Mapping) or set(scheme) - set(TRANSFORM_KEYS):
        return None
    applied = scheme.get("apply")
    if not isinstance(applied, list) or not all(isinstance(args, Mapping) for args in applied):
        return None
    online = [args for args in applied if args.get("location") not in FOLDED]
    block = scheme.get("block_size") or scheme.get("head_dim") or 0
    is_plain = scheme.get("type") == "hadamard" and not scheme.get("randomize")
    if online and not (is_plain and isinstance(block, int) and block & (block - 1) == 0):
        return None
    found = []
    for args in online:
        targets, ignore = args.get("targets"), args.get("ignore") or []
        known = args.get("location") == INPUT and not set(args) - set(APPLY_KEYS)
        if not known or not _are_names(targets) or not _are_names(ignore):
            return None
        found.append(InputRotation(tuple(targets), tuple(ignore), block))
    return found


def _are_names(patterns: Any) -> bool:
    """Whether these are names of modules and regular expressions; classes, such as "Linear", are not read here."""
    if not isinstance(patterns, list) or not all(isinstance(p, str) and "." in p for p in patterns):
        return False
    for pattern in patterns:
        if pattern.startswith(REGEX):
            try:
                re.compile(pattern.removeprefix(REGEX))
            except re.error:
                return False
    return True


def find_rotations(config: Mapping[str, Any]) -> tuple[InputRotation, ...]:
    """The rotations of a model, by its config; none where `check_instructions` refuses what is stated."""
    return read_rotations(_find_stated(config)) or ()


def take_transforms(config: dict[str, Any]) -> Any:
    """What a config states as `transform_config`, removed where it stands beside no quantization; None: nothing."""
    found = _find_stated(config)
    config.pop(TRANSFORMS, None)
    return found


def _find_stated(config: Mapping[str, Any]) -> Any:
    settings = config.get("quantization_config")
    stated = settings.get(TRANSFORMS) if isinstance(settings, Mapping) else None
    return stated or config.get(TRANSFORMS)


def describe_rotations(blocks: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """The `transform_config` of rotations.

    Args:
        blocks: columns that are rotated together -> targets, as `InputRotation` has them.
    """

    def scheme(block: int, targets: Sequence[str]) -> dict[str, Any]:
        sides = (("input", False), ("weight_input", True))
        apply = [{"targets": [*targets], "location": x, "inverse": y, "ignore": []} for x, y in sides]
        return {"type": "hadamard", "apply": apply, "randomize": False, "requires_grad": False, "head_dim": block}

    return {"config_groups": {f"R4_{block}": scheme(block, targets) for block, targets in sorted(blocks.items())}}
