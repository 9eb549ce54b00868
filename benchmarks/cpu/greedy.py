"""Compares greedy text with llama.cpp's, from the same GGUF file: ten prompts in the model's own template.

    python greedy.py inferplane FILE.gguf ours.json             # writes prompts and tokens
    python greedy.py llama.cpp FILE.gguf ours.json theirs.json  # with the Python that has llama-cpp-python
    python greedy.py judge FILE.gguf ours.json theirs.json

llama.cpp quantizes activations to 8 bits; weights are the same. So where the texts part, `judge` gives the difference
of the two tokens' logits in Inferplane's float32 model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from questions import QUESTIONS

TOKENS = 32
MOST_TOKENS = 512


def open_model(file: str) -> Any:
    """The file's model in float32."""
    from inferplane import LLM

    return LLM(file, device="cpu", dtype="float32", max_model_len=MOST_TOKENS, max_num_seqs=len(QUESTIONS))


def write_ours(file: str, path: str) -> None:
    """Write the token ids of prompts, and those that Inferplane generates."""
    from inferplane import SamplingParams

    with open_model(file) as llm:
        prompts = [llm.tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS]
        results = llm.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0))
    tokens = [list(result.token_ids) for result in results]
    Path(path).write_text(json.dumps({"prompts": prompts, "tokens": tokens, "texts": [r.text for r in results]}))


def write_theirs(file: str, ours: str, path: str) -> None:
    """Write the tokens that llama.cpp generates after the same prompts, up to one that ends a text for it."""
    import llama_cpp

    model = llama_cpp.Llama(file, n_ctx=MOST_TOKENS, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model._model.model)
    found = []
    for prompt in json.loads(Path(ours).read_text())["prompts"]:
        model.reset()
        tokens: list[int] = []
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(int(token))
            if len(tokens) == TOKENS or llama_cpp.llama_vocab_is_eog(vocabulary, token):
                break
        found.append(tokens)
    Path(path).write_text(json.dumps({"tokens": found}))


def judge(file: str, ours: str, theirs: str) -> None:
    """Print how many texts are equal, and of the others the first two tokens that differ."""
    first, second = (json.loads(Path(path).read_text()) for path in (ours, theirs))
    equal = 0
    with open_model(file) as llm:
        for prompt, own, other in zip(first["prompts"], first["tokens"], second["tokens"], strict=True):
            at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
            if at is None:
                equal += own == other
                print(f"equal: {len(own)} and {len(other)} tokens")
                continue
            logits = llm.logits([[*prompt, *own[:at]]])[0][-1]
            gap = float(logits[own[at]] - logits[other[at]])
            print(
                f"part at token {at}: {own[at]} here, {other[at]} in llama.cpp, whose logit is lower by {gap:.4f} here"
            )
    print(f"{equal} of {len(QUESTIONS)} equal")


def main() -> None:
    """Run what the command line names."""
    verb, *rest = sys.argv[1:]
    {"inferplane": write_ours, "llama.cpp": write_theirs, "judge": judge}[verb](*rest)


if __name__ == "__main__":
    main()
