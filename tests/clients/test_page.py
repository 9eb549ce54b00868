"""Every block of docs/clients.md runs in the environment of its client, and prints what the scripted model answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BLOCK = re.compile(r"^```(python|console) (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HELLO = "Hello! How may I help you?"
PRINTS = {
    "openai": f"{HELLO}\n{HELLO}",
    "langchain": f"{HELLO}\nBecause of the mouse beside them.",
    "pydantic_ai": "In Oslo: 7 degrees.",
    "instructor": "Because of the mouse beside them.",
    "litellm": HELLO,
    "llm": HELLO,
    "tritonclient": "four",
    "lm_eval": "|acc|↑|1|",
}
"""Client -> what its block prints; of a table, a part."""
TASK = """
task: ours
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: What is two plus two?\\nAnswer:"
doc_to_choice: ["four", "five"]
doc_to_target: 0
target_delimiter: " "
metric_list: [{metric: acc}]
"""


def test_its_block_runs_as_it_stands(client_name, server, tmp_path):
    blocks = [found.groups() for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
    assert sorted(name for _, name, _ in blocks) == sorted(PRINTS)
    ((kind, text),) = [(kind, text) for kind, name, text in blocks if name == client_name]
    assert len([line for line in text.splitlines() if line]) <= 16
    text = text.replace("http://localhost:8000", server.url).replace("localhost:8001", server.grpc)
    if kind == "python":
        path = tmp_path / "example.py"
        path.write_text(text, encoding="utf-8")
        command = [sys.executable, str(path)]
    else:
        (tmp_path / "rows.jsonl").write_text('{"row": 1}\n', encoding="utf-8")
        (tmp_path / "task.yaml").write_text(TASK % (tmp_path / "rows.jsonl"), encoding="utf-8")
        text = text.replace("TASK", "ours").replace("FOLDER", str(tmp_path))
        command = ["sh", "-ec", re.sub(r"^\$ ", "", text, flags=re.MULTILINE)]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": programs, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, env=variables)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = PRINTS[client_name]
    if expected.startswith("|"):
        assert expected in done.stdout.replace(" ", "")
    else:
        assert done.stdout.strip() == expected
