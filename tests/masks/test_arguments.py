"""Bad masks: a named error with the argument, what was given and what is expected."""

import numpy as np
import pytest
import torch

from tilewise.errors import ShapeError, UnsupportedError
from tilewise.masks import (
    Causal,
    ChunkedCausal,
    Chunks,
    Dense,
    Documents,
    FirstKeys,
    Full,
    Padding,
    PerHead,
    PrefixLM,
    Slices,
    SlidingWindow,
    parse,
)
from tilewise.masks.bitmap import Bitmap
from tilewise.masks.dense import Packed

BAD = [
    (
        lambda: SlidingWindow(-1, 0),
        ValueError,
        r"left -1 and right 0 leave no key; left \+ right must be 0 or more, and None is unbounded, not -1",
    ),
    (lambda: SlidingWindow(0, 1.5), ValueError, r"SlidingWindow: right must be an integer of at least -2\*\*29, or None .* got 1.5"),
    (lambda: SlidingWindow(-(1 << 29), None, offset=5), ValueError, r"SlidingWindow: offset must be an integer between"),
    (lambda: SlidingWindow(True, 0), ValueError, r"left must be an integer"),
    (lambda: Causal(offset=1.0), ValueError, r"Causal: offset must be an integer between -2\*\*29 and 2\*\*29, got 1.0"),
    (lambda: SlidingWindow(1, 1, offset=1 << 30), ValueError, r"SlidingWindow: offset must be an integer between"),
    (lambda: Causal("middle"), ValueError, r"align must be 'bottom_right' or 'top_left', got 'middle'"),
    (lambda: FirstKeys(-2), ValueError, r"FirstKeys: n must be an integer, 0 or more, got -2"),
    (lambda: PrefixLM("3"), ValueError, r"PrefixLM: n must be an integer, 0 or more, got '3'"),
    (lambda: ChunkedCausal(0), ValueError, r"ChunkedCausal: n must be an integer, 1 or more, got 0"),
    (lambda: Chunks(0), ValueError, r"Chunks: n must be an integer, 1 or more, got 0"),
    (lambda: Documents([0, 5, 3]), ShapeError, r"cu_seqlens_q must not decrease, got 5 followed by 3 at index 2; pass cumulated lengths"),
    (lambda: Documents([1, 5]), ShapeError, r"cu_seqlens_q must begin with 0"),
    (lambda: Documents([]), ShapeError, r"cu_seqlens_q must begin with 0"),
    (lambda: Documents([0, 2], [0, 1, 2]), ShapeError, r"cu_seqlens_k describes 2 documents and cu_seqlens_q 1"),
    (lambda: Documents(torch.tensor([0.0, 1.0])), ShapeError, r"cu_seqlens_q\[0\] must be an integer of at most 2\*\*31 - 1, got 0.0"),
    (lambda: Documents([0, 1 << 40]), ShapeError, r"cu_seqlens_q\[1\] must be an integer of at most"),
    (lambda: Documents(7), ShapeError, r"cu_seqlens_q must be a list, array or tensor of integers with 1 dimension, got 7"),
    (lambda: Documents(torch.zeros(2, 2, dtype=torch.int32)), ShapeError, r"cu_seqlens_q\[0\] must be an integer"),
    (lambda: Documents([0, 2], inner="causal"), ValueError, r"inner must be a mask, got str 'causal'"),
    (lambda: Documents([0, 2], inner=PerHead({(0, 2): Causal()})), ValueError, r"same for every head.*write Documents\(...\) & Dense"),
    (lambda: Documents([0, 2], inner=Dense(torch.ones(2, 2, dtype=torch.bool))), ValueError, r"must be made of bands"),
    (lambda: Documents([0, 9]).resolve(8, 9), ShapeError, r"cu_seqlens_q reaches position 9, but seqlen_q is 8"),
    (lambda: Documents([0, 9]).resolve(9, 8), ShapeError, r"cu_seqlens_k reaches position 9, but seqlen_k is 8"),
    (lambda: Slices([[0, 2]], [[0, 2]], [4]), ValueError, r"kinds\[0\] is 4; expected 0 full, 1 causal, 2 inverse causal or 3 both"),
    (lambda: Slices([[3, 2]], [[0, 2]], [0]), ShapeError, r"q_ranges\[0\] must be a half-open range .* got \[3, 2\]"),
    (lambda: Slices([[0, 2]], [[-1, 2]], [0]), ShapeError, r"k_ranges\[0\] must be a half-open range"),
    (lambda: Slices([[0, 2, 3]], [[0, 2]], [0]), ShapeError, r"q_ranges\[0\] must be a half-open range"),
    (lambda: Slices([0, 2], [[0, 2]], [0]), ShapeError, r"q_ranges\[0\] must be a list, array or tensor"),
    (lambda: Slices([[0, 2]], [[0, 2]], []), ShapeError, r"must have one entry a slice, got 1, 1 and 0"),
    (lambda: Slices([[0, 9]], [[0, 2]], [0]).resolve(8, 8), ShapeError, r"q_ranges reaches position 9, but seqlen_q is 8"),
    (lambda: Dense([[True]]), ShapeError, r"expected a bool tensor, got list; convert it with torch.as_tensor"),
    (lambda: Dense(torch.ones(2, 2)), ShapeError, r"expected a strided bool tensor, got torch.float32.*pass scores to add as bias="),
    (lambda: Dense(torch.ones(2, 2, dtype=torch.bool).to_sparse()), ShapeError, r"torch.sparse_coo"),
    (lambda: Dense(torch.ones(2, dtype=torch.bool)), ShapeError, r"expected 2, 3 or 4 dimensions, .* got shape \(2,\)"),
    (lambda: Padding(), ValueError, r"lengths or start must be given, \(batch,\) integers"),
    (
        lambda: Padding(torch.ones(2)),
        ShapeError,
        r"Padding: lengths must be a strided tensor \(batch,\) of int32 or int64, got torch.float32",
    ),
    (
        lambda: Padding(start=torch.ones(2, 1, dtype=torch.int32)),
        ShapeError,
        r"Padding: start must be .* got torch.int32 torch.strided \(2, 1\)",
    ),
    (lambda: Padding([1, 2.5]), ShapeError, r"Padding: lengths\[1\] must be an integer"),
    (lambda: Padding([1, 2], [1, 2, 3]), ShapeError, r"different batch sizes, \[2, 3\]"),
    (lambda: Padding([1, 2], inner=Dense(torch.ones(1, 1, dtype=torch.bool))), ValueError, r"Padding: inner must be a mask of bands"),
    (lambda: Padding([1, 4], [0, 2]).planes(3, 5, batch=2), ShapeError, r"batch entry 1 has the keys 2 to 6 .* between 0 and seqlen_k 5"),
    (lambda: Padding([1, -1]).planes(3, 5, batch=2), ShapeError, r"batch entry 1 has the keys 0 to -1"),
    (lambda: Padding([1, 1]).planes(3, 5, batch=3), ShapeError, r"made for batch 2, the call has batch 3"),
    (lambda: Documents([0, 2], inner=Padding(torch.ones(1, dtype=torch.int32))), ValueError, r"inner must be made of bands"),
    (
        lambda: Dense(torch.ones(2, 3, dtype=torch.bool)).resolve(3, 3),
        ShapeError,
        r"the mask is 2 x 3, the call has seqlen_q 3 and seqlen_k 3",
    ),
    (lambda: Dense(torch.ones(2, 1, 3, 3, dtype=torch.bool)).planes(3, 3, batch=4), ShapeError, r"made for batch 2, the call has batch 4"),
    (
        lambda: Dense(torch.ones(2, 1, 3, 3, dtype=torch.bool)).resolve(3, 3),
        ShapeError,
        r"differs by batch entry or head \(2, 1\); use planes\(\)",
    ),
    (
        lambda: Dense(torch.ones(2, 1, 3, 3, dtype=torch.bool)) & Dense(torch.ones(3, 1, 3, 3, dtype=torch.bool)),
        ShapeError,
        r"batch sizes, \[2, 3\]",
    ),
    (lambda: PerHead({(0, 2): Causal(), (1, 3): Full()}), ValueError, r"cover every head once.*starts at 2, got \(1, 3\)"),
    (lambda: PerHead({(0, 2): Causal(), (3, 4): Full()}), ValueError, r"starts at 2, got \(3, 4\)"),
    (lambda: PerHead({(1, 2): Causal()}), ValueError, r"starts at 0, got \(1, 2\)"),
    (lambda: PerHead({(0, 0): Causal()}), ValueError, r"half open"),
    (lambda: PerHead({}), ValueError, r"no head ranges given"),
    (lambda: PerHead({(0, 1): "causal"}), ValueError, r"need a mask that is the same for every head, got 'causal'"),
    (lambda: PerHead({(0, 1): PerHead({(0, 2): Causal()})}), ValueError, r"need a mask that is the same for every head"),
    (lambda: PerHead({0: Causal()}), ValueError, r"half-open head ranges \(first, last\)"),
    (lambda: PerHead({("a", 2): Causal()}), ValueError, r"PerHead: expected masks by .* of integers, got \('a', 2\) for a range"),
    (lambda: PerHead({(0, 2.5): Causal()}), ValueError, r"PerHead: .*got \(0, 2.5\)"),
    (lambda: PerHead({(0, True): Causal()}), ValueError, r"PerHead: .*got \(0, True\)"),
    (lambda: PerHead({(0, 1, 2): Causal()}), ValueError, r"PerHead: .*got \(0, 1, 2\)"),
    (lambda: PerHead([1, 2]), ValueError, r"PerHead: .*got 1 for a range"),
    (lambda: PerHead([()]), ValueError, r"PerHead: .*got \(\) for a range"),
    (lambda: PerHead("ab"), ValueError, r"PerHead: .*got 'a' for a range"),
    (lambda: PerHead(5), ValueError, r"half-open head ranges \(first, last\)"),
    (lambda: PerHead({(0, 2): Causal()}).planes(4, 4, heads=8), ShapeError, r"made for heads 2, the call has heads 8"),
    (lambda: PerHead({(0, 1): Causal()}).planes(4, 4, heads=8), ShapeError, r"cover 1 heads, the call has heads 8"),
    (lambda: PerHead({(0, 2): Causal()}).pairs(4, 4), ShapeError, r"made for heads 2, the call has heads 1"),
    (lambda: Causal().planes(-1, 4), ValueError, r"seqlen_q must be an integer, 0 or more, got -1"),
    (lambda: Causal().pairs(4, 4, batch=-1), ValueError, r"batch must be an integer, 0 or more, got -1"),
    (lambda: Causal().pairs([1], 3), ValueError, r"seqlen_q must be an integer, 0 or more, got \[1\]"),
    (lambda: Causal().pairs(4, 4.0), ValueError, r"seqlen_k must be an integer, 0 or more, got 4.0"),
    (lambda: Slices.from_mask(3, 4, 4), ValueError, r"from_mask: mask must be a mask, got int 3"),
    (
        lambda: Dense(torch.nested.nested_tensor([torch.ones(2, 2, dtype=torch.bool)])),
        ShapeError,
        r"expected a strided bool tensor, got torch.bool, nested",
    ),
    (lambda: parse("Packed(#0,1.5)", [torch.zeros(1, 1, 2, 1, dtype=torch.uint8)]), ValueError, r"1.5"),
    (
        lambda: Packed(torch.zeros(1, 1, 2, 1, dtype=torch.uint8), "9"),
        ValueError,
        r"Packed: seqlen_k must be an integer, 0 or more, got '9'",
    ),
    (lambda: Causal().dense(4, 4.5), ValueError, r"seqlen_k must be an integer, 0 or more, got 4.5"),
    (lambda: Dense(torch.ones(2, 2, dtype=torch.bool, device="meta")).resolve(2, 2), ShapeError, r"on the meta device has no values"),
    (lambda: Dense(torch.ones(2, 2, dtype=torch.bool)).slices(2, 2), ShapeError, r"slices cannot describe"),
    (
        lambda: parse("Packed(#0,9)", [torch.zeros(1, 1, 2, 1, dtype=torch.uint8)]),
        ShapeError,
        r"expected a uint8 tensor .*seqlen_q, 2\), got",
    ),
    (
        lambda: parse("Packed(#0,7)", [torch.full((1, 1, 2, 1), 255, dtype=torch.uint8)]).resolve(2, 7),
        ShapeError,
        r"bits beyond seqlen_k 7 are set",
    ),
    (
        lambda: Bitmap(np.zeros((1, 1), np.uint8), 1 << 20, 1 << 20),
        UnsupportedError,
        r"at most 65536 x 65536 pairs.*describe the mask by bands",
    ),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make, error, message", BAD, ids=[f"{at}" for at in range(len(BAD))])
def test_bad_input_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
