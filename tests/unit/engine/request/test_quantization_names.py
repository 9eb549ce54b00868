"""Names of quantizations, and the KV cache that each requires."""

import pytest

from inferplane.engine.clients.options import EngineOptions
from inferplane.engine.request.arguments import QUANTIZATIONS, resolve_kv_cache_dtype
from inferplane.engine.runner.options import RunnerOptions
from inferplane.errors import UsageError


@pytest.mark.parametrize("record", [EngineOptions, RunnerOptions])
@pytest.mark.parametrize(("name", "dtype"), [("a8w8c8", "int8"), ("a8w8c8_fp8", "fp8")])
def test_c8_is_a_cache_in_8_bits(name, dtype, record):
    assert record(quantization=name).kv_cache_dtype == dtype
    assert record(quantization=name, kv_cache_dtype=dtype).kv_cache_dtype == dtype
    other = "fp8" if dtype == "int8" else "int8"
    without = name.replace("c8", "")
    with pytest.raises(UsageError, match=f"{name}.*{other}.*quantization='{without}'"):
        record(quantization=name, kv_cache_dtype=other)


def test_others_leave_the_cache_alone():
    for name in (None, *(n for n in QUANTIZATIONS if "c8" not in n)):
        assert [resolve_kv_cache_dtype(name, dtype) for dtype in ("auto", "int8")] == ["auto", "int8"]
