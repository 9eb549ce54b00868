"""One peer in a process of its own: loads a model, then answers each line `decode CONTEXT TOKENS SEQUENCES` with the
seconds of a step, or `prefill TOKENS` with seconds. Between lines it waits without using a core. `MOST` is the most
tokens of a sequence, `BATCH` the most sequences, `KV` inferplane's `kv_dtype`; others leave theirs as it is.

    python peer.py inferplane:bf16|inferplane:int8|inferplane:int4 FOLDER MOST BATCH [KV]
    python peer.py inferplane:file FILE.gguf MOST BATCH [KV]   # as the file has its weights
    python peer.py transformers:eager|transformers:sdpa|transformers:compiled FOLDER MOST BATCH [KV]
    python peer.py llama.cpp FILE.gguf MOST BATCH [KV]   # with the Python that has llama-cpp-python
    python peer.py openvino FOLDER MOST BATCH [KV]       # with the Python that has openvino; exported by optimum-intel
"""

from __future__ import annotations

import os
import random
import sys
import time

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))


class Inferplane:
    def __init__(self, precision, folder, tokens, batch, kv="auto"):
        from inferplane import LLM

        named = precision if precision.startswith("a") else f"weight_only_{precision}"
        scheme = None if precision in ("bf16", "file") else named
        self.llm = LLM(
            folder, device="cpu", dtype="bfloat16", max_model_len=tokens, max_num_seqs=batch, quantization=scheme,
            enable_prefix_caching=False, max_num_batched_tokens=batch * tokens, kv_cache_dtype=kv,
        )  # fmt: skip

    def run(self, prompts, tokens):
        """The requests' own clocks. All prompts are read in one step, so later steps only decode."""
        from inferplane import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        return [r.timings for r in self.llm.generate(prompts, params)]

    def decode(self, prompts, tokens):
        return max(1 / t.tokens_per_s for t in self.run(prompts, tokens + 1))

    def prefill(self, ids):
        return self.run([ids], 1)[0].first_token_s


class Transformers:
    def __init__(self, attention, folder, tokens, batch, kv="auto"):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_grad_enabled(False)
        self.torch, self.tokens, self.compiled = torch, tokens, attention == "compiled"
        how = "sdpa" if self.compiled else attention
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=how)
        if self.compiled:
            self.model.forward = torch.compile(self.model.forward)

    def cache(self):
        """Of a fixed length where the model is compiled, so that it is compiled once."""
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        return StaticCache(config=config, max_cache_len=self.tokens) if self.compiled else DynamicCache(config=config)

    def forward(self, ids, cache):
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def decode(self, prompts, tokens):
        cache = self.cache()
        token = self.forward(self.torch.tensor(prompts), cache)
        start = time.perf_counter()
        for _ in range(tokens):
            token = self.forward(token, cache)
        return (time.perf_counter() - start) / tokens

    def prefill(self, ids):
        cache = self.cache()
        start = time.perf_counter()
        self.forward(self.torch.tensor([ids]), cache)
        return time.perf_counter() - start


class LlamaCpp:
    """Through llama.cpp's own interface: the Python class above it takes one sequence."""

    MOST = 2048

    def __init__(self, _, file, tokens, batch, kv="auto"):
        import llama_cpp as c

        c.llama_backend_init()
        self.c, self.model = c, c.llama_model_load_from_file(file.encode(), c.llama_model_default_params())
        options = c.llama_context_default_params()
        options.n_ctx, options.n_seq_max = tokens * batch, batch
        options.n_batch, options.n_threads, options.n_threads_batch = self.MOST, THREADS, THREADS
        self.context = c.llama_init_from_model(self.model, options)
        self.batch = c.llama_batch_init(self.MOST, 0, 1)

    def forward(self, rows):
        """`rows`: of (token, position, sequence, whether its logits are wanted)."""
        for start in range(0, len(rows), self.MOST):
            part = rows[start : start + self.MOST]
            for i, (token, position, sequence, logits) in enumerate(part):
                self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, logits
                self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.n_tokens = len(part)
            if self.c.llama_decode(self.context, self.batch):
                raise RuntimeError("llama_decode failed")
        self.c.llama_synchronize(self.context)

    def read(self, prompts):
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        for sequence, ids in enumerate(prompts):
            self.forward([(token, i, sequence, i == len(ids) - 1) for i, token in enumerate(ids)])

    def decode(self, prompts, tokens):
        self.read(prompts)
        start = time.perf_counter()
        for n in range(tokens):
            self.forward([(ids[n % len(ids)], len(ids) + n, i, True) for i, ids in enumerate(prompts)])
        return (time.perf_counter() - start) / tokens

    def prefill(self, ids):
        start = time.perf_counter()
        self.read([ids])
        return time.perf_counter() - start


class OpenVINO:
    """The model with its head cut to the last position, as OpenVINO's own generation library does it."""

    def __init__(self, _, folder, tokens, batch, kv="auto"):
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

    def step(self, rows, past):
        """`rows`: of token ids, `[sequences, tokens]`; returns the next token of each."""
        np = self.np
        ids = np.array(rows, np.int64)
        count, length = ids.shape
        feeds = {"input_ids": ids, "attention_mask": np.ones((count, past + length), np.int64)}
        if "position_ids" in self.inputs:
            feeds["position_ids"] = np.tile(np.arange(past, past + length, dtype=np.int64), (count, 1))
        if "beam_idx" in self.inputs:
            feeds["beam_idx"] = np.arange(count, dtype=np.int32)
        out = self.request.infer(feeds, share_inputs=True, share_outputs=True)
        return next(iter(out.values()))[:, -1:].argmax(-1)

    def decode(self, prompts, tokens):
        self.request.reset_state()
        token = self.step(prompts, 0)
        start = time.perf_counter()
        for n in range(tokens):
            token = self.step(token, len(prompts[0]) + n)
        return (time.perf_counter() - start) / tokens

    def prefill(self, ids):
        self.request.reset_state()
        start = time.perf_counter()
        self.step([ids], 0)
        return time.perf_counter() - start


PEERS = {"openvino": OpenVINO, "inferplane": Inferplane, "transformers": Transformers, "llama.cpp": LlamaCpp}


def main():
    name, _, option = sys.argv[1].partition(":")
    peer = PEERS[name](option, sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
    draw = random.Random(0)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        length, *rest = map(int, numbers)
        prompts = [[draw.randrange(3, 30000) for _ in range(length)] for _ in range(rest[1] if rest else 1)]
        seconds = peer.decode(prompts, rest[0]) if verb == "decode" else peer.prefill(prompts[0])
        print(f"seconds {seconds}", flush=True)


if __name__ == "__main__":
    main()
