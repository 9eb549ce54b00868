"""Print the devices that the conformance workflow tests, as the JSON of a job matrix; `--skipped` prints the others.

Every backend folder has a `backend.json`, whose `devices` say on which runner each is tested and what that needs:
`extra`, an extra of pyproject.toml; `torch_index`, a package index with builds of torch for the device; `vendor_torch`,
true where the runner brings the vendor's own torch. Hardware is attached by a self-hosted runner with the labels in
`runner` and by naming the device in INFERPLANE_RUNNERS, a JSON list such as `["cuda", "npu"]`. A pull request is tested
on GitHub's own runners only: a self-hosted runner must not execute what a stranger sends.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULTS = {"extra": "test", "torch_index": "", "vendor_torch": False}


def devices(repository: Path) -> list[dict[str, Any]]:
    """All devices of the tree with what their runs need."""
    files = sorted(repository.glob("backends/*/backend.json"))
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["devices"]]
    return [{**DEFAULTS, **row, "name": row["device"].replace(":", "-")} for row in rows]


def is_attached(device: dict[str, Any], attached: list[str], event: str) -> bool:
    """Whether a runner for the device is there and may be used for this kind of event."""
    hosted = isinstance(device["runner"], str)
    return hosted or (device["device"] in attached and event != "pull_request")


def main(arguments: list[str]) -> None:
    """Print the matrix, or the names of the devices that are not tested."""
    attached, event = json.loads(os.environ.get("INFERPLANE_RUNNERS") or "[]"), os.environ.get("GITHUB_EVENT_NAME", "")
    found = devices(REPOSITORY)
    if "--skipped" in arguments:
        print(", ".join(row["device"] for row in found if not is_attached(row, attached, event)))
    else:
        print(json.dumps({"include": [row for row in found if is_attached(row, attached, event)]}))


if __name__ == "__main__":
    main(sys.argv[1:])
