"""decode sequence by sequence (backends/sequences.py): where it cannot be."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tilewise.backends.sequences import one_by_one
from tilewise.errors import UnsupportedError
from tilewise.masks import Causal
from tilewise.problem import DecodeCall


def test_no_capture_holds_lengths_that_are_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        q, cache = torch.empty(2, 1, 2, 20, device="cuda"), torch.empty(2, 9, 2, 20, device="cuda")
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
    places = {"page_table": None, "cu_seqlens_q": None, "cache_batch_idx": None, "leftpad": None, "tree": None}
    others = {"max_seqlen_q": 1, "shared_prefix": 0, "split": None, "mask": Causal(), "scale": 1.0}
    call = DecodeCall(q=q, k_cache=cache, v_cache=cache, seqlens=lengths, **places, **others)
    with pytest.raises(UnsupportedError, match="decode, sequence by sequence, reads values on the host, .* multiples of 16 bytes"):
        one_by_one(lambda call: (call.q, call.q), call)
