"""The command `inferplane`, which gets a signal at a moment: `interrupted.py SIGNAL MOMENT words...`.

A moment is an audit event of Python and the end of a file or module ("import:numpy", "open:model.safetensors",
"os.rename:.json"), or a call of the runner ("step:1" is the first step, which computes a prompt).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def arm(number: int, moment: str) -> None:
    """Send the signal to this process once, when the moment comes."""
    event, _, what = moment.partition(":")
    seen = 0

    def come(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if event != "step" or seen == int(what):
            seen = -(10**9)  # once
            os.kill(os.getpid(), number)

    if event == "step":
        from inferplane.engine.runner.model_runner import Runner

        run = Runner.run

        def counted(self: Runner, *args: Any) -> Any:
            come()
            return run(self, *args)

        Runner.run = counted  # type: ignore[method-assign]
        return

    def heard(name: str, arguments: tuple[Any, ...]) -> None:
        if name != event or seen < 0 or isinstance(arguments[0], int):  # an int: "open" of a descriptor
            return
        if os.fsdecode(arguments[event == "os.rename"]).endswith(what):
            come()

    sys.addaudithook(heard)


if __name__ == "__main__":
    signal_name, moment, *words = sys.argv[1:]
    from inferplane.__main__ import command

    sys.argv = ["inferplane", *words]
    arm(getattr(signal, signal_name), moment)
    raise SystemExit(command())
