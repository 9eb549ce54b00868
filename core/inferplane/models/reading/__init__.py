"""Reads checkpoints: config.json, safetensors headers and shard indexes, and the bytes of tensors."""
