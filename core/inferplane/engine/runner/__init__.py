"""A model on a device: its files, its plan, its weights, its KV cache, its captured decode steps, its ranks."""
