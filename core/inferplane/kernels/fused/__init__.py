"""Promised to backends: what kernels that call a vendor's fused operators have in common.

| module | holds |
|---|---|
| `needs` | how they are declared (`declare_fused`), and conditions: a sentence and a predicate on the op |
| `vllm_calls` | ops by operators that have the call form of vLLM's, which several vendors' libraries took over |
| `operands` | arguments that such operators take: lengths, block tables, scales, unwritten results |
| `packings` | weights and rotary tables in the layouts that such operators read |
| `vllm_kernels` | the six kernels that vLLM-form libraries share, declared from a table |
| `fp8_cache` | a KV layout in FP8 with a scale of 1, as vendors' cache writes and attention take it |
| `latents` | latent attention around an operator that knows only ordinary attention |

Names, arguments and meanings here change with a minor release only, and the old ones stay for one minor.
`docs/adding-a-device.md` shows them in use. A function whose first argument is `view` takes what the kernel was given.
"""
