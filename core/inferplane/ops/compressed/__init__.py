"""Attention of one KV head whose entries are keys and values at once, over a window and over compressed entries."""
