#!/usr/bin/env python3
"""Decode steps of DeepSeek-V4-Flash's layers on the cpu against what reading their weights and cache takes.

    python benchmarks/cpu/hyper_decode.py                                 # 8,192 tokens, 3 layers, 16 experts, 2 GB
    OMP_NUM_THREADS=1 python benchmarks/cpu/hyper_decode.py --cpu-clock   # one thread on a machine that others use

Layers are V4-Flash's, from its first one with a router on, in int8; of 256 experts there are fewer, of which each token
takes 6. Caches hold random entries; no prompt is read. The vocabulary is small, so that a step is its layers. Bytes are
those of all weights but the experts that a token leaves out, and of what attention reads: the window, and the
compressed entries that are chosen or all that there are, with their index keys. The roof is how long the same threads
take to read as many bytes, measured before each step; a share is that of a turn. Bar: 0.75 of the roof.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from sparse_decode import fill
from turns import Probe, bounds, processor

from inferplane.engine import LLM
from inferplane.models import configs
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.huge_pages import wait_for_huge_pages
from inferplane_cpu.kvcache import BLOCK_TOKENS
from inferplane_cpu.native import native

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shapes import add_clock, clock_name

BAR = 0.75
