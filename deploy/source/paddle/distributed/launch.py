"""The source system's launcher, with its flags, where this folder is: `python -m paddle.distributed.launch ...`."""

import sys

from inferplane.source.__main__ import main

raise SystemExit(main(["launch", *sys.argv[1:]]))
