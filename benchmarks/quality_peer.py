#!/usr/bin/env python3
"""Quantizes a model by llm-compressor, for a row of benchmarks/quality.py; it runs in an environment of its own.

    python3 -m venv build/peer && build/peer/bin/pip install llmcompressor==0.14.0
    build/peer/bin/python benchmarks/quality_peer.py --model M --windows w.json --method gptq --group 128 --out OUT

The windows are the token ids that Inferplane's own methods are calibrated on. Weights of linear layers become integers
of 4 bits in groups, symmetric; the head stays as it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM


def make_modifier(method: str, group: int) -> object:
    """The method with its defaults, for weights in groups."""
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    more = {
        "config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
        "ignore": ["lm_head"],
    }
    if method == "gptq":
        from llmcompressor.modifiers.gptq import GPTQModifier

        return GPTQModifier(**more)
    if method == "awq":
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier

        return [AWQModifier(duo_scaling="both"), QuantizationModifier(**more)]
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(**more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--windows", type=Path, required=True, help="JSON: a list of lists of token ids")
    parser.add_argument("--method", choices=("nearest", "gptq", "awq"), required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    windows = json.loads(args.windows.read_text(encoding="utf-8"))
    data = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows])
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="bfloat16")
    oneshot(
        model=model,
        dataset=data,
        recipe=make_modifier(args.method, args.group),
        num_calibration_samples=len(windows),
        max_seq_length=max(map(len, windows)),
        output_dir=str(args.out),
    )


if __name__ == "__main__":
    main()
