"""Describes the device, versions and plan of a measurement, so that figures can be compared."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferplane.engine import LLM


def environment(llm: LLM) -> dict[str, Any]:
    """Device, versions, plan and date, JSON-ready."""
    import torch

    from inferplane import __version__

    runner = llm.runner
    state = runner.state
    assert state is not None and runner.cache is not None
    return {
        "date": report_date(),
        "model": llm.files.name,
        "device": llm.device,
        "device_name": state.name,
        "arch": state.arch,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "plan": plan_fingerprint(llm.explain()),
        "kv_blocks": sum(runner.cache.list_pools()),
        "block_tokens": runner.cache.block_tokens,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {"inferplane": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def report_date() -> str:
    """Now in UTC, as the reports have it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def plan_fingerprint(explained: dict[str, Any]) -> str:
    """Hash the kernels of all sites into sixteen hexadecimal digits: equal digits mean equal kernels."""
    sites = [(s["site"], s["step_kind"], s["signature"], s["chosen"]["kernel"]) for s in explained["sites"]]
    layouts = [layout["layout"] for layout in explained["kv_layouts"]]
    return hashlib.sha256(json.dumps([sites, layouts]).encode()).hexdigest()[:16]
