"""The default KV storages, and the allocator of their blocks."""

from inferplane.kvcache.allocator import BlockAllocator
from inferplane.kvcache.paged import KV_DTYPES, PagedKV, paged_layout

__all__ = ["KV_DTYPES", "BlockAllocator", "PagedKV", "paged_layout"]
