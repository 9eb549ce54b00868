"""Model families, one file each: a constructor that makes the tree of ops from a checkpoint's config.

Importing this package imports every family, and each registers its constructor (`registry.architecture`).
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
