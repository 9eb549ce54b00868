"""Core's own KV cache layouts, the allocator of their blocks, and how layers share them."""

from inferplane.kvcache.allocator import BlockAllocator, block_hashes, root_hash
from inferplane.kvcache.blocked import BlockedKV
from inferplane.kvcache.paged import KV_DTYPE_NAMES, KV_DTYPES, PagedKV, list_kv_dtypes, paged_layout
from inferplane.kvcache.pools import BlockPools, PoolShape, bytes_of_tables, describe_pools, divide_budget
from inferplane.kvcache.states import SLOTS_PER_SEQUENCE, StatePool
from inferplane.kvcache.static import STATIC_DTYPES, STATIC_SUFFIX, StaticKV, static_layout, static_name
from inferplane.kvcache.tables import TablePlan, blocks_held, deal_layers, single_table, widest_window

__all__ = [
    "KV_DTYPES",
    "KV_DTYPE_NAMES",
    "SLOTS_PER_SEQUENCE",
    "STATIC_DTYPES",
    "STATIC_SUFFIX",
    "BlockAllocator",
    "BlockPools",
    "BlockedKV",
    "PagedKV",
    "PoolShape",
    "StatePool",
    "StaticKV",
    "TablePlan",
    "block_hashes",
    "blocks_held",
    "bytes_of_tables",
    "deal_layers",
    "describe_pools",
    "divide_budget",
    "list_kv_dtypes",
    "paged_layout",
    "root_hash",
    "single_table",
    "static_layout",
    "static_name",
    "widest_window",
]
