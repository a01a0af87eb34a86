"""Calls that launch a small kernel ahead of the forward pass say so, for those who compile ahead of time."""

import torch

from tilewise.backends.hopper import warmup
from tilewise.masks import Causal, Documents, PrefixLM


def test_packed_documents_need_two_kernels():
    documents = Documents([0, 100, 300], inner=Causal())
    ahead, forward = warmup.kernels([warmup.Cell(128, 128, torch.bfloat16, documents)])
    assert ahead.launch.endswith("intervals:launch") and forward.config.mask_kind == "varlen"
    assert (ahead.config.tile_m, ahead.config.tile_n) == (forward.config.tile_m, forward.config.tile_n)
    assert warmup.describe(ahead)[:3] == ("intervals", "", "")


def test_other_masks_need_tables_only():
    (forward,) = warmup.kernels([warmup.Cell(128, 128, torch.bfloat16, PrefixLM(10))])
    assert forward.config.mask_kind == "tiles"
