"""What speculation is worth: drafts accepted by position, tokens a step, and decoding against plain decoding.

    python benchmarks/speculation.py                          # all methods on the demo model
    python benchmarks/speculation.py --methods eagle --json
    python benchmarks/speculation.py --temperature 0.8 --turns 0  # acceptance alone, of sampled text
    python benchmarks/speculation.py --batches 1 8 32 128 --methods ngram mtp draft --dtype bfloat16

Prompts are parts of files that neither the demo model nor its drafters were trained on (`tools/demo/demo_data.py`), and
for n-grams also ones that the model goes on with by repeating them. Acceptance is counted with a fixed number of
drafts, speed measured with the adaptive one. Each turn runs plain decoding and every method one after the other on the
same prompts, one at a time, so that what else runs on the machine meets all of them; a turn's ratio is taken within it.
Greedy tokens of every method are checked to be those of plain decoding.

With `--batches` only so many sequences at once are measured, each with and without drafts in one run. The bar is that
drafting never costs: at least 0.97 of plain decoding's tokens a second. What a method learns about a size of batch
takes hundreds of steps; the first turn is not counted. With `--shape` too, the model has random weights of that shape,
and so has a draft model of an eighth of its width and layers: hardly any draft of it is accepted, and what is measured
is whether drafting stops.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from shapes import SHAPES, config

from inferplane import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "demo"))
from demo_data import is_held_out, stdlib_files

METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 5},
    "draft": {"method": "draft_model", "model": "demo-draft"},
    "mtp": {"method": "mtp"},
    "eagle": {"method": "eagle", "model": "demo-eagle"},
}
BAR = 0.97
DRAFTS = {"ngram": 7, "draft": 3, "mtp": 2, "eagle": 3}
"""Most drafts of each method when speed is measured: more cost more than they bring, on this model and a processor."""


def held_out(count, prompt_tokens, tokenizer):
    """Prompts: the text behind the first lines of held-out files, the longest files first, as token ids."""
    texts = sorted((text for path, text in stdlib_files() if is_held_out(path)), key=len, reverse=True)
    ids = [tokenizer.encode(text[1000 : 1000 + 12 * prompt_tokens])[:prompt_tokens] for text in texts[:count]]
    return [p for p in ids if len(p) == prompt_tokens]


def repeating(prompts, params, args):
    """Prompts that the model goes on with by repeating them: each with what the model says behind it, greedily.

    Small models soon say the same again. A prompt that is merely written several times over would not do: this model
    copies a few tokens of it, then goes its own way.
    """
    with opened(None, args) as llm:
        said, _, _ = decode(llm, prompts, replace(params, temperature=0.0, max_tokens=192))
    return [p + s for p, s in zip(prompts, said)]


def repeated(prompts, texts, width=8):
    """Which part of the texts, in pieces of `width` tokens, stands in their prompts."""
    pieces = [(p, t[i : i + width]) for p, t in zip(prompts, texts) for i in range(0, len(t) - width + 1, width)]
    return sum(any(p[i : i + width] == piece for i in range(len(p))) for p, piece in pieces) / len(pieces)


def at_once(llm, prompts, most, clock):
    """Tokens a second while all prompts decode together."""
    params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    requests = [llm.add(prompt, params) for prompt in prompts]
    while any(not r.generated for r in requests):
        llm.engine.step()
    before, begun = sum(len(r.generated) for r in requests), clock()
    while all(r.finish_reason is None for r in requests):
        llm.engine.step()
    spent, made = clock() - begun, sum(len(r.generated) for r in requests) - before
    for r in requests:
        llm.engine.end(r, "abort")
    return made / spent


def batches(methods, prompts, args):
    """By number of sequences: tokens a second of plain decoding, and by turns what each method's are of that."""
    clock = time.process_time if args.cpu_clock else time.perf_counter
    models = {name: opened(None if name == "plain" else name, args) for name in ("plain", *methods)}
    out = {}
    try:
        for count in args.batches:
            # As many different prompts: each begins a little later in its file than the one before.
            own = [prompts[i % len(prompts)][i // len(prompts) :] for i in range(count)]
            rates = {name: [] for name in models}
            for _ in range(args.turns + 1):
                for name, llm in models.items():
                    rates[name].append(at_once(llm, own, args.max_tokens, clock))
            out[count] = {"plain_tokens_per_s": median(rates["plain"][1:])}
            for name in methods:
                ratios = sorted(a / b for a, b in zip(rates[name][1:], rates["plain"][1:]))
                out[count][name] = {"times_plain": median(ratios), "least": ratios[0], "most": ratios[-1]}
    finally:
        for llm in models.values():
            llm.close()
    return out


def opened(method, args, drafts=None, adaptive=True):
    """A model that drafts with a method; None: plain."""
    spec, shape = None, {}
    if method is not None:
        spec = {**METHODS[method], "num_speculative_tokens": drafts or DRAFTS[method], "adaptive": adaptive}
    if args.shape:
        shape = {"load_format": "dummy", "max_model_len": 2048}
        if method == "draft":
            spec["model"] = config(smaller(SHAPES[args.shape]), 2048)
    return LLM(
        config(SHAPES[args.shape], 2048) if args.shape else "demo",
        device=args.device,
        dtype=args.dtype,
        speculative_config=spec,
        enable_prefix_caching=False,
        max_num_seqs=max(4, *(args.batches or (4,))),
        kv_cache_tokens=512 * max(args.batches) if args.batches else None,
        **shape,
    )


def smaller(shape):
    """Sizes of a draft model: an eighth of the width and of the layers, of the same vocabulary."""
    parts = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {**shape, **{part: max(1, shape[part] // 8) for part in parts}}


def decode(llm, prompts, params, clock=time.perf_counter):
    """Tokens, seconds from each prompt's first token to its last, and how many tokens came in them."""
    tokens, spent, made = [], 0.0, 0
    for prompt in prompts:
        request = llm.add(prompt, params)
        while not request.generated:
            llm.engine.step()
        first, begun = len(request.generated), clock()
        while request.finish_reason is None:
            llm.engine.step()
        spent += clock() - begun
        made += len(request.generated) - first
        tokens.append(request.generated)
    return tokens, spent, made


def acceptance(method, prompts, params, args):
    """By position: how many drafts were made, and which part of them stood (with all that were before them)."""
    with opened(method, args, args.drafts, adaptive=False) as llm:
        decode(llm, prompts, params)
        stats = llm.engine.stats()
    drafted = stats["spec_decode_num_draft_tokens_per_pos"]
    stood = stats["spec_decode_num_accepted_tokens_per_pos"]
    stood += [0] * (len(drafted) - len(stood))
    steps = stats["steps_total"] - len(prompts)  # without the prompts' own
    tokens = stats["generation_tokens_total"] - len(prompts)
    return {
        "drafts": args.drafts,
        "drafted": drafted,
        "accepted": stood,
        "acceptance": [a / d for a, d in zip(stood, drafted)],
        "tokens_per_step": tokens / steps,
        "forward_rows": stats["forward_rows_total"],
    }


def speeds(methods, prompts, params, args):
    """Tokens a second of plain decoding and of each method, by turns, and what each is of plain in its turn."""
    clock = time.process_time if args.cpu_clock else time.perf_counter
    models = {name: opened(None if name == "plain" else name, args) for name in ("plain", *methods)}
    rates = {name: [] for name in models}
    try:
        want = {name: decode(llm, prompts, params)[0] for name, llm in models.items()}  # warm
        wrong = [name for name in models if want[name] != want["plain"]] if params.temperature == 0 else []
        assert not wrong or args.dtype != "float32", f"{wrong} give other tokens than plain decoding"
        for _ in range(args.turns):
            for name, llm in models.items():
                _, spent, made = decode(llm, prompts, params, clock)
                rates[name].append(made / spent)
    finally:
        for llm in models.values():
            llm.close()
    out = {}
    for name, each in rates.items():
        ratios = sorted(a / b for a, b in zip(each, rates["plain"]))
        out[name] = {
            "tokens_per_s": median(each),
            "times_plain": median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
            "same_tokens": want[name] == want["plain"],
            "repeats_prompt": repeated(prompts, want[name]),
        }
    return out


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--prompts", type=int, default=6, help="held-out files")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate for each")
    parser.add_argument("--drafts", type=int, default=5, help="drafts a step when acceptance is counted")
    parser.add_argument("--turns", type=int, default=7, help="turns of the comparison of speeds; 0 leaves it out")
    parser.add_argument("--batches", type=int, nargs="+", default=(), help="sequences at once; measures nothing else")
    parser.add_argument("--shape", choices=SHAPES, help="with --batches: random weights of this shape, not the demo's")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--cpu-clock", action="store_true", help="time by the process's CPU clock: for a busy machine, with one thread"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    if args.shape and (not args.batches or not set(args.methods) <= {"ngram", "draft"}):
        parser.error("--shape goes with --batches and the methods ngram and draft")
    begun = time.perf_counter()
    with LLM("demo", device=args.device, dtype=args.dtype) as llm:
        prompts = held_out(args.prompts, args.prompt_tokens, llm.tokenizer)  # any vocabulary here is larger
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1, ignore_eos=True)
    told = {
        "benchmark": "speculation",
        "model": args.shape or "demo",
        "device": args.device,
        "dtype": args.dtype,
        "temperature": args.temperature,
        "prompts": len(prompts),
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "turns": args.turns,
        "clock": "cpu" if args.cpu_clock else "wall",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    if args.batches:
        told["bar"], told["batches"] = BAR, batches(args.methods, prompts, args)
    else:
        told["acceptance"] = {m: acceptance(m, prompts, params, args) for m in args.methods}
    if args.turns and not args.batches:
        told["speed"] = {"held_out": speeds(args.methods, prompts, params, args)}
        if "ngram" in args.methods:
            told["speed"]["repeating"] = speeds(["ngram"], repeating(prompts, params, args), params, args)
    told["seconds"] = round(time.perf_counter() - begun, 1)
    print(json.dumps(told, indent=1) if args.json else text(told))


def text(told):
    """The figures as tables."""
    lines = [f"{told['prompts']} held-out prompts, {told['max_tokens']} tokens each, temperature {told['temperature']}"]
    for count, found in told.get("batches", {}).items():
        each = ", ".join(
            f"{m} {found[m]['times_plain']:.2f} ({found[m]['least']:.2f} to {found[m]['most']:.2f})"
            for m in found
            if m != "plain_tokens_per_s"
        )
        lines.append(f"{count:>4} at once: plain {found['plain_tokens_per_s']:.0f} tokens/s; times that: {each}")
    if told.get("batches"):
        lines.append(f"bar: at least {BAR} of plain decoding")
    for name, a in told.get("acceptance", {}).items():
        parts = " ".join(f"{x:4.0%}" for x in a["acceptance"])
        lines.append(f"{name:>6}: {a['tokens_per_step']:.2f} tokens a step with {a['drafts']} drafts, accepted {parts}")
    for kind, found in told.get("speed", {}).items():
        lines.append(
            f"{kind}, {told['dtype']}, {told['threads']} threads, {told['turns']} turns, {told['clock']} clock"
        )
        for name, s in found.items():
            spread = f"{s['times_plain']:.2f} x plain ({s['least']:.2f} to {s['most']:.2f})"
            rate, part = s["tokens_per_s"], s["repeats_prompt"]
            lines.append(f"{name:>6}: {rate:7.1f} tokens/s, {spread}; {part:.0%} of it stands in the prompt")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
