"""Model families as trees of ops, and the checkpoints they are read from."""

from inferplane.models import families  # registers the constructors
from inferplane.models.build import Build
from inferplane.models.families.deepseek_v3 import deepseek_v3
from inferplane.models.families.eagle import eagle
from inferplane.models.families.llama import llama
from inferplane.models.reading.checkpoint import SafetensorsFolder
from inferplane.models.reading.config import Config, as_config
from inferplane.models.registry import ARCHITECTURES, architecture, build, constructor, settle_architecture

__all__ = [
    "ARCHITECTURES",
    "Build",
    "Config",
    "SafetensorsFolder",
    "architecture",
    "as_config",
    "build",
    "constructor",
    "deepseek_v3",
    "eagle",
    "families",
    "llama",
    "settle_architecture",
]
