"""Post-training quantization with texts: methods that choose scales and round weights, layer by layer."""

from inferplane.calibrate.catalog import load_methods
from inferplane.calibrate.observe import Inputs
from inferplane.calibrate.recipe import Channels, Method, Recipe, WeightToRound, make_recipe
from inferplane.calibrate.rotate import rotate, rotates_inner
from inferplane.calibrate.rotations import Rotation
from inferplane.calibrate.run import CalibratedTensors, CalibrationSettings, calibrate
from inferplane.calibrate.texts import draw_windows, read_texts, slice_windows

__all__ = [
    "CalibratedTensors",
    "CalibrationSettings",
    "Channels",
    "Inputs",
    "Method",
    "Recipe",
    "Rotation",
    "WeightToRound",
    "calibrate",
    "draw_windows",
    "load_methods",
    "make_recipe",
    "read_texts",
    "rotate",
    "rotates_inner",
    "slice_windows",
]
