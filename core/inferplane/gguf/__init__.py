"""GGUF files: their headers, and how architectures are written in them. Nothing here knows models, ops or devices."""

from inferplane.gguf import dense, experts, gemma, hybrid  # each adds its architectures
from inferplane.gguf.architecture import ARCHITECTURES, StoredTensor, list_tensors, make_config
from inferplane.gguf.header import GGUFHeader, TensorEntry, read_header
from inferplane.gguf.metadata import Metadata

__all__ = [
    "ARCHITECTURES",
    "GGUFHeader",
    "Metadata",
    "StoredTensor",
    "TensorEntry",
    "dense",
    "experts",
    "gemma",
    "hybrid",
    "list_tensors",
    "make_config",
    "read_header",
]
