"""Prints the arguments by which pip takes the small build of torch where that suffices; `make` passes them to pip.

On Linux, PyPI's torch brings several gigabytes of CUDA libraries, which only NVIDIA GPUs need. Without such a GPU,
PyTorch's own index, beside PyPI, has builds for processors. Nothing is printed where the user's pip has indexes of its
own or PyTorch's cannot be reached. Needs only Python's standard library; what was chosen goes to standard error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NVIDIA = ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg")
"""What is there with an NVIDIA GPU; the last one is WSL's."""
TIMEOUT_S = 8


def main() -> None:
    """Print pip's arguments, or nothing."""
    if sys.platform != "linux" or any(map(os.path.exists, NVIDIA)):
        return
    if has_own_index():
        say("your pip has indexes of its own: torch comes from them; one with CUDA has several gigabytes")
        return
    if not is_reachable(f"{CPU_INDEX}/torch/"):
        say(f"{CPU_INDEX} cannot be reached: taking PyPI's torch, which brings CUDA libraries")
        return
    say(f'no NVIDIA GPU is here: taking torch for processors from {CPU_INDEX}; PIP_ARGS="..." chooses otherwise')
    print(f"--extra-index-url {CPU_INDEX}")


def has_own_index() -> bool:
    """True if the user's pip is configured, by variables or files, to look elsewhere than on PyPI."""
    if any(name in os.environ for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")):
        return True
    command = [sys.executable, "-m", "pip", "config", "list"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    keys = {line.partition("=")[0].rpartition(".")[2] for line in found.splitlines()}
    return bool(keys & {"index-url", "extra-index-url", "no-index"})


def is_reachable(url: str) -> bool:
    """True if a server answers a request for this address."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return True
    except (OSError, ValueError):  # HTTP errors are OSErrors
        return False


def say(words: str) -> None:
    """Print a note for the user."""
    print(words, file=sys.stderr)


if __name__ == "__main__":
    main()
