"""Model families as trees of ops, and the checkpoints they are read from."""

import importlib
import pkgutil

from inferplane.models.build import Build
from inferplane.models.checkpoint import SafetensorsFolder
from inferplane.models.config import Config, as_config
from inferplane.models.deepseek_v3 import deepseek_v3
from inferplane.models.eagle import eagle
from inferplane.models.llama import llama
from inferplane.models.registry import ARCHITECTURES, architecture, build, constructor

for _module in pkgutil.iter_modules(__path__):  # each family marks its constructor when it is imported
    importlib.import_module(f"{__name__}.{_module.name}")

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
    "llama",
]
