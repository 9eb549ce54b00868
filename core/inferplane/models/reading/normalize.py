"""Gives one spelling to a config's entries, whichever tool wrote them, and adds those that it leaves out.

Precedence and defaults are those of transformers 5: `convert_rope_params_to_dict` and `standardize_rope_params` in
modeling_rope_utils.py, and the fields of each family's configuration class. Sizes and the number of experts have no
defaults here, nor in most families the number of experts of a token: a config without them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
"""What the configuration classes of most families say of entries that a config leaves out."""

ExpertNames = tuple[str, str, str, str]
EXPERT_NAMES: ExpertNames = ("mlp", "gate_proj", "up_proj", "down_proj")
"""The block with the experts, and an expert's gate, up and down projections, in the names of most families."""


@dataclass(frozen=True)
class Spelling:
    """How the configs and checkpoints of one architecture are written.

    Args:
        model_type: their `model_type`.
        defaults: what the family's configuration class in transformers says of entries that a config leaves out, where
            `COMMON` does not say it.
        aliases: other names of entries. If a config has both, the one that the family reads counts.
        expert_names: as `EXPERT_NAMES`, in the names that the family reads.
        other_types: further values of `model_type` for models of the same form.
        is_fused: whether q, k and v, or gate and up, are stored as one.
        stacks_experts: checkpoints have a layer's experts in one tensor, with "inputs_first", or in "any_order"
            (`stacked_experts`).
        renames: pattern of a part of a tensor's stored name -> what stands there in the name that the family reads.
        splits: last part of a module's stored name -> those of the modules that share its rows equally, in order.
    """

    model_type: str
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str]
    expert_names: ExpertNames
    other_types: tuple[str, ...] = ()
    is_fused: bool = False
    stacks_experts: Literal["", "inputs_first", "any_order"] = ""
    renames: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def model_types(self) -> tuple[str, ...]:
        """Every value of `model_type` that stands for this architecture."""
        return (self.model_type, *self.other_types)


SPELLINGS: dict[str, Spelling] = {}
"""Architecture -> how its configs are written; each family registers its own (`registry.architecture`)."""

_NULLABLE = {
    "attention_value_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "head_dim",
    "mamba_d_ssm",
    "max_position_embeddings",
    "n_group",
    "norm_topk_prob",
    "num_key_value_heads",
    "q_lora_rank",
    "rope_interleave",
    "sliding_window",
    "topk_group",
}
"""Entries in which null is a value of its own; in all others it stands for the default."""

EXPERT_DTYPE = "expert_dtype"
"""Entry of configs whose experts are stored in another format than other layers; it is one of the quantization."""
ORIGINAL = "original_max_position_embeddings"
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
"""Rotary types that start from a context of their own."""


def normalize(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's entries as families read them; a second call changes nothing.

    - `architectures` names the causal language model, also where it named the model without its head, or was left out
      beside a known `model_type`. If both are known and disagree, `model_type` counts (`complaints`).
    - Other names of an entry are replaced (`num_local_experts`), and entries left out have their class's default.
    - `rope_parameters` has all rotary settings that the config states anywhere: `rope_type`, `rope_theta`,
      `original_max_position_embeddings` and the type's own. `rope_scaling` and the top level's spellings are gone.

    Entries of an impossible kind stay as they are; what reads them refuses them.
    """
    out = _take_text_part(entries)
    family = _name_architecture(out)
    spelling = SPELLINGS.get(family)
    for other, name in (spelling.aliases if spelling else {}).items():
        if (value := out.pop(other, None)) is not None and out.get(name) is None:
            out[name] = value
    if out.get("hidden_act") == "swish":
        out["hidden_act"] = "silu"
    if out.get("quantization_config") is None and out.get("compression_config") is not None:
        out["quantization_config"] = out["compression_config"]  # as compressed-tensors once called it
    if isinstance(settings := out.get("quantization_config"), Mapping) and out.get(EXPERT_DTYPE) is not None:
        out["quantization_config"] = {EXPERT_DTYPE: out[EXPERT_DTYPE], **settings}
    for key, value in ({**COMMON, **spelling.defaults} if spelling else {}).items():
        if key not in out or (out[key] is None and key not in _NULLABLE):
            out[key] = value
    if all(out.get(key) is None or isinstance(out[key], Mapping) for key in ("rope_scaling", "rope_parameters")):
        context = out.get(ORIGINAL)
        _gather_rope(out)
        if spelling is not None and ORIGINAL in spelling.defaults:  # it would be taken for one that is left out
            out[ORIGINAL] = context
    return out


TIED = "tie_word_embeddings"
OUTER = ("quantization_config", "compression_config", "dtype", "torch_dtype", TIED, "eos_token_id")
"""Entries that a multimodal model's config may state beside its text model's."""
TEXT_PART_OF = "text_part_of"
"""Entry with the name of the multimodal model whose text part is read."""
WHOLE = "ForConditionalGeneration"
"""How names of multimodal models end. A family with such a name has the text part of that model."""


def _take_text_part(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the language model inside a multimodal one, where its family is known; else a copy."""
    inner, names = entries.get("text_config"), entries.get("architectures")
    if not isinstance(names, (list, tuple)) or len(names) != 1 or not isinstance(names[0], str):
        return dict(entries)
    if not isinstance(inner, Mapping):  # older configs have the entries of the text part among those of the whole
        is_whole = names[0] in SPELLINGS and names[0].endswith(WHOLE)
        return {**entries, TEXT_PART_OF: names[0]} if is_whole else dict(entries)
    kind = inner.get("model_type")
    text = next((name for name, spelling in SPELLINGS.items() if kind in spelling.model_types), None)
    if text is None or (names[0] in SPELLINGS and names[0] != text):
        return dict(entries)
    outer = {key: entries[key] for key in OUTER if entries.get(key) is not None and inner.get(key) is None}
    if text.endswith(WHOLE) and entries.get(TIED) is not None:  # it counts for the whole model's head
        outer[TIED] = entries[TIED]
    return {**inner, **outer, "architectures": [text], TEXT_PART_OF: names[0]}


def _name_architecture(out: dict[str, Any]) -> str:
    """Write the causal language model's name before another one for it in `architectures`; returns the name."""
    stated, of_type = out.get("architectures"), find_family(out)
    if not stated and of_type:
        stated = [of_type]
    if not isinstance(stated, (list, tuple)) or not stated or not isinstance(stated[0], str):
        return ""
    name = _causal(stated[0])
    if name in SPELLINGS and of_type:
        name = of_type
    out["architectures"] = list(stated) if name == stated[0] else [name, *stated]
    return name


def find_family(entries: Mapping[str, Any]) -> str | None:
    """The architecture that a config's `model_type` stands for; None: it is missing or not known."""
    kind = entries.get("model_type")
    return next((name for name, spelling in SPELLINGS.items() if kind in spelling.model_types), None)


def _causal(name: str) -> str:
    """The causal language model of a known model without its head, whole or of text; any other name as it is."""
    base = name.removesuffix("Model")
    known = [f"{base}ForCausalLM"]
    if name.endswith("TextModel"):
        text = name.removesuffix("TextModel")
        known += [f"{text}ForCausalLM", f"{text}{WHOLE}"]
    return next((causal for causal in known if causal in SPELLINGS), name)


def complaints(entries: Mapping[str, Any]) -> tuple[str, ...]:
    """Sentences about what contradicts itself in entries that `normalize` returned, and how they are read."""
    names, kind = entries.get("architectures"), entries.get("model_type")
    if (whole := entries.get(TEXT_PART_OF)) is not None:
        return (f"Of {whole} the text part is read: images and sound are not understood.",)
    if not isinstance(names, list) or len(names) < 2 or names[0] not in SPELLINGS:
        return ()
    if kind not in SPELLINGS[names[0]].model_types or not isinstance(names[1], str) or _causal(names[1]) == names[0]:
        return ()
    return (f"architectures names {names[1]}, model_type is {kind!r}; the model is built as {names[0]}.",)


def _gather_rope(out: dict[str, Any]) -> None:
    """Gather the rotary settings of all spellings in `rope_parameters`.

    As in transformers, `rope_scaling` counts if both objects are there; entries of the object count before those of the
    top level, but for `original_max_position_embeddings`; and the context is `max_position_embeddings` if none is
    stated.
    """
    older = out.pop("rope_scaling", None)
    settings = dict(older or out.get("rope_parameters") or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := out.pop(key, None)) is not None and settings.get(key) is None:
            settings[key] = value
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "su" or (kind == "yarn" and settings.get("short_factor") is not None):
        kind = "longrope"  # as Phi-3 called it at first
    if kind == "mrope" and settings.get("mrope_section") is not None:
        kind = "default"  # with positions by axis of an image, which tokens of text have all alike
    settings["rope_type"] = kind
    if kind in _WITH_ORIGINAL:
        for value in (out.get("max_position_embeddings"), settings.get(ORIGINAL), out.pop(ORIGINAL, None)):
            if value is not None:
                settings[ORIGINAL] = value
    implied = "factor" in settings if kind == "yarn" else kind == "longrope"
    if implied and settings.get("factor") is None:
        context, original = out.get("max_position_embeddings"), settings.get(ORIGINAL)
        if isinstance(context, int) and isinstance(original, int) and original > 0:
            settings["factor"] = context / original
    out["rope_parameters"] = {key: value for key, value in settings.items() if value is not None}
