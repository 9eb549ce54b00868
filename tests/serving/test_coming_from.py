"""The pages for those who come from other engines: routes and fields that they name are in the server's description."""

from __future__ import annotations

import re

import pytest

from tests.unit.support.coming_from import ROWS

REQUESTS = [row for row in ROWS if row.section in ("Fields of requests", "Requests", "Routes", "Routes and fields")]
ANSWERED = {"reasoning_content"}
"""Fields of answers, not of requests."""


@pytest.fixture(scope="module")
def description(server):
    with server.client() as client:
        return client.get("/openapi.json").raise_for_status().json()


@pytest.mark.parametrize("row", REQUESTS, ids=lambda row: f"{row.page} {row.there}")
def test_routes_and_fields_of_this_side_exist(description, row):
    paths, schemas = description["paths"], description["components"]["schemas"]
    known = {name for schema in schemas.values() for name in schema.get("properties", {})}
    for code in row.code_here:
        words = re.sub(r': "\w*"|options:', "", code).strip()  # without values
        if path := re.fullmatch(r"(?:(GET|POST) )?(/\S+)", words):
            assert path[2] in paths, code
            assert path[1] is None or path[1].lower() in paths[path[2]], code
        elif not words.startswith("--"):  # tests/unit/cli/test_coming_from.py looks at flags
            for name in re.findall(r"[a-z_]{2,}", words):
                assert name in known or name in ANSWERED or name == "system", code


@pytest.mark.parametrize("row", REQUESTS, ids=lambda row: f"{row.page} {row.there}")
def test_routes_of_the_other_side_are_not_silently_here(description, row):
    for code in row.code_there if not row.here.startswith("the same") else ():
        path = re.fullmatch(r"(?:GET |POST )?(/\S+)", code)
        assert path is None or path[1] not in description["paths"] or path[1] in row.code_here[0], code
