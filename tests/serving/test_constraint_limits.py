"""Constraints that grow while their text is written: each is served or is 400, and others' requests end right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from inferplane.engine import Delta
from inferplane.engine.request.params import BEYOND_LIMITS
from inferplane.serving.admission import Deadline
from inferplane.serving.errors import TOO_COMPLEX
from inferplane.serving.generation import _failure
from tests.serving.live import Live, engine_pids
from tests.serving.soak import held

EVIL = [
    {"regex": "(.*a.{30}){30}"},
    {"regex": "((a{1,50}){1,50}){1,50}"},
    {"regex": ".*a[^b]{300}"},
    {"grammar": 'start: e\ne: e e | "a" | e "b" e'},
    {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    {
        "response_format": {
            "type": "json_object",
            "schema": {"properties": {"a": {"enum": [str(i) for i in range(4000)]}}},
        }
    },
]


@pytest.mark.parametrize("place", ["step", "accept"])
def test_a_constraint_that_becomes_too_complex_is_the_clients_fault(place):
    error = f"UsageError: {BEYOND_LIMITS}: too many states. ({place})"
    failed = _failure(Delta("", [], "error", None, error), Deadline(60))
    assert (failed.status, failed.code) == (400, TOO_COMPLEX)
    assert _failure(Delta("", [], "error", None, "RuntimeError: broken"), Deadline(60)).status == 500


def test_errors_are_in_plain_words():
    why = "Parser Error: Current row has 8999 items; max is 2000. To do: simplify the schema."
    error = f"UsageError: {BEYOND_LIMITS}: {why}"
    failed = _failure(Delta("", [], "error", None, error), Deadline(60), "grammar")
    assert failed.message == "The grammar is too complex to follow: Current row has 8999 items; max is 2000."
    assert failed.param == "grammar"
    failed = _failure(Delta("", [], "error", None, "RuntimeError: broken"), Deadline(60))
    assert failed.message == "The request failed while it ran: broken."
    bare = _failure(Delta("", [], "error", None, f"UsageError: {BEYOND_LIMITS}: too many states"), Deadline(60))
    assert bare.message == "The constraint is too complex to follow: too many states." and bare.param is None


def test_a_grammar_that_the_parser_cannot_follow_is_refused_by_its_name(client):
    grammar = "start: " + " ".join(['"a"?'] * 2500)
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "grammar": grammar})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, TOO_COMPLEX, "grammar")
    assert error["message"].startswith("The grammar is too complex to follow: ") and "Error" not in error["message"]


def test_evil_constraints_beside_ordinary_requests():
    with Live() as live, live.client() as client:

        def ask(**more: object) -> object:
            return client.post("/v1/completions", json={"prompt": "x = ", "temperature": 1, "max_tokens": 60, **more})

        assert ask(regex="[a-z]+").status_code == 200
        before = sum(held(pid).resident_bytes for pid in engine_pids(live))
        with ThreadPoolExecutor(8) as pool:
            bad = [pool.submit(ask, **evil, seed=i) for i in range(4) for evil in EVIL]
            good = [pool.submit(ask, seed=i) for i in range(8)]
        for answer in (b.result() for b in bad):
            assert answer.status_code == 200 or (answer.status_code, answer.json()["error"]["code"]) == (
                400,
                TOO_COMPLEX,
            )
        assert all(g.result().status_code == 200 for g in good)
        after = sum(held(pid).resident_bytes for pid in engine_pids(live))
        assert after - before < 150 * 2**20
        assert live.stop() == 0
