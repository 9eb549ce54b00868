"""Panels in files: read as they were written, other bytes by another version only, and no sizes that a file invents."""

import hashlib

import pytest
import torch

from inferplane.ops import encode
from inferplane.plugin import KernelError, StoredWeight
from inferplane.quant.online import quantize
from inferplane_cpu.kernels.packing import PANEL_FORMATS, Panels, pack_mxfp4
from inferplane_cpu.kernels.panel_storage import VERSION, read_panels, write_panels
from inferplane_cpu.native import MXFP4, instruction_sets, native
from inferplane_cpu.structs import Matrix

pytestmark = pytest.mark.skipif(not instruction_sets(), reason=f"not run: {native().reason}")
FORMATS = PANEL_FORMATS
SHAPES = [(17, 256), (3, 20, 320)]


def panels_of(format, shape):
    q = encode(torch.randn(shape, generator=torch.Generator().manual_seed(3)), format)
    return pack_mxfp4(q) if format == "mxfp4" else Panels(q)


def changed(stored, facts=None, **tensors):
    found = {k: v for k, v in {**stored.tensors, **tensors}.items() if v is not None}
    return StoredWeight(found, {**stored.facts, **(facts or {})})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_read_is_what_was_written(format, shape):
    packed = panels_of(format, shape)
    again = read_panels(write_panels(packed), shape)
    assert torch.equal(again.data, packed.data) and again.nbytes == packed.nbytes
    assert again.scales.keys() == packed.scales.keys()
    for before, after in zip(packed.matrices, again.matrices, strict=True):
        assert bytes(before) == bytes(after), "the same memory, kinds and sizes"


@pytest.mark.parametrize("format", FORMATS)
def test_no_size_is_taken_from_a_file(format):
    shape = (3, 20, 320)
    stored = write_panels(panels_of(format, shape))
    scale = next(name for name in stored.tensors if name.startswith("scale"))
    numbers, data = stored.tensors[scale], stored.tensors["data"]
    for wrong in (
        changed(stored, {"columns": 48}),
        changed(stored, {"columns": -32}),
        changed(stored, {"columns": True}),
        changed(stored, {"columns": "32"}),
        changed(stored, {"kind": "int9"}),
        changed(stored, {"kind": ["int4"]}),
        changed(stored, {"rows": 20}),
        changed(stored, data=data[:, :-64]),
        changed(stored, data=data[:2]),
        changed(stored, data=data.view(torch.int8)),
        changed(stored, data=None),
        changed(stored, **{scale: None}),
        changed(stored, **{scale: numbers[:, :, :, :8]}),
        changed(stored, **{scale: numbers.view(torch.uint8)[..., :16]} if numbers.element_size() > 1 else {"x": data}),
        changed(stored, bias=data),
    ):
        with pytest.raises(KernelError, match="Panels"):
            read_panels(wrong, shape)
    for other in ((3, 20, 640), (3, 36, 320), (2, 20, 320), (20, 320)):
        with pytest.raises(KernelError, match="Panels"):
            read_panels(stored, other)


def test_minimums_need_groups():
    stored = write_panels(panels_of("int8_row", (17, 256)))
    with pytest.raises(KernelError, match="minimums are"):
        read_panels(changed(stored, minimum=torch.zeros(1, 2, 1, 16)), (17, 256))


FORMS_OF_UNITS = {"code": torch.int8, "unit": torch.float16}


def test_the_version_stands_for_the_bytes():
    """If this fails, the layout of panels has changed: raise `VERSION`, and state the new digest here."""
    found, every = hashlib.sha256(), hashlib.sha256()
    entries = torch.arange(-7, 8, dtype=torch.int8)
    for format in FORMATS:
        q = encode(torch.ones(20, 320), format)
        q.data.copy_(entries.repeat(20 * 320 // 15 + 1)[: 20 * 320].view(20, 320))
        if format in ("mxfp4", "nvfp4"):
            q.data.copy_(torch.tensor([0, 1, -2, 3, -4, 6, -8, 12], dtype=torch.int8).repeat(20, 40))
        if format.endswith(("min32", "min16")):
            q.data.abs_()
        packed = pack_mxfp4(q) if format == "mxfp4" else Panels(q)
        for digest in (found, every) if format != "nvfp4" else (every,):
            digest.update(packed.data.numpy().tobytes())
    coded = Panels(quantize(torch.arange(20 * 320).view(20, 320).sin(), "int4_min32"))
    forms = {name: numbers.dtype for name, numbers in coded.scales.items()}
    assert forms == {f"{of}_{kind}": FORMS_OF_UNITS[kind] for of in ("scale", "minimum") for kind in FORMS_OF_UNITS}
    assert (VERSION, found.hexdigest()[:16]) == ("2", "21438f46d543bf48")
    assert every.hexdigest()[:16] == "3f6a3085b76d9d0d"
    assert [name for name, _ in Matrix._fields_][:2] == ["kind", "group"] and MXFP4 == 6
