"""The newer families' configs: two or more odd but legal ones of each; the first one is part of `make test`.

Each group of families has a module with its table; this one joins them with those of `tests.e2e.tiny_models`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.e2e import tiny_models
from tests.e2e.tiny_models import SMALL, make_config, random_model
from tests.families.attention import ATTENTION
from tests.families.dense import DENSE
from tests.families.experts import EXPERTS
from tests.families.recurrent import RECURRENT
from tests.families.sparse import SPARSE
from tests.families.wholes import WHOLES

Table = dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]]
"""Family -> the name of its config class in transformers, entries of all its cases, and what each case adds."""

FAMILIES: Table = {**DENSE, **EXPERTS, **ATTENTION, **RECURRENT, **SPARSE}

CASES = {family: cases for family, (_, _, cases) in FAMILIES.items()}
"""The cases of the newer families."""
ALL_CASES = {**tiny_models.CASES, **CASES}
"""The cases of every family."""


def config_of(family: str, case: str, **changes: Any) -> Any:
    """The config of a named case of any family."""
    known = {**FAMILIES, **WHOLES}
    if family not in known:
        return tiny_models.config_of(family, case, **changes)
    import transformers

    kind, sizes, cases = known[family]
    entries = {**SMALL, **sizes, **cases[case], **changes}
    return make_config(getattr(transformers, kind), {k: v for k, v in entries.items() if v is not ...})


def make(family: str, case: str, folder: Path, **changes: Any) -> Any:
    """Save a random model of a named case; returns transformers' model in float32."""
    model = random_model(config_of(family, case, **changes)).to(torch.float32)
    model.save_pretrained(folder)
    return model
