"""What the vendor's wheel holds: every schema among the strings of its libraries, and the attention kernels that were
compiled into it, by the symbols, with the dtypes of their keys. Nothing of it is loaded or imported: it needs SYCL and
Level Zero.

    python tests/vendors/intel/binary.py FOLDER [--record]

downloads the wheel to FOLDER, once, and writes FOLDER/found.json. `--record` also writes binary.json beside this file,
with the operators of schemas.txt alone, which stands for the wheel where it cannot be had.
"""

from __future__ import annotations

import json
import mmap
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "vllm-xpu-kernels==0.1.16.2"
RECORDED, RESTATED = (Path(__file__).with_name(name) for name in ("binary.json", "schemas.txt"))
LIBRARIES = ("_C", "_moe_C", "_xpu_C", "_vllm_fa2_C")
ATTENTION = "libattn_kernels_xe_2.so"
PREFILL = re.compile(rb"policy_dispatch_implI\d+chunk_policy_head(\d+)Lb([01])ELb([01])ELb([01])ELb([01])ELb([01])E")
DECODE = re.compile(
    rb"decode_policy_dispatch_implI\d+decode_policy_qpacked_headIN4cute1CILi(\d+)EEENS5_ILi(\d+)EEE"
    rb"(?:NS5_ILi(\d+)EEE|(S[67])_)ELb([01])ELb([01])ELb([01])E"
)
DEVICE_KERNEL = re.compile(rb"_ZGVZN4sycl\w*getDeviceKernelInfo\w*?XeFMHAFwd(?:SplitKV)?Kernel\w*")
"""The name of one compiled kernel of attention, or of the sum over its parts (`ReduceSplitK`)."""
KEYS = {"float8_e4m3fn": b"float_e4m3_t", "float8_e5m2": b"float_e5m2_t"}
SCHEMA = re.compile(rb"[A-Za-z_]\w*\([^\x00]*\) *-> [^\x00]+")
"""A string that begins with a name and holds arguments, an arrow and results."""


def schemas(library: bytes | mmap.mmap) -> list[str]:
    """Every schema among a library's strings, blanks between words made one."""
    found, at = set(), 0
    while (arrow := library.find(b"-> ", at)) >= 0:
        at = arrow + 3
        start = library.rfind(b"\x00", max(0, arrow - 4000), arrow) + 1
        end = library.find(b"\x00", arrow)
        if match := SCHEMA.fullmatch(library[start:end].strip()):
            words = " ".join(match[0].decode("ascii", "replace").split())
            found.add(re.sub(r",(?=\S)", ", ", words.replace("( ", "(").replace(" )", ")")))
    return sorted(found)


def attention(library: bytes | mmap.mmap) -> dict[str, list[list[Any]]]:
    """Kernels without sums of scores: (head size, blocks, causal, window) for many query tokens; (query heads a tile,
    head size, tokens a block, window) for single ones, whose mask the operator always leaves out. Those with sinks are
    listed apart.
    """
    found: dict[str, set[tuple[Any, ...]]] = {"prefill": set(), "decode": set()}
    found |= {f"{name}_with_sinks": set() for name in found}
    for m in PREFILL.finditer(library):
        size, (paged, causal, local, sink, sums) = int(m[1]), (m[i] == b"1" for i in range(2, 7))
        if not sums:
            found["prefill_with_sinks" if sink else "prefill"].add((size, paged, causal, local))
    for m in DECODE.finditer(library):
        group, size = int(m[1]), int(m[2])
        tokens = int(m[3]) if m[3] else {b"S6": group, b"S7": size}[m[4]]  # the compiler writes a repeated number so
        causal, local, sink = (m[i] == b"1" for i in (5, 6, 7))
        if not causal:
            found["decode_with_sinks" if sink else "decode"].add((group, size, tokens, local))
    return {name: sorted(map(list, kernels)) for name, kernels in found.items()}


def count_keys(library: bytes | mmap.mmap) -> dict[str, int]:
    """Number of compiled attention kernels by the dtype of keys; "same" is that of queries. A kernel is compiled for
    each dtype of keys if the numbers are the same.
    """
    names = {m[0] for m in DEVICE_KERNEL.finditer(library) if b"ReduceSplitK" not in m[0]}
    found = {dtype: sum(part in name for name in names) for dtype, part in KEYS.items()}
    return {"same": len(names) - sum(found.values()), **found}


def find_in(folder: Path) -> dict[str, Any]:
    """What an unpacked wheel holds."""

    def open_file(name: str) -> mmap.mmap:
        with next((folder / "vllm_xpu_kernels").glob(name)).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    return {
        "wheel": WHEEL,
        "schemas": {name: schemas(open_file(f"{name}.*so")) for name in LIBRARIES},
        "attention": attention(open_file(ATTENTION)),
        "attention_keys": count_keys(open_file(ATTENTION)),
    }


def _is_complete(found: dict[str, Any]) -> bool:
    """Whether it was written by this version of the script."""
    return "attention_keys" in found and found["attention"].keys() == attention(b"").keys()


def main(folder: Path, record: bool) -> int:
    target = folder / "found.json"
    if target.exists() and not record and _is_complete(json.loads(target.read_text(encoding="utf-8"))):
        print(f"{target}: there already")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--retries",
            "1",
            "--timeout",
            "20",
            "--no-deps",
            "--dest",
            str(folder),
            WHEEL,
        ]
        if subprocess.run(command, check=False).returncode:
            print(f"{WHEEL} cannot be had: the record of it is used")
            return 0
    prefixes = (*(f"vllm_xpu_kernels/{name}." for name in LIBRARIES), f"vllm_xpu_kernels/{ATTENTION}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.startswith(prefixes):
                wheel.extract(name, folder)
    found = find_in(folder)
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for library in (folder / "vllm_xpu_kernels").iterdir():
        library.unlink()
    if record:
        called = set(re.findall(r"^\w+::(\w+)\(", RESTATED.read_text(encoding="utf-8"), re.MULTILINE))
        for name, lines in found["schemas"].items():
            found["schemas"][name] = [line for line in lines if line.partition("(")[0] in called]
        RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "--record" in sys.argv))
