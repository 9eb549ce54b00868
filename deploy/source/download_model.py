"""The source system's script of this name, with its flags: `python download_model.py ...`."""

import sys

from inferplane.source.__main__ import main

raise SystemExit(main(["download_model", *sys.argv[1:]]))
