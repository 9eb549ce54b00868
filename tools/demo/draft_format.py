"""Folders of what drafts for the demo model: published tensor names, FP8 blocks, written and read."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from demo_data import data_hash, stdlib_files
from demo_export import write_json
from demo_format import quantize_blocks, read_folder
from demo_model import BLOCK, BOS, EOS, PAD, UsageError
from draft_model import DraftConfig, DraftLM, EagleHead, sizes
from safetensors.torch import save_file
from torch import Tensor

SIZE_LIMIT = 6_000_000  # bytes, both folders together

README = """# {title}

{what} {parameters:.1f} million parameters, FP8 blocks as in the demo model, trained for {minutes:.0f} minutes on a CPU
on the demo model's own text and outputs. On held-out files its best token is the demo model's in {agreement:.0%} of
places; `training.json` has the measurements and what they were made with.

Made by `tools/demo/train_drafts.py` of the project (`train {kind}`, then `export`); its `eval {kind}`
recomputes the agreement. The training text is Python's own source, which is under the PSF License Agreement
(https://docs.python.org/3/license.html).
"""

TITLES = {
    "draft": (
        "Draft model of the Inferplane demo model",
        "A small Llama with the demo model's vocabulary and tied embeddings, which guesses what the demo model says.",
    ),
    "eagle": (
        "EAGLE head of the Inferplane demo model",
        "`fc([embedding of token i + 1 | hidden state i after the final norm])`, one Llama layer without a norm before "
        "its attention, then the demo model's own output head. The embedding is the demo model's too. Tensors have the "
        "names of published EAGLE-1 heads. Row i has rotary position i.",
    ),
}


def make_drafter(kind: str, cfg: DraftConfig, seed: int = 0) -> DraftLM | EagleHead:
    """A drafter with fresh weights."""
    return EagleHead(cfg, seed) if kind == "eagle" else DraftLM(cfg, seed)


def hf_config(kind: str, cfg: DraftConfig) -> dict[str, Any]:
    """The config.json."""
    return {
        "architectures": ["LlamaForCausalLM" if kind == "draft" else "EagleLlamaForCausalLM"],
        "model_type": "llama",
        **dataclasses.asdict(cfg),
        "num_key_value_heads": cfg.num_attention_heads,
        "head_dim": cfg.head_dim,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,  # of an EAGLE head's fc
        "hidden_act": "silu",
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }


def folded(drafter: DraftLM | EagleHead) -> dict[str, Tensor]:
    """Weights by published name, float32; an EAGLE head's scale multiplied in: features come and go as they are.

    With x the residual inside and s x what is shipped: fc takes features undivided and gives s x, queries, keys and
    values take s x, and what attention and the MLP add is s times as large. The norm between is blind to s.
    """
    state = {k: v.detach().float() for k, v in drafter.state_dict().items() if k != "scale"}
    if isinstance(drafter, DraftLM):
        return {("model.embed_tokens.weight" if k == "embed" else "model." + k): v for k, v in state.items()}
    s, width = drafter.scale.float(), drafter.cfg.hidden_size
    fc = state["fc.weight"].clone()
    fc[:, :width] *= s
    state["fc.weight"] = fc
    for name, value in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name] = value / s
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name] = value * s
    return state


def stored(drafter: DraftLM | EagleHead) -> dict[str, Tensor]:
    """The checkpoint's tensors: matrices as FP8 blocks with their scales, the rest in bfloat16."""
    tensors: dict[str, Tensor] = {}
    for name, value in folded(drafter).items():
        if name.endswith(("_proj.weight", "fc.weight")):
            tensors[name], tensors[name + "_scale_inv"] = quantize_blocks(value)
        else:
            tensors[name] = value.bfloat16().contiguous()
    return tensors


def load_drafter(kind: str, folder: Path) -> DraftLM | EagleHead:
    """A float32 drafter from an exported folder; an EAGLE head's scale is 1 then."""
    hf, state = read_folder(folder)
    cfg = DraftConfig(**{f.name: hf[f.name] for f in dataclasses.fields(DraftConfig)})
    drafter = make_drafter(kind, cfg)
    ours = {k.removeprefix("model.").replace("embed_tokens.weight", "embed"): v for k, v in state.items()}
    if kind == "eagle":
        ours["scale"] = torch.ones(())
    drafter.load_state_dict(ours)
    return drafter.eval()


def export(
    saved: dict[str, Any], demo: Path, out: Path, measure: Callable[[DraftLM | EagleHead, Path], dict[str, Any]]
) -> None:
    """Write the folder of a finished run, measure what it holds, and describe it in training.json.

    The files replace those of an earlier export only when all of them are there and measured.
    """
    kind, minutes = saved["kind"], sum(stage["minutes"] for stage in saved["stages"])
    drafter = make_drafter(kind, DraftConfig(**saved["config"]))
    drafter.load_state_dict(saved["state"])
    new = out.with_name(out.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(stored(drafter), new / "model.safetensors", metadata={"format": "pt"})
    (new / "model.safetensors").chmod(0o644)  # safetensors keeps its files private, these go into a package
    write_json(new / "config.json", hf_config(kind, drafter.cfg))
    result = measure(load_drafter(kind, new), demo)
    title, what = TITLES[kind]
    record = {
        "what": title,
        "held_out": result,
        "parameters": sizes(drafter),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "files_sha256": data_hash(stdlib_files()),
        "stages": saved["stages"],
    }
    write_json(new / "training.json", record)
    text = README.format(
        title=title,
        what=what,
        kind=kind,
        parameters=sizes(drafter) / 1e6,
        minutes=minutes,
        agreement=result["agreement"][0],
    )
    paragraphs = (textwrap.fill(p, 116, break_long_words=False) for p in text.split("\n\n"))
    (new / "README.md").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    size = sum(p.stat().st_size for p in new.iterdir())
    print(json.dumps({"folder": str(out), "bytes": size, "held_out": result}, indent=2))
    if size > SIZE_LIMIT:
        raise UsageError(f"the export has {size} bytes, the limit is {SIZE_LIMIT}: lower the sizes")
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(new.iterdir()):
        shutil.move(path, out / path.name)
    new.rmdir()
