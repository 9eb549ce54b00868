"""The demo model's folder: DeepSeek-V3's tensor names and FP8 block format, read and written."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_model import BLOCK, Config, Model, UsageError
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8_MAX = 448.0  # largest finite float8_e4m3fn


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [n, k] -> float8_e4m3fn [n, k] and float32 scale_inv [ceil(n / 128), ceil(k / 128)]; w = q * scale_inv."""
    n, k = w.shape
    padded = F.pad(w.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / FP8_MAX
    q = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).view_as(padded)[:n, :k]
    return q.to(torch.float8_e4m3fn).contiguous(), scale


def dequantize_blocks(q: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `quantize_blocks`, float32 [n, k]."""
    n, k = q.shape
    wide = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return q.float() * wide


def hf_name(name: str, cfg: Config) -> str:
    """Our parameter's name -> DeepSeek-V3's; experts and the gate are handled by `to_hf_state`."""
    if name == "embed":
        return "model.embed_tokens.weight"
    name = name.replace("mtp.", f"layers.{cfg.num_hidden_layers}.").replace("shared_head_norm", "shared_head.norm")
    return "model." + name


def to_hf_state(model: Model) -> dict[str, Tensor]:
    """The model's weights under DeepSeek-V3's tensor names, float32."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value, full = value.detach().float(), hf_name(name, model.cfg)
        stem, _, leaf = full.rpartition(".")
        if leaf == "gate":
            state[f"{stem}.gate.weight"] = value
        elif full.endswith(".mlp.bias"):
            state[f"{stem}.gate.e_score_correction_bias"] = value
        elif leaf == "w13":
            for e in range(value.shape[0]):
                state[f"{stem}.experts.{e}.gate_proj.weight"] = value[e, 0]
                state[f"{stem}.experts.{e}.up_proj.weight"] = value[e, 1]
        elif leaf == "w2":
            for e in range(value.shape[0]):
                state[f"{stem}.experts.{e}.down_proj.weight"] = value[e]
        else:
            state[full] = value
    return state


def from_hf_state(cfg: Config, state: dict[str, Tensor]) -> Model:
    """A float32 model from the tensors of `to_hf_state` (or of an exported, dequantized file)."""
    model = Model(cfg)
    ours: dict[str, Tensor] = {}
    for name in model.state_dict():
        full = hf_name(name, cfg)
        stem, _, leaf = full.rpartition(".")
        experts = range(cfg.n_routed_experts)
        if leaf == "gate":
            ours[name] = state[f"{stem}.gate.weight"]
        elif full.endswith(".mlp.bias"):
            ours[name] = state[f"{stem}.gate.e_score_correction_bias"]
        elif leaf == "w13":
            pairs = [[state[f"{stem}.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in experts]
            ours[name] = torch.stack([torch.stack(pair) for pair in pairs])
        elif leaf == "w2":
            ours[name] = torch.stack([state[f"{stem}.experts.{e}.down_proj.weight"] for e in experts])
        else:
            ours[name] = state[full]
    model.load_state_dict({name: value.float() for name, value in ours.items()})
    return model.eval()


def is_fp8(name: str, value: Tensor) -> bool:
    """Whether a tensor is stored in FP8: every matrix but the embedding and the router's gate."""
    return value.dim() == 2 and name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the dequantized float32 tensors of an exported folder."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).exists():
            raise UsageError(f"{folder / name} does not exist: give --model the exported folder")
    raw = load_file(folder / "model.safetensors")
    state = {}
    for name, value in raw.items():
        if not name.endswith("_scale_inv"):
            scale = raw.get(name + "_scale_inv")
            state[name] = value.float() if scale is None else dequantize_blocks(value, scale)
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), state


def load_folder(folder: Path) -> tuple[Config, Model]:
    """A float32 `Model` from an exported folder."""
    hf, state = read_folder(folder)
    cfg = Config.from_hf(hf)
    return cfg, from_hf_state(cfg, state)


def transformers_model(hf: dict[str, Any], state: dict[str, Tensor]) -> Any:
    """transformers' DeepseekV3ForCausalLM with these float32 weights, by way of its own loader."""
    from transformers import AutoModelForCausalLM

    extra = f"model.layers.{hf['num_hidden_layers']}."  # the MTP layer: transformers keeps it apart
    with tempfile.TemporaryDirectory() as folder:
        write_plain(Path(folder), hf, {k: v for k, v in state.items() if not k.startswith(extra)})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def transformers_mtp(hf: dict[str, Any], state: dict[str, Tensor], tokens: Tensor) -> Tensor | None:
    """MTP logits [B, T - 1, V] by transformers' own MTP layer for tokens [B, T]; None where it has none."""
    from transformers import AutoModelForCausalLM

    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        write_plain(Path(folder), hf, state)
        main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # transformers finds MTP layers by this list, which knows the published model's 61 layers only.
        main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{hf['num_hidden_layers']}\."]
        mtp = MtpModel.from_pretrained(main, device_map={"": "cpu"}).eval()
    states = main(tokens[:, :-1], use_cache=False, output_hidden_states=True).hidden_states[-1]
    positions = torch.arange(1, tokens.shape[1])[None].expand(tokens.shape[0], -1)
    ahead = mtp.forward_layer(0, states, positions, None, input_ids=tokens[:, 1:])
    return mtp.shared_head(ahead)


def write_plain(folder: Path, hf: dict[str, Any], state: dict[str, Tensor]) -> None:
    """An unquantized float32 folder that transformers can load."""
    hf = {k: v for k, v in hf.items() if k != "quantization_config"} | {"torch_dtype": "float32", "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
