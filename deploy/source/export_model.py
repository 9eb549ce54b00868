"""The source system's script of this name, with its flags: `python export_model.py ...`."""

import sys

from inferplane.source.__main__ import main

raise SystemExit(main(["export_model", *sys.argv[1:]]))
