"""Two ranks that generate for ever; rank 0 prints the process id of rank 1."""

from __future__ import annotations

import os
from pathlib import Path

from inferplane import LLM, SamplingParams
from inferplane.errors import EngineError, GenerationError

if __name__ == "__main__":
    meeting = Path(f"/tmp/inferplane-lost-{os.environ['MASTER_PORT']}")
    if os.environ["RANK"] == "1":
        meeting.write_text(str(os.getpid()))
    with LLM("demo", device="cpu", dtype="float32") as llm:
        print(meeting.read_text(), flush=True)
        meeting.unlink()
        while True:
            try:
                llm.generate("def main():", SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
            except (GenerationError, EngineError):
                raise SystemExit(1) from None
