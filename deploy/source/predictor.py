"""The source system's script of this name, with its flags: `python predictor.py ...`."""

import sys

from inferplane.source.__main__ import main

raise SystemExit(main(["predictor", *sys.argv[1:]]))
