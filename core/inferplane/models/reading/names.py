"""Gives the tensors of a checkpoint the names that families read, whichever tool wrote them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from inferplane.errors import first_of, warn
from inferplane.models.reading import mistral_format
from inferplane.models.reading.checkpoint import SafetensorsFolder
from inferplane.models.reading.config import MAX_SIZE, Config
from inferplane.models.reading.gguf_source import GGUFSource
from inferplane.models.reading.normalize import EXPERT_NAMES, SPELLINGS, TEXT_PART_OF, ExpertNames, Spelling
from inferplane.models.reading.safetensors_header import Entry
from inferplane.models.reading.stacked_experts import split_stacks
from inferplane.models.rope import frequencies
from inferplane.types import Shard

MODEL, NORM, EMBEDDING, HEAD = "model.", "norm.weight", "model.embed_tokens.weight", "lm_head.weight"
_FUSED = re.compile(
    r"(.*\.)(?:mlp|block_sparse_moe|feed_forward)\.experts\.(gate_up|gate|up|down)_proj(?:\.weight)?(_scale_inv|_scale)?"
)

CONVOLUTION = re.compile(r".*\.(?:[qkv]_)?conv(?:1d)?\.weight")
"""Names of depthwise convolutions, which are published as `[C, 1, k]`."""
_GRANITE = re.compile(r"(.*\.)(block_sparse_moe|shared_mlp)\.(input|output)_linear\.weight")
_GRANITE_PARTS = {"input": "gate_up_proj", "output": "down_proj"}

_BACKBONE = re.compile(r"backbone\.(?:(embeddings|norm_f)\.)?")
_BACKBONE_PARTS = {"embeddings": "embed_tokens.", "norm_f": "norm.", None: ""}

ROUNDING = 2**-8, 2**-24
"""Relative and absolute difference of frequencies that were stored in 16 bits."""


def canonical_names(entries: Mapping[str, Entry], config: Config) -> dict[str, Entry]:
    """Return the tensors of a checkpoint under the names that families read.

    - Mistral's own names (`mistral_format`) are replaced.
    - Names of Mamba's models, below `backbone.`, are replaced.
    - The layers are below `model.`, also where only the model without its head was saved, or inside a wrapper.
    - Experts of a layer that are fused to one tensor, as transformers 5 keeps them (`experts.gate_up_proj`
      `[E, 2 I, H]`, or `gate_proj` and `up_proj` apart, `experts.down_proj` `[E, H, I]`), are single tensors; nothing
      is read for that. So are those that lie with inputs before outputs (`stacked_experts`).
    - Names have parts replaced, and projections are split, as the family says (`Spelling.renames`, `Spelling.splits`).
    - Biases of routers that are stored as one row are vectors, as are rates of decay of heads (`A_log`) that are stored
      with further dimensions; weights of depthwise convolutions, stored as `[C, 1, k]`, are `[C, k]`.
    - Projections that are stored as one (`Spelling.is_fused`) are there as one and as parts; nothing is read for that.
    - Of a multimodal model only the tensors of the language model are there.
    - A head that is tied to an embedding which the files lack is the embedding.

    Args:
        entries: the tensors by their stored names.
        config: the model's; its architecture decides what experts are called.
    """
    spelling = SPELLINGS.get(config.architecture)
    expert_names = EXPERT_NAMES if spelling is None else spelling.expert_names
    if "tok_embeddings.weight" in entries:
        width, heads = config.size("hidden_size"), config.size("num_attention_heads")
        entries = mistral_format.rename(entries, config.size("head_dim", width // heads))
    block = expert_names[0]
    found: dict[str, Entry] = {}
    if spelling is not None and spelling.stacks_experts:
        width = config.size("hidden_size") if spelling.stacks_experts == "any_order" else 0
        entries = split_stacks(entries, width)
    entries = {_BACKBONE.sub(_rename_backbone, name, count=1): entry for name, entry in entries.items()}
    prefix = _find_wrapper(entries)
    rename = partial(_rename, prefix=prefix)
    if config.get(TEXT_PART_OF) is not None and prefix.startswith(MODEL):  # other parts lie beside it
        entries = {n: e for n, e in entries.items() if n.startswith(prefix) or not n.startswith(MODEL)}
    for stored, entry in _split_modules(entries, spelling):
        name = _GRANITE.sub(_rename_granite, rename(stored))
        for pattern, replacement in spelling.renames.items() if spelling else ():
            name = re.sub(pattern, replacement, name)
        fused = _FUSED.fullmatch(name)
        if fused and len(entry.shape) == 3:
            found.update(_experts(fused, entry, expert_names))
        elif name.endswith("e_score_correction_bias") and len(entry.shape) == 2 and entry.shape[0] == 1:
            found[name] = replace(entry, shape=entry.shape[1:])
        elif name.endswith(".A_log") and len(entry.shape) > 1:
            found[name] = replace(entry, shape=(math.prod(entry.shape),))
        elif CONVOLUTION.fullmatch(name) and len(entry.shape) == 3 and entry.shape[1] == 1:
            found[name] = replace(entry, shape=(entry.shape[0], entry.shape[2]))
        else:
            found[name if block == "mlp" else name.replace(".mlp.", f".{block}.")] = entry
    if config.get(TEXT_PART_OF) is not None:
        found = {name: entry for name, entry in found.items() if name.startswith((MODEL, "lm_head."))}
    if config.architecture in SPELLINGS and SPELLINGS[config.architecture].is_fused:
        for name, entry in list(found.items()):
            found.update(_split_parts(name, entry, config))
    if config.flag("tie_word_embeddings") and EMBEDDING not in found and HEAD in found:
        found[EMBEDDING] = found.pop(HEAD)
    return found


def _find_wrapper(entries: Mapping[str, Entry]) -> str:
    """What stored names have before those of the language model. The last norm's name tells where that is, or of
    several last norms the one with an embedding beside it: towers for images have norms, too."""
    norms = [name.removesuffix(NORM) for name in entries if name.endswith(f".{NORM}") or name == NORM]
    prefixes = [prefix for prefix in norms if f"{prefix}embed_tokens.weight" in entries] or norms
    prefixes = [prefix for prefix in prefixes if "layers." not in prefix]
    return prefixes[0] if len(prefixes) == 1 else MODEL


def _rename(name: str, prefix: str) -> str:
    """A stored name below `model.`."""
    if prefix == MODEL:
        return name
    outer = prefix.removesuffix(MODEL)
    if name == HEAD or name.startswith("lm_head."):
        return name
    if name.startswith(f"{outer}lm_head."):
        return name.removeprefix(outer)
    return MODEL + name.removeprefix(prefix) if name.startswith(prefix) else name.removeprefix(outer)


def _split_modules(entries: Mapping[str, Entry], spelling: Spelling | None) -> Iterator[tuple[str, Entry]]:
    """The tensors by their stored names; in place of one that several modules share (`Spelling.splits`) each one's
    rows."""
    splits = spelling.splits if spelling else {}
    for name, entry in entries.items():
        module, _, kind = name.rpartition(".")
        before, _, last = module.rpartition(".")
        parts = splits.get(last, (last,))
        rows, nbytes = entry.shape[:1], entry.nbytes // len(parts)
        if len(parts) == 1 or not rows or rows[0] % len(parts):
            yield name, entry
            continue
        shape = (rows[0] // len(parts), *entry.shape[1:])
        for i, part in enumerate(parts):
            start = entry.start + i * nbytes
            yield f"{before}.{part}.{kind}", replace(entry, shape=shape, start=start, nbytes=nbytes)


def _rename_backbone(found: re.Match[str]) -> str:
    """The beginning of a name below `backbone.` in the form of other families; a name that has it inside as it is."""
    return MODEL + _BACKBONE_PARTS[found[1]] if found.start() == 0 else found[0]


def _rename_granite(found: re.Match[str]) -> str:
    """Granite's name of the experts of a layer, or of its shared MLP, in the form of other families."""
    before, block, side = found.groups()
    below = "experts" if block == "block_sparse_moe" else block
    return f"{before}block_sparse_moe.{below}.{_GRANITE_PARTS[side]}.weight"


def _experts(fused: re.Match[str], entry: Entry, names: ExpertNames) -> Iterator[tuple[str, Entry]]:
    """The parts of a tensor with all experts of a layer, by name."""
    block, gate, up, down = names
    before, kind, scale = fused.groups()
    parts = {"gate_up": (gate, up), "gate": (gate,), "up": (up,), "down": (down,)}[kind]
    experts, rows, columns = entry.shape
    shape, nbytes = (rows // len(parts), columns), entry.nbytes // max(1, experts * len(parts))
    for i in range(experts * len(parts)):
        e, part = divmod(i, len(parts))
        name = f"{before}{block}.experts.{e}.{parts[part]}.weight{scale or ''}"
        yield name, replace(entry, shape=shape, start=entry.start + i * nbytes, nbytes=nbytes)


def _split_parts(name: str, entry: Entry, config: Config) -> Iterator[tuple[str, Entry]]:
    """The parts of a projection that is stored as one, by name; none for other tensors, and for quantized ones."""
    if len(entry.shape) != 2 or entry.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return
    rows, columns = entry.shape
    sizes: dict[str, int] = {}
    if name.endswith(".gate_up_proj.weight"):
        sizes = dict.fromkeys(("gate_proj", "up_proj"), rows // 2)
    elif name.endswith(".qkv_proj.weight"):
        heads = config.size("num_attention_heads")
        dim = config.size("head_dim", config.size("hidden_size") // heads)
        kv_rows = config.size("num_key_value_heads", heads) * dim
        sizes = {"q_proj": heads * dim, "k_proj": kv_rows, "v_proj": kv_rows}
    if sum(sizes.values()) != rows:
        return
    row_bytes, start = entry.nbytes // rows, entry.start
    for part, size in sizes.items():
        nbytes = size * row_bytes
        shape = (size, columns)
        yield re.sub(r"\w+\.weight$", f"{part}.weight", name), replace(entry, shape=shape, start=start, nbytes=nbytes)
        start += nbytes


def settle_head(config: Config, source: SafetensorsFolder | GGUFSource) -> Config:
    """Return the config with `tie_word_embeddings` as the tensors of the checkpoint have it.

    A head of its own beside an embedding that the config ties to it is used, as in transformers 5, with a warning. A
    model that was saved without its head, for embeddings, gets the embedding for one, with a warning.
    """
    heads = [name for name in source.names() if name.startswith("lm_head.")]
    if config.flag("tie_word_embeddings"):
        if not heads or source.shape(EMBEDDING) is None or (heads == [HEAD] and source.are_equal(HEAD, EMBEDDING)):
            return config
        warn(
            f"{config.name} has tie_word_embeddings, but the checkpoint holds another {heads[0]} than its embedding: "
            "this head is used, as in transformers."
        )
        return Config({**config, "tie_word_embeddings": False}, config.name)
    if heads or not any(name.endswith("Model") for name in config.get("architectures") or ()):
        return config
    warn(f"{config.name}: the checkpoint has no output head. Use it for embeddings; generated text means nothing.")
    return Config({**config, "tie_word_embeddings": True}, config.name)


def check_frequencies(config: Config, source: SafetensorsFolder | GGUFSource, ignored: Iterable[str]) -> None:
    """Warn of rotary frequencies that are stored in a checkpoint and not read, if the config gives others.

    Args:
        config: the model's.
        source: holds the tensors.
        ignored: names of the tensors that are not read; frequencies end with `rotary_emb.inv_freq`, `[dim / 2]`.
    """
    names = [name for name in ignored if name.endswith("rotary_emb.inv_freq")]
    if not names:
        return
    dim = config.get("head_dim") or config.size("hidden_size") // config.size("num_attention_heads")
    settings = {"max_position_embeddings": config.get("max_position_embeddings"), **config.rope}
    kinds = (settings, {**settings, "rope_type": "default"})  # older exports scale positions and store plain ones
    known = [frequencies(kind, dim, positions)[0] for kind in kinds for positions in (0, MAX_SIZE)]
    odd = []
    for name in names:
        found = torch.zeros(source.shape(name) or (1,))
        source.read_into(name, found, Shard())
        if found.shape != known[0].shape or not any(torch.allclose(found, one, *ROUNDING) for one in known):
            odd.append(name)
    if odd:
        warn(
            f"{config.name} gives other rotary frequencies than {len(odd)} tensor(s) of its checkpoint hold: "
            f"{first_of(odd)}. Those of the config count, as in transformers; check that it belongs to the checkpoint."
        )
