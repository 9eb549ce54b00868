"""Core's own KV cache layouts, and the allocator of their blocks."""

from inferplane.kvcache.allocator import BlockAllocator, block_hashes, root_hash
from inferplane.kvcache.blocked import BlockedKV
from inferplane.kvcache.paged import KV_DTYPES, PagedKV, paged_layout

__all__ = ["KV_DTYPES", "BlockAllocator", "BlockedKV", "PagedKV", "block_hashes", "paged_layout", "root_hash"]
