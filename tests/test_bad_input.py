"""Bad input gets a named error that says what is wrong and what would be right, before any work: by list, and by a fuzzer that breaks good calls."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise as tw
from tilewise import ShapeError, UnsupportedError, errors
from tilewise.compat import sdpa

Q = torch.randn(2, 5, 4, 8)
K = torch.randn(2, 7, 2, 8)
V = torch.randn(2, 7, 2, 6)
CU_Q = torch.tensor([0, 3, 5])
CU_K = torch.tensor([0, 4, 7])


def dense(**changes):
    return tw.attention(**({"q": Q, "k": K, "v": V} | changes))


def packed(**changes):
    return tw.attention_varlen(**({"q": Q[0], "k": K[0], "v": V[0], "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K} | changes))


def cached(**changes):
    return tw.decode(**({"q": Q[:, :1], "k_cache": K, "v_cache": V} | changes))


def paged(**changes):
    table = {"cache_seqlens": torch.tensor([9, 3]), "page_table": torch.tensor([[0, 1], [1, -5]])}
    return tw.decode(**({"q": Q[:, :1], "k_cache": K, "v_cache": V} | table | changes))


DENSE = [
    ({"q": Q[0]}, ShapeError, r"q must have 4 dimensions \(batch, seqlen_q, heads_q, head_dim\), got 3 with shape \(5, 4, 8\)"),
    ({"q": [1.0]}, ShapeError, r"q must be a torch.Tensor of shape .*, got list"),
    (
        {"q": Q.int(), "k": K.int(), "v": V.int()},
        ShapeError,
        r"q must be float32 or bfloat16 or float16 or float64 or float8_e4m3fn or int8, got int32.*q\.to",
    ),
    ({"q": Q.to(torch.complex64)}, ShapeError, r"q must be .*, got complex64"),
    ({"k": K.double()}, ShapeError, r"k is torch.float64, but q is torch.float32; convert it with k\.to\(q\.dtype\)"),
    ({"v": V.bfloat16()}, ShapeError, r"v is torch.bfloat16, but q is torch.float32"),
    ({"k": K[:1]}, ShapeError, r"k has batch 1, but q has batch 2"),
    ({"v": V[:, :6]}, ShapeError, r"v has seqlen_k 6, but k has seqlen_k 7"),
    ({"v": V[:, :, :1]}, ShapeError, r"v has heads_k 1, but k has heads_k 2"),
    ({"k": K[..., :7]}, ShapeError, r"k has head_dim 7, but q has head_dim 8"),
    ({"q": Q[:, :, :3]}, ShapeError, r"heads_q=3 and k has heads_k=2; heads_q must be a multiple of heads_k"),
    ({"q": Q[:, :, :0]}, ShapeError, r"heads_q=0 and k has heads_k=2; heads_q must be a multiple of heads_k, and not 0"),
    ({"k": K[:, :, :0], "v": V[:, :, :0]}, ShapeError, r"heads_k=0"),
    ({"q": Q[..., :0], "k": K[..., :0]}, ShapeError, r"head_dim=0 .* must be at least 1"),
    ({"v": V[..., :0]}, ShapeError, r"head_dim_v=0"),
    ({"q": Q.to("meta"), "k": K.to("meta"), "v": V.to("meta")}, ShapeError, r"q is on the meta device, which holds no data"),
    ({"k": K.to("meta")}, ShapeError, r"k is on the meta device"),
    ({"q": Q.to_sparse()}, ShapeError, r"q must be a dense strided tensor, got layout torch.sparse_coo; use q\.to_dense\(\)"),
    ({"scale": math.nan}, ValueError, r"scale must be a finite number in .*, got nan"),
    ({"scale": math.inf}, ValueError, r"scale must be a finite number"),
    ({"scale": "1"}, ValueError, r"scale must be a number, got str '1'"),
    ({"scale": torch.tensor(0.5)}, ValueError, r"scale must be a number, got Tensor"),
    ({"softcap": -1.0}, ValueError, r"softcap must be a finite number in \[0, 1e\+30\], got -1"),
    ({"softcap": 10**400}, ValueError, r"softcap must be a finite number in \[0, 1e\+30\], got inf"),
    ({"softcap": math.nan}, ValueError, r"softcap must be a finite number"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p must be a finite number in \[0, 1\), got 1"),
    ({"dropout_p": -0.1}, ValueError, r"dropout_p must be"),
    ({"dropout_p": 0.5, "dropout_seed": -1}, ValueError, r"dropout_seed must be an integer in \[0, 2\*\*63\), or None to draw one, got -1"),
    ({"dropout_p": 0.5, "dropout_offset": 2**32}, ValueError, r"dropout_offset must be an integer in \[0, 2\*\*32\)"),
    ({"dropout_p": 0.5, "dropout_offset": 1.5}, ValueError, r"dropout_offset must be an integer"),
    ({"dropout_p": 0.5, "dropout_offset": None}, ValueError, r"dropout_offset must be an integer in \[0, 2\*\*32\), got None"),
    ({"scale": 1e300}, ValueError, r"scale must be a finite number in \[-3\.40282e\+38, 3\.40282e\+38\], got 1e\+300"),
    ({"scale": -1e39}, ValueError, r"scale must be a finite number in .*, got -1e\+39"),
    ({"deterministic": 1}, ValueError, r"deterministic must be True or False, got int 1"),
    ({"causal": None}, ValueError, r"causal must be True or False"),
    ({"return_lse": "yes"}, ValueError, r"return_lse must be True or False"),
    ({"backend": "cudnn"}, ValueError, r"backend must be one of .*'tiled'.* or None, got 'cudnn'"),
    ({"backend": 3}, ValueError, r"backend must be a backend's name or None, got int 3"),
    (
        {"mask": torch.ones(5, 7, dtype=torch.bool)},
        ShapeError,
        r"mask must be a tilewise mask, got a torch.Tensor; wrap a bool tensor as tilewise.Dense",
    ),
    ({"mask": "causal"}, ValueError, r"mask must be a tilewise mask, .* got str 'causal'"),
    ({"mask": tw.Dense(torch.ones(5, 8, dtype=torch.bool))}, ShapeError, r"8"),
    ({"mask": {(0, 2): tw.Causal()}}, ShapeError, r"heads"),
    ({"mask": tw.Documents([0, 9])}, ShapeError, r"9"),
    (
        {"bias": torch.zeros(7)},
        ShapeError,
        r"bias must have 2, 3 or 4 dimensions, the last of \(batch or 1, .*, seqlen_k or 1\), got 1 with shape \(7,\)",
    ),
    ({"bias": torch.zeros(2, 3, 5, 7)}, ShapeError, r"bias has heads_q 3, expected 4 or 1 \(broadcast\); its shape is \(2, 3, 5, 7\)"),
    ({"bias": torch.zeros(5, 6)}, ShapeError, r"bias has seqlen_k 6, expected 7 or 1 \(broadcast\); its shape is \(5, 6\)"),
    ({"bias": torch.zeros(1, 1, 5, 7, dtype=torch.bool)}, ShapeError, r"bias must be float32 or .* got bool"),
    ({"bias": torch.zeros(1, 1, 5, 7, dtype=torch.float16)}, ShapeError, r"bias is torch.float16, but q is torch.float32"),
    ({"alibi_slopes": torch.ones(3)}, ShapeError, r"alibi_slopes has heads_q 3, but q has heads_q 4"),
    ({"alibi_slopes": torch.ones(3, 4)}, ShapeError, r"alibi_slopes has batch 3, but q has batch 2"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, ValueError, r"alibi_slopes requires grad, but .* pass alibi_slopes\.detach\(\)"),
    ({"sink": torch.ones(2)}, ShapeError, r"sink has heads_q 2, but q has heads_q 4"),
    ({"sink": torch.ones(4, 1, 1)}, ShapeError, r"sink must have 1 dimensions \(heads_q\)"),
    ({"sink": torch.ones(4, 1)}, ShapeError, r"sink has heads_q 1, but q has heads_q 4"),
    ({"sink": torch.ones(4, dtype=torch.int64)}, ShapeError, r"sink must be float32 .* got int64"),
]
PACKED = [
    ({"q": Q}, ShapeError, r"q must have 3 dimensions \(total_q, heads_q, head_dim\), got 4"),
    ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, ShapeError, r"cu_seqlens"),
    ({"cu_seqlens_q": torch.tensor([0, 3, 6])}, ShapeError, r"6"),
    ({"cu_seqlens_k": torch.tensor([0, 3, 8])}, ShapeError, r"8"),
    ({"cu_seqlens_q": torch.tensor([1, 3, 5])}, ShapeError, r"cu_seqlens"),
    ({"cu_seqlens_q": torch.tensor([-1, 3, 5])}, ShapeError, r"cu_seqlens"),
    ({"cu_seqlens_q": torch.tensor([0, 5])}, ShapeError, r"cu_seqlens_k has length 3, but cu_seqlens_q has length 2"),
    ({"cu_seqlens_q": CU_Q.float()}, ShapeError, r"cu_seqlens_q must be int32 or int64, got float32"),
    ({"cu_seqlens_q": CU_Q[None]}, ShapeError, r"cu_seqlens_q must have 1 dimensions"),
    ({"cu_seqlens_q": [0, 3, 5]}, ShapeError, r"cu_seqlens_q must be a torch.Tensor"),
    ({"cu_seqlens_q": CU_Q[:0], "cu_seqlens_k": CU_K[:0]}, ShapeError, r"cu_seqlens"),
    ({"mask": {(0, 4): tw.Causal()}}, ValueError, r"one Mask for all heads"),
]
CACHED = [
    ({"cache_seqlens": torch.tensor([3, 8])}, ShapeError, r"cache_seqlens\[1\] is 8, but the cache holds between 0 and 7 tokens"),
    ({"cache_seqlens": -1}, ShapeError, r"cache_seqlens\[0\] is -1"),
    ({"cache_seqlens": torch.tensor([3])}, ShapeError, r"cache_seqlens has batch 1, but q has batch 2"),
    ({"cache_seqlens": torch.tensor([3.0, 4.0])}, ShapeError, r"cache_seqlens must be int32 or int64, got float32"),
    ({"cache_seqlens": "all"}, ShapeError, r"cache_seqlens must be an integer tensor \(batch,\), an int or None, got str"),
    ({"k_cache": K[:1], "v_cache": V[:1]}, ShapeError, r"k_cache has batch 1, but q has batch 2"),
    ({"k_cache": K[..., :4]}, ShapeError, r"k_cache has head_dim 4, but q has head_dim 8"),
    ({"v_cache": V[:, :3]}, ShapeError, r"v_cache has capacity 3, but k_cache has capacity 7"),
    ({"q": Q[:, :1].clone().requires_grad_()}, ValueError, r"q requires grad, but decode is for inference"),
    ({"sink": torch.zeros(4, requires_grad=True)}, ValueError, r"sink requires grad, but decode is for inference"),
    ({"alibi_slopes": torch.ones(3, 4)}, ShapeError, r"alibi_slopes has batch 3, but q has batch 2"),
    ({"mask": tw.Dense(torch.ones(3, 1, 1, 7, dtype=torch.bool))}, ShapeError, r"mask has batch 3 and 7 keys, but q has batch 2"),
    ({"mask": tw.Dense(torch.ones(1, 6, dtype=torch.bool))}, ShapeError, r"the cache holds 7 tokens a sequence"),
    ({"mask": tw.Dense(torch.ones(1, 7, dtype=torch.bool)) & tw.Causal()}, UnsupportedError, r"write the whole mask as one Dense"),
    ({"q": Q[:0, :1], "k_cache": K[:0], "v_cache": V[:0], "scale": math.nan}, ValueError, r"scale must be a finite number"),
]
PAGED = [
    ({}, None, ""),
    ({"cache_seqlens": torch.tensor([9, 8])}, ShapeError, r"page_table\[1\] names pages \[1, -5\], but k_cache has pages 0\.\.1"),
    ({"page_table": torch.tensor([[0, 2], [1, 0]])}, ShapeError, r"page_table\[0\] names pages \[0, 2\]"),
    ({"page_table": torch.tensor([[0, 1]])}, ShapeError, r"page_table has batch 1, but q has batch 2"),
    ({"page_table": torch.tensor([0, 1])}, ShapeError, r"page_table must have 2 dimensions"),
    ({"page_table": torch.tensor([[0.0, 1.0], [0.0, 1.0]])}, ShapeError, r"page_table must be int32 or int64"),
    ({"cache_seqlens": torch.tensor([15, 3])}, ShapeError, r"cache_seqlens\[0\] is 15, but the cache holds between 0 and 14 tokens"),
]
ALL = [(run, *case) for run, cases in ((dense, DENSE), (packed, PACKED), (cached, CACHED), (paged, PAGED)) for case in cases]


@pytest.mark.parametrize("run, changes, error, message", ALL, ids=lambda x: "+".join(x) if isinstance(x, dict) else None)
def test_bad_argument(run, changes, error, message):
    if error is None:
        run(**changes)
        return
    with pytest.raises(error, match=message) as caught:
        run(**changes)
    assert type(caught.value) in (ShapeError, ValueError, UnsupportedError)


@pytest.mark.parametrize(
    "outputs, lses, message",
    [
        ([], [], "at least one"),
        ([Q], [], "1 outputs and 0 lses"),
        (3, 4, "outputs must be a list or tuple of tensors"),
        ([Q, Q.half()], [torch.zeros(2, 4, 5)] * 2, r"outputs\[1\] is torch.float16, but outputs\[0\] is torch.float32"),
        ([Q, Q[:1]], [torch.zeros(2, 4, 5)] * 2, r"outputs\[1\]"),
        ([Q], [torch.zeros(2, 5, 4)], r"lses\[0\] has shape \(2, 5, 4\).*needs \(2, 4, 5\)"),
        ([Q], [torch.zeros(2, 4, 5, dtype=torch.int32)], r"lses\[0\] must be float32 or float64"),
    ],
)
def test_bad_merge(outputs, lses, message):
    with pytest.raises(ShapeError, match=message):
        tw.merge(outputs, lses)


def test_explain_refuses_what_attention_refuses():
    with pytest.raises(ShapeError, match="k has batch 1"):
        tw.explain(Q, K[:1], V)
    with pytest.raises(ValueError, match="return_lse must be True or False"):
        tw.explain(Q, K, V, return_lse=7)
    with pytest.raises(ValueError, match="unknown options .*'windows'"):
        tw.explain(Q, K, V, windows=3)


MANGLERS = [
    lambda x: x[..., :-1],
    lambda x: x[:, :-1],
    lambda x: x[None],
    lambda x: x[0],
    lambda x: x.transpose(1, 2),
    lambda x: x.transpose(-1, -2),
    lambda x: x.double(),
    lambda x: x.long(),
    lambda x: x.bool(),
    lambda x: x.to("meta"),
    lambda x: x.to_sparse(),
    lambda x: x[:0],
    lambda x: x[:, :0],
    lambda x: x.expand(3, *x.shape),
    lambda x: torch.cat((x, x), 2),
    lambda x: None,
    lambda x: 3,
]
JUNK = st.sampled_from(
    [
        None,
        -1,
        0,
        1,
        2.5,
        math.nan,
        math.inf,
        "x",
        b"x",
        (),
        [],
        {},
        object(),
        True,
        torch.tensor(1),
        torch.ones(2, 2),
        tw.Causal(),
        tw.Causal,
    ]
)
OPTIONS = ["causal", "mask", "scale", "softcap", "bias", "alibi_slopes", "sink", "dropout_p", "deterministic", "backend", "return_lse"]


@given(
    st.dictionaries(st.sampled_from("qkv"), st.sampled_from(MANGLERS), max_size=2),
    st.dictionaries(st.sampled_from(OPTIONS), JUNK, max_size=2),
)
def test_fuzzed_attention_works_or_names_the_error(mangled, junk):
    tensors = {name: mangled.get(name, lambda x: x)(x) for name, x in (("q", Q), ("k", K), ("v", V))}
    try:
        out = tw.attention(**tensors, **junk)
    except (ShapeError, ValueError, UnsupportedError) as error:
        assert type(error) in (ShapeError, ValueError, UnsupportedError) and len(str(error)) > 20
    else:
        out = out[0] if isinstance(out, tuple) else out
        assert out.shape[:2] == tensors["q"].shape[:2] and out.shape[3] == tensors["v"].shape[3]


@given(st.lists(st.integers(-2, 9), max_size=4), st.lists(st.integers(-2, 9), max_size=4))
def test_fuzzed_cu_seqlens_work_or_name_the_error(cu_q, cu_k):
    legal = len(cu_q) == len(cu_k) > 0 and all(cu[0] == 0 and cu == sorted(cu) and cu[-1] <= total for cu, total in ((cu_q, 5), (cu_k, 7)))
    if legal:
        assert packed(cu_seqlens_q=torch.tensor(cu_q), cu_seqlens_k=torch.tensor(cu_k)).isfinite().all()
    else:
        with pytest.raises(ShapeError):
            packed(cu_seqlens_q=torch.tensor(cu_q, dtype=torch.int32), cu_seqlens_k=torch.tensor(cu_k, dtype=torch.int32))


QKV = (torch.zeros(1, 4, 2, 8),) * 3
WORDS = {
    "is_causal": (True, r"causal=True \(bottom right"),
    "attn_mask": (None, r"mask=tilewise.Dense\(...\) for a bool tensor"),
    "dropout": (0.1, "dropout_p="),
    "softmax_scale": (1.0, "scale="),
    "window_size": ((3, 0), r"mask=tilewise.SlidingWindow\(left, right\)"),
    "sliding_window": (4, "SlidingWindow"),
    "enable_gqa": (True, "nothing: heads_q may be a multiple of heads_k"),
    "s_aux": (None, "sink="),
}


@pytest.mark.parametrize("name, value, meant", [(name, *rest) for name, rest in WORDS.items()], ids=WORDS)
def test_peers_words_are_answered_with_ours(name, value, meant):
    with pytest.raises(TypeError, match=rf"attention\(\) got an unexpected keyword argument '{name}': {name}= is .*{meant}"):
        tw.attention(*QKV, **{name: value})
    with pytest.raises(ValueError, match=rf"explain got unknown options \['{name}'\] \({name}= is .*{meant}"):
        tw.explain(*QKV, **{name: value})


def test_other_words_and_other_functions():
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match="attention.. got an unexpected keyword argument 'casual': it takes causal, mask, scale"):
        tw.attention(*QKV, casual=True)
    with pytest.raises(
        TypeError, match="attention_varlen.. got an unexpected .*'max_seqlen_q': max_seqlen_q= is nothing: lengths are found"
    ):
        tw.attention_varlen(*(x[0] for x in QKV), cu, max_seqlen_q=4)
    with pytest.raises(TypeError, match="decode.. got an unexpected .*'block_table': block_table= is page_table= here"):
        tw.decode(*QKV, block_table=None)
    with pytest.raises(TypeError, match="decode.. got an unexpected .*'attn_bias': it takes cache_seqlens, page_table"):
        tw.decode(*QKV, attn_bias=None)  # of which it has none


def test_heads_first_is_said_once(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    sdpas, short = torch.zeros(1, 3, 7, 8), torch.zeros(1, 1, 3, 8)
    with pytest.warns(
        UserWarning, match=r"q \(1, 3, 7, 8\) and k \(1, 3, 7, 8\) have more heads than tokens.*pass q.transpose\(1, 2\)"
    ) as said:
        for _ in range(3):
            tw.attention(sdpas, sdpas, sdpas, mask=tw.SlidingWindow(2, 1))
    assert len(said) == 1 and said[0].filename == __file__
    monkeypatch.setattr(errors, "_said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tw.attention(short, *(torch.zeros(1, 9, 3, 8),) * 2)  # a new token and its cache
        tw.attention(*QKV)
        sdpa.scaled_dot_product_attention(*(torch.zeros(1, 7, 3, 8),) * 3)  # which knows its layout
