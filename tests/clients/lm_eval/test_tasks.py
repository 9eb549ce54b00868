"""lm-evaluation-harness with `local-completions` and the server's tokenizer (`tokenizer_backend=remote`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

QUESTIONS = (
    ("What is two plus two?", ("four", "five"), 0),
    ("What is the capital of Norway?", ("Rome", "Oslo"), 1),
    ("Which animal barks?", ("dog", "fish"), 0),
    ("What is the opposite of cold?", ("blue", "hot"), 1),
)
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "Question: {{question}}\\nAnswer:"
target_delimiter: " "
"""
CHOICE = """
task: ours_choice
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
WRITTEN = """
task: ours_written
output_type: generate_until
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 64}
filter_list: [{name: plain, filter: [{function: remove_whitespace}]}]
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> TaskManager:
    folder: Path = tmp_path_factory.mktemp("tasks")
    rows = [{"question": q, "choices": list(choices), "label": label} for q, choices, label in QUESTIONS]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in (("choice", CHOICE), ("written", WRITTEN)):
        (folder / f"{name}.yaml").write_text(COMMON % data + text, encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.mark.parametrize("more", [{}, {"num_concurrent": 4}, {"batch_size": 2}, {"tokenized_requests": False}], ids=str)
def test_choices_and_texts(server, tasks, more):
    arguments = {"model": "scripted", "base_url": f"{server.url}/v1/completions", "tokenizer_backend": "remote", **more}
    found = simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["ours_choice", "ours_written"],
        task_manager=tasks,
        bootstrap_iters=0,
    )["results"]
    assert found["ours_choice"]["acc,none"] == 1.0
    assert found["ours_written"]["exact_match,plain"] == 1.0


def test_the_tokenizer_is_found_by_itself(server, tasks):
    arguments = {"model": "scripted", "base_url": f"{server.url}/v1/completions"}
    found = simple_evaluate(
        model="local-completions", model_args=arguments, tasks=["ours_choice"], task_manager=tasks, bootstrap_iters=0
    )
    assert found["results"]["ours_choice"]["acc,none"] == 1.0


def test_chats(server, tasks):
    arguments = {"model": "scripted", "base_url": f"{server.url}/v1/chat/completions", "num_concurrent": 2}
    found = simple_evaluate(
        model="local-chat-completions",
        model_args=arguments,
        tasks=["ours_written"],
        task_manager=tasks,
        apply_chat_template=True,
        bootstrap_iters=0,
        gen_kwargs={"chat_template_kwargs": {"enable_thinking": False}},  # the end of a line would stop a thought, too
    )
    assert found["results"]["ours_written"]["exact_match,plain"] == 1.0
