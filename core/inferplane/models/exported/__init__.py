"""Exported models: folders with the packed weights of one device, which a start reads as they are."""

from inferplane.models.exported.manifest import MANIFEST, Manifest
from inferplane.models.exported.reader import load_packed
from inferplane.models.exported.writer import RankWriter

__all__ = ["MANIFEST", "Manifest", "RankWriter", "load_packed"]
