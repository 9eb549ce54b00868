"""Small drafters for the small models: MTP modules and EAGLE heads of random weights, and draft models that err now
and then.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def eagle_head(folder: Path, width: int, vocab: int, *, bias: bool = False, seed: int = 8) -> dict[str, torch.Tensor]:
    """Write a head with a Llama layer, named as published ones are; returns its tensors."""
    heads, inner = 4, width + 24
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
    }
    draw = torch.Generator().manual_seed(seed)
    layer = "layers.0"
    shapes = {
        "fc": (width, 2 * width),
        f"{layer}.self_attn.q_proj": (width, width),
        f"{layer}.self_attn.k_proj": (width // 2, width),
        f"{layer}.self_attn.v_proj": (width // 2, width),
        f"{layer}.self_attn.o_proj": (width, width),
        f"{layer}.mlp.gate_proj": (inner, width),
        f"{layer}.mlp.up_proj": (inner, width),
        f"{layer}.mlp.down_proj": (width, inner),
    }
    tensors = {f"{n}.weight": torch.randn(s, generator=draw) / math.sqrt(s[1]) for n, s in shapes.items()}
    tensors[f"{layer}.post_attention_layernorm.weight"] = 1 + 0.3 * torch.randn(width, generator=draw)
    tensors["embed_tokens.weight"] = torch.randn(vocab, width, generator=draw)  # published heads repeat it; not read
    if bias:
        tensors["fc.bias"] = 0.3 * torch.randn(width, generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def eagle3_head(
    folder: Path, model: Path, own_vocab: int, *, prefix: str = "midlayer.", seed: int = 8, **config: object
) -> dict[str, torch.Tensor]:
    """Write an EAGLE-3 head with a Llama layer of random weights, named as published ones are; returns its tensors. It
    is right now and then: it begins with the model's own late states, norm and head.

    Args:
        folder: to write.
        model: for which it drafts.
        own_vocab: tokens of its head, spread over those of the model.
        prefix: of the names of its layer. config: further entries of its config, or others.
    """
    base, tensors = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    width, vocab, heads = base["hidden_size"], base["vocab_size"], 4
    inner = width + 24
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.q_proj": (width, 2 * width),
        "self_attn.k_proj": (width // 2, 2 * width),
        "self_attn.v_proj": (width // 2, 2 * width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    own = {f"{prefix}{n}.weight": 0.1 * torch.randn(s, generator=draw) / math.sqrt(s[1]) for n, s in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        own[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=draw)
    ids = torch.arange(own_vocab) * vocab // own_vocab
    noise = 0.02 * torch.randn(width, 3 * width, generator=draw)
    own |= {
        "fc.weight": torch.cat((torch.zeros(width, 2 * width), torch.eye(width)), 1) + noise,
        "norm.weight": tensors["model.norm.weight"].float().clone(),
        "lm_head.weight": tensors["lm_head.weight"].float()[ids].clone(),
        "d2t": ids - torch.arange(own_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True),
    }
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab,
        "draft_vocab_size": own_vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(own, folder / "model.safetensors")
    return own


def noisy_copy(source: Path, folder: Path, noise: float = 0.1, seed: int = 9) -> None:
    """A model like another one, which therefore often guesses what that says, but not always."""
    shutil.copytree(source, folder)
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name, t in tensors.items():
        tensors[name] = t + noise * t.std() * torch.randn(t.shape, generator=draw) if t.ndim > 1 else t
    save_file(tensors, folder / "model.safetensors")


def with_mtp(folder: Path, *, follows_tokens: bool = False) -> None:
    """Give a checkpoint an MTP module of random weights, named as published ones are; with `follows_tokens` one that
    begins with the next token's embedding, as the model itself does, and is right now and then.
    """
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(6)
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    for name in [n for n in tensors if n.startswith(f"model.layers.{last}.")]:
        tensors[name.replace(f"layers.{last}.", f"layers.{last + 1}.", 1)] = tensors[name].clone()
    new = f"model.layers.{last + 1}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{new}{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=draw)
    tensors[f"{new}eh_proj.weight"] = torch.randn(width, 2 * width, generator=draw) / math.sqrt(2 * width)
    if follows_tokens:
        passed = torch.cat((torch.eye(width), 0.3 * torch.eye(width)), 1)
        tensors[f"{new}eh_proj.weight"] = passed.to(tensors["lm_head.weight"].dtype)
    tensors[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors")


def mtp_alone(source: Path, folder: Path, *, number: int | None = None, without: tuple[str, ...] = ()) -> None:
    """Write a folder with nothing but the prediction layer of a checkpoint.

    Args:
        source: the checkpoint.
        folder: to write.
        number: of the layer in the folder; None: as in the checkpoint. Some tools number from 0, and count one layer.
        without: ends of names that are left out.
    """
    config = json.loads((source / "config.json").read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors = {n: t for n, t in load_file(source / "model.safetensors").items() if n.startswith(prefix)}
    if number is not None:
        tensors = {f"model.layers.{number}.{n.removeprefix(prefix)}": t for n, t in tensors.items()}
        config |= {"num_hidden_layers": 1, "architectures": [f"{config['architectures'][0]}NextN"]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t for n, t in tensors.items() if not n.endswith(without)}, folder / "model.safetensors")


def change_tensor(folder: Path, end: str) -> None:
    """Double the values of the tensor whose name ends so."""
    tensors = load_file(folder / "model.safetensors")
    (name,) = (n for n in tensors if n.endswith(end))
    save_file({**tensors, name: 2 * tensors[name]}, folder / "model.safetensors")
