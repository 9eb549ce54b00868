"""Writes the demo model's folder from a finished training run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
from demo_check import evaluate
from demo_data import SPECIALS, SPLIT, Dataset, data_hash, is_held_out
from demo_format import is_fp8, load_folder, quantize_blocks, to_hf_state
from demo_model import BOS, EOS, PAD, Config, Model, UsageError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from train_loop import Options

DEFAULT_OUT = Path(__file__).resolve().parents[2] / "core" / "inferplane" / "models" / "demo"
SIZE_LIMIT = 16_000_000  # bytes, the whole exported folder

README = """# Inferplane demo model

A {params:.1f}-million-parameter language model with DeepSeek-V3's architecture (multi-head latent attention with V3's
head sizes, 8 routed experts and a shared one, one multi-token-prediction layer) in DeepSeek-V3's FP8 checkpoint format
(float8 e4m3 weights, one float32 scale for each 128 x 128 block). It exists so that the platform can be tried, tested
and measured without a download: it exercises the code paths of the large model at a size that runs on any CPU.

It was trained for {minutes:.0f} minutes on a CPU, on the source code of Python's standard library and nothing else,
so it continues Python code, loosely. It is a plain completion model and **not a chat model**: the chat template only
joins the contents of the messages by newlines, without roles or markers. Greedy
completion soon repeats itself, as small models do; sampling at a temperature near 0.8 reads better.

Held-out loss (files of the standard library kept out of training): {loss:.3f} nats/token, {byte:.3f} nats/byte,
measured on this folder's weights; `training.json` has all measurements and what they were made with. It was trained at
contexts of up to {context} tokens.

Layout notes: the output head is tied to the embedding; layer {mtp} is the multi-token-prediction layer, whose embedding
and head are the main model's and are not repeated in the file. Its row i takes the embedding of token i + 1 and the
main model's state i after the final norm, at rotary position i.

Made by `tools/demo/train_demo.py` of the project (`train`, then `export`); its `eval` recomputes the loss.
The training text is Python's own source, which is under the PSF License Agreement
(https://docs.python.org/3/license.html).
"""

# No trailing newline after the last message: completion goes on right where the text ends.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message['content'] }}{% endfor %}"
)


def stored_tensors(model: Model) -> dict[str, Tensor]:
    """The checkpoint's tensors: FP8 blocks with their scales, the correction bias in float32, the rest in bfloat16."""
    tensors: dict[str, Tensor] = {}
    for name, value in to_hf_state(model).items():
        if is_fp8(name, value):
            tensors[name], tensors[name + "_scale_inv"] = quantize_blocks(value)
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = value.float().contiguous()
        else:
            tensors[name] = value.bfloat16().contiguous()
    return tensors


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, as Hugging Face's own files are."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(cfg: Config, model: Model, tok: Tokenizer, out: Path) -> None:
    """Weights, config and tokenizer: what is needed to run the model."""
    save_file(stored_tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors keeps its files private, these go into a package
    tok.save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "config.json", cfg.to_hf(fp8=True))
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    write_json(out / "generation_config.json", {**ids, "do_sample": True, "temperature": 0.7, "top_p": 0.95})
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[BOS],
            "eos_token": SPECIALS[EOS],
            "pad_token": SPECIALS[PAD],
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": cfg.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def measure(model: Model, shipped: Model, data: Dataset, context: int) -> dict[str, dict[str, Any]]:
    """Held-out results of the weights in memory and of the shipped ones, the latter at two contexts."""
    short = min(512, context)
    results = {
        "float32_in_memory": evaluate(model, data.held, context, torch.float32),
        "exported_fp8_dequantized_float32": evaluate(shipped, data.held, context, torch.float32),
        f"exported_fp8_dequantized_float32_context_{short}": evaluate(shipped, data.held, short, torch.float32),
    }
    for result in results.values():
        result["loss_per_byte"] = result["loss"] * sum(map(len, data.held)) / data.held_bytes
    return results


def export(work: Path, out: Path) -> None:
    """Write the Hugging Face folder from work/final.pt, measure it and describe it in training.json.

    The files replace those of an earlier export only when all of them are there and measured.
    """
    source = work / "final.pt"
    if not source.exists():
        raise UsageError(f"{source} does not exist: run `train` with the same --work folder first")
    saved = torch.load(source, weights_only=True)
    cfg, opt = Config(**saved["config"]), Options(**saved["options"])
    model = Model(cfg)
    model.load_state_dict(saved["state"])
    model.eval()
    tok = Tokenizer.from_file(str(work / "tokenizer.json"))
    data = Dataset.build(cfg.vocab_size, tok)
    new = work / "export"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    write_model(cfg, model, tok, new)
    context = Options.at(opt.context, 1.0)
    measured = measure(model, load_folder(new)[1], data, context)
    parameters = sum(p.numel() for p in model.parameters())
    write_json(
        new / "training.json",
        {
            "what": "Inferplane demo model: DeepSeek-V3 architecture, trained on Python's standard library",
            "loss_unit": "nats; mean over held-out tokens, windows of `context` tokens with nothing carried over",
            "context": context,
            "held_out": measured,
            "held_out_bytes_per_token": data.held_bytes / sum(map(len, data.held)),
            "parameters": parameters,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "files": len(data.files),
            "files_held_out": sum(is_held_out(path) for path, _ in data.files),
            "files_sha256": data_hash(data.files),
            "train_tokens": sum(map(len, data.train)),
            "tokens_seen": saved["seen"],
            "steps": saved["step"],
            "wall_minutes": round(saved["elapsed"] / 60, 1),
            "seed": opt.seed,
            "tokenizer": {
                "kind": "byte-level BPE",
                "vocab_size": cfg.vocab_size,
                "split": SPLIT,
                "sha256": hashlib.sha256((new / "tokenizer.json").read_bytes()).hexdigest(),
            },
            "options": dataclasses.asdict(opt),
        },
    )
    result = measured["exported_fp8_dequantized_float32"]
    text = README.format(
        params=parameters / 1e6,
        minutes=saved["elapsed"] / 60,
        loss=result["loss"],
        byte=result["loss_per_byte"],
        context=context,
        mtp=cfg.num_hidden_layers,
    )
    (new / "README.md").write_text(text, encoding="utf-8")
    size = sum(p.stat().st_size for p in new.iterdir())
    print(json.dumps({"folder": str(out), "bytes": size, "held_out": measured}, indent=2))
    if size > SIZE_LIMIT:
        raise UsageError(f"the export has {size} bytes, the limit is {SIZE_LIMIT}: lower the sizes in Config")
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(new.iterdir()):
        shutil.move(path, out / path.name)
