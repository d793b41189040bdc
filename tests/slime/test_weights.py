"""slime's table of parameter names, on those that a GPU gets: an engine is sent every tensor of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_plugin.config.parallel import Parallelism
from tests.slime.sources import needs_slime
from tests.train import oracle, te_reference

pytestmark = needs_slime

SPLITS = [Parallelism(), Parallelism(tp=2, sp=True), Parallelism(tp=2, pp=2)]


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_sent_as_it_was_loaded(tied: bool, tmp_path: Path) -> None:
    folder = oracle.make_model(tmp_path / "model", tied=tied)
    expected = load_file(folder / "model.safetensors")
    calls = [("converted", parallel.ranks, (folder, parallel)) for parallel in SPLITS]
    for ranks in te_reference.run_calls("tests.slime.te_weights", *calls):
        found = {name: x for rank in ranks for name, x in rank.items()}
        copy = found.pop("lm_head.weight") if tied and "lm_head.weight" in found else None
        assert copy is None or torch.equal(copy, expected["model.embed_tokens.weight"])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
