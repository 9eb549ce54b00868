"""One peer in a process of its own: loads a model, then answers each line `decode CONTEXT TOKENS` or `prefill TOKENS`
with seconds. Between lines it waits without using a core.

    python peer.py inferplane:bf16|inferplane:int8|inferplane:int4 FOLDER
    python peer.py transformers:eager|transformers:sdpa FOLDER
    python peer.py llama.cpp FILE.gguf          # with the Python that has llama-cpp-python
    python peer.py openvino FOLDER              # with the Python that has openvino; a folder exported by optimum-intel
"""

from __future__ import annotations

import os
import random
import sys
import time

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))


class Inferplane:
    def __init__(self, precision, folder):
        from inferplane import LLM

        scheme = None if precision == "bf16" else f"weight_only_{precision}"
        self.llm = LLM(
            folder, device="cpu", dtype="bfloat16", max_model_len=4096, max_batch=1, quantization=scheme,
            prefix_cache=False, max_step_tokens=4096,
        )  # fmt: skip

    def run(self, ids, tokens):
        """Seconds to the first token, and of each further one, by the request's own clock."""
        from inferplane import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        timings = self.llm.generate([ids], params)[0].timings
        return timings.first_token_s, 1 / timings.tokens_per_s if tokens > 1 else 0.0

    def decode(self, ids, tokens):
        return self.run(ids, tokens + 1)[1]

    def prefill(self, ids):
        return self.run(ids, 1)[0]


class Transformers:
    def __init__(self, attention, folder):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_grad_enabled(False)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention)

    def forward(self, ids, cache):
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def decode(self, ids, tokens):
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        token = self.forward(self.torch.tensor([ids]), cache)
        start = time.perf_counter()
        for _ in range(tokens):
            token = self.forward(token, cache)
        return (time.perf_counter() - start) / tokens

    def prefill(self, ids):
        from transformers import DynamicCache

        start = time.perf_counter()
        self.forward(self.torch.tensor([ids]), DynamicCache(config=self.model.config))
        return time.perf_counter() - start


class LlamaCpp:
    def __init__(self, _, file):
        from llama_cpp import Llama

        self.llama = Llama(file, n_ctx=4096, n_batch=2048, n_threads=THREADS, n_threads_batch=THREADS, verbose=False)

    def decode(self, ids, tokens):
        self.llama.reset()
        self.llama.eval(ids)
        start = time.perf_counter()
        for token in ids[:tokens]:
            self.llama.eval([token])
        return (time.perf_counter() - start) / tokens

    def prefill(self, ids):
        self.llama.reset()
        start = time.perf_counter()
        self.llama.eval(ids)
        return time.perf_counter() - start


class OpenVINO:
    """The model with its head cut to the last position, as OpenVINO's own generation library does it."""

    def __init__(self, _, folder):
        import numpy as np
        import openvino as ov
        from openvino import opset13 as ops

        self.np, core = np, ov.Core()
        model = core.read_model(folder + "/openvino_model.xml")
        node = (
            next(r for r in model.get_results() if "logits" in r.input_value(0).get_names()).input_value(0).get_node()
        )
        while node.get_type_name() != "MatMul":
            node = node.input_value(0).get_node()
        start, stop, one = (ops.constant(np.array([v], np.int64)) for v in (-1, np.iinfo(np.int64).max, 1))
        last = ops.slice(node.input_value(0), start, stop, one, one)
        node.input(0).replace_source_output(last.output(0))
        model.validate_nodes_and_infer_types()
        options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS}
        compiled = core.compile_model(model, "CPU", options)
        self.inputs = {name for i in compiled.inputs for name in i.names}
        self.request = compiled.create_infer_request()

    def step(self, ids, past):
        np = self.np
        length = len(ids)
        feeds = {"input_ids": np.array([ids], np.int64), "attention_mask": np.ones((1, past + length), np.int64)}
        if "position_ids" in self.inputs:
            feeds["position_ids"] = np.arange(past, past + length, dtype=np.int64)[None]
        if "beam_idx" in self.inputs:
            feeds["beam_idx"] = np.zeros(1, np.int32)
        out = self.request.infer(feeds, share_inputs=True, share_outputs=True)
        return int(next(iter(out.values()))[0, -1].argmax())

    def decode(self, ids, tokens):
        self.request.reset_state()
        token = self.step(ids, 0)
        start = time.perf_counter()
        for n in range(tokens):
            token = self.step([token], len(ids) + n)
        return (time.perf_counter() - start) / tokens

    def prefill(self, ids):
        self.request.reset_state()
        start = time.perf_counter()
        self.step(ids, 0)
        return time.perf_counter() - start


PEERS = {"openvino": OpenVINO, "inferplane": Inferplane, "transformers": Transformers, "llama.cpp": LlamaCpp}


def main():
    name, _, option = sys.argv[1].partition(":")
    peer = PEERS[name](option, sys.argv[2])
    draw = random.Random(0)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, first, *rest = line.split()
        ids = [draw.randrange(3, 30000) for _ in range(int(first))]
        seconds = peer.decode(ids, int(rest[0])) if verb == "decode" else peer.prefill(ids)
        print(f"seconds {seconds}", flush=True)


if __name__ == "__main__":
    main()
