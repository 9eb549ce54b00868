"""Write the golden files anew: `make gates-record`."""

from __future__ import annotations

import sys

from tests.gates.compile.golden import GOLDEN, RUNS, faults, path, run, write
from tests.gates.compile.targets import TARGETS as LIMITS


def main(*chosen: str) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for version, target in RUNS:
        if chosen and f"{version}/{target}" not in chosen:
            continue
        found = run(version, target)
        wrong = faults(found, found, LIMITS[target].shared_bytes, LIMITS[target].registers)
        assert not wrong, f"{version} {target} is not recorded:\n" + "\n".join(wrong)
        write(path(version, target), found)
        print(f"{version} {target}: {len(found)} kernels", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
