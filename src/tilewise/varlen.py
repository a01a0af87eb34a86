"""Attention over packed sequences: `attention_varlen`. Its keys are packed too, or lie in pages and are then decode's business."""

from collections.abc import Mapping
from typing import Literal, Never, Unpack, overload

from torch import Tensor

from tilewise import errors
from tilewise.api import INDEX_DTYPES, autocast, check_out, check_returns, combine, documents, eight_bits, largest_of_documents, operands
from tilewise.decoding import OF_CACHES, decode, share_of
from tilewise.errors import ShapeError, UnsupportedError, check_words
from tilewise.keywords import DecodeOptions, VarlenOptions
from tilewise.masks import Full, Mask
from tilewise.problem import Extras, one_sink
from tilewise.runtime import call_cache, operator
from tilewise.runtime.call_cache import Options

PACKED = ("total_q", "heads_q", "head_dim")
PAGES = ("pages", "page_size", "heads_k", "head_dim")
SPLIT = 256  # keys of one piece of decode, where a document's bits are to be its own
NO_GRADIENT = "keys in pages are for inference and have no gradient"


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: str | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    out: Tensor | None = None,
    cp_rank: int = 0,
    cp_world: int = 1,
    cp_interleave: int = 1,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`attention` over packed sequences: document d owns the queries `cu_seqlens_q[d]:cu_seqlens_q[d + 1]` and the keys likewise.

    Equal to a loop of `attention` over the documents but for rounding, with `precision` to within its error; `causal` and `mask` apply within each
    document, with its own lengths.

    Args:
        q: (total_q, heads_q, head_dim).  k: (total_k, heads_k, head_dim).  v: (total_k, heads_k, head_dim_v).
        cu_seqlens_q: (documents + 1,) int32 or int64, starting at 0, non-decreasing, ending at most at total_q.
        cu_seqlens_k: likewise for the keys. Tokens after the last document see nothing and are seen by none.
        bias: (documents or 1, heads_q or 1, max_seqlen_q or 1, max_seqlen_k or 1), or the last three or two of these: document d adds
            `bias[d, :, i, j]` to the score of its query i and key j. max_seqlen_* are at least the longest document's; what lies beyond a document's
            own lengths is not read, and has a gradient of 0.
        alibi_slopes: (heads_q,) or (documents, heads_q); distances count within the document.
        seqused_k: (documents,) int32 or int64, how many keys of each document there are, from its first on; the others are seen by nobody, and
            masks are placed as if they were not there. None: all.
        page_table: (documents, max_pages) int32 (best) or int64, for keys that lie in a pool of pages: k is (pages, page_size, heads_k, head_dim), v
            likewise, there is no cu_seqlens_k, and seqused_k says how many tokens each document has; its queries are the last of them. This is
            `decode` with cu_seqlens_q, as in chunked prefill: forward only, without bias, dropout, max_logits, precision and q_scale. k_scale and
            v_scale are decode's then.
        batch_invariant: the bits of that loop, in results and gradients, whatever a document is packed with. The CPU backend's forward pass has them
            anyway. With a page table, results with bits that are each document's own, as `decode` has them with `split`.
        cp_rank, cp_world, cp_interleave: with a page table, as in `decode`: its pages hold a rank's share of every document.
        q_scale, k_scale, v_scale: of 8-bit q, k and v: () the whole tensor, (documents or 1, heads) each head, (1, heads, tokens) each token.

    The other arguments are those of `attention`; random numbers of dropout count packed positions. With a bias, slopes (documents, heads_q), scales
    (documents, heads), batch_invariant, or seqused_k in 8 bits, each document is a call of its own, and the CPU waits for lengths; random numbers
    then count positions in the document, and its index is added to dropout_offset. Otherwise `precision` quantises all documents as one sequence, by
    one set of scales: O is as exact as by a call for each (docs/numerics.md), but not the same to the bit, as it depends on the other documents.

    Returns:
        O (total_q, heads_q, head_dim_v), and with `return_lse` LSE (heads_q, total_q) in fp32 (fp64 for fp64 inputs); with `return_max_logits` also
        (documents, heads_q), the largest score of each document and head.

    Raises:
        ShapeError, ValueError, UnsupportedError: as `attention`, and for cu_seqlens that decrease, start or end elsewhere.
    """
    if unknown:
        check_words("attention_varlen", unknown, attention_varlen.__kwdefaults__ or {})
    sink = one_sink(sink)
    options = Options(causal, scale, softcap, dropout_p, deterministic, backend, precision, mask, return_lse)
    tensors, extras = (q, k, v), Extras(None, alibi_slopes, sink, None, cu_seqlens_q, cu_seqlens_k, q_scale, k_scale, v_scale)
    usual = cu_seqlens_q is not None and bias is seqused_k is page_table is out is None and return_max_logits is batch_invariant is False
    usual = usual and cp_world == 1 and cp_rank == 0
    if usual and (known := call_cache.find(q, k, v, options, extras)) is not None:
        if known.draws:
            extras = extras._replace(rng=operator.random_state(dropout_seed, dropout_offset))
        return known(q, k, v, extras)
    errors.check_flag("batch_invariant", batch_invariant)
    if page_table is not None:
        lacking = {"bias": bias is not None, "dropout_p": dropout_p != 0.0, "return_max_logits": return_max_logits is not False}
        lacking |= {"precision": precision is not None, "q_scale": q_scale is not None}
        _check_paged((q, k, v), cu_seqlens_q, cu_seqlens_k, seqused_k, [name for name, given in lacking.items() if given])
        errors.check_flag("deterministic", deterministic)
        asked: DecodeOptions = {"cu_seqlens_q": cu_seqlens_q, "cache_seqlens": seqused_k, "page_table": page_table, "out": out}
        asked |= {"causal": causal, "mask": mask, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "sink": sink}
        asked |= {"k_scale": k_scale, "v_scale": v_scale, "backend": backend, "split": SPLIT if batch_invariant else None}
        asked |= {"cp_rank": cp_rank, "cp_world": cp_world, "cp_interleave": cp_interleave}
        return decode(q, k, v, return_lse=return_lse, **asked)
    if share_of(cp_rank, cp_world, cp_interleave) is not None:
        raise UnsupportedError(
            "cp_world needs page_table=, whose pages hold a rank's share; tilewise.distributed.attention shares out packed keys"
        )
    q, k, v, bias = autocast(q, k, v, bias)
    errors.check_qkv(q, k, v, packed=True)
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        errors.check_tensor(name, cu, ("documents + 1",), INDEX_DTYPES)
    assert cu_seqlens_k is not None
    errors.check_size("cu_seqlens_k", "length", cu_seqlens_k.shape[0], cu_seqlens_q.shape[0], "cu_seqlens_q")
    if isinstance(mask, Mapping):
        raise ValueError(
            "mask of packed documents must be one Mask for all heads, got a mapping of head ranges; call attention_varlen per range"
        )
    check_returns(return_lse, return_max_logits)
    given = operands(
        q[None],
        k[None],
        v[None],
        Full(),
        scale=scale,
        softcap=softcap,
        alibi_slopes=None,
        sink=sink,
        dropout=(dropout_p, dropout_seed, dropout_offset),
        deterministic=deterministic,
        backend=backend,
    )._replace(row_max=return_max_logits)
    in_eight_bits, scales = precision is not None or q.dtype in errors.EIGHT_BITS, (q_scale, k_scale, v_scale)
    apart = batch_invariant or (in_eight_bits and (seqused_k is not None or any(map(_of_documents, scales))))
    changes = {"bias": bias, "alibi_slopes": alibi_slopes, "seqused_k": seqused_k, "apart": apart}
    given = documents(given, cu_seqlens_q, cu_seqlens_k, combine(causal, mask), **changes)
    if in_eight_bits or not q_scale is k_scale is v_scale is None:
        given = eight_bits(given, precision, scales, out, cu_seqlens_q.shape[0] - 1)
    if out is not None:
        check_out(out, given, packed=True)
    if usual and (known := call_cache.bind(*tensors, options, given, extras)) is not None:
        return known(*tensors, extras._replace(rng=given.rng))
    o, lse, row_max = operator.attend(given, None if out is None else out[None])
    # squeezed, because gradients of that are views; those of o[0] would be copied into zeros
    o, lse = o.squeeze(0) if out is None else out, lse.squeeze(0)
    if return_max_logits:
        assert row_max is not None
        largest = largest_of_documents(row_max.squeeze(0), cu_seqlens_q)
        return (o, lse, largest) if return_lse else (o, largest)
    return (o, lse) if return_lse else o


def _of_documents(scale: Tensor | None) -> bool:
    """Whether a scale, which nobody has checked, is another one for each document."""
    return isinstance(scale, Tensor) and scale.dim() == 2 and scale.shape[0] != 1


def _check_paged(
    qkv: tuple[Tensor, ...], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, lacking: list[str]
) -> None:
    """Refuse what does not go with a page table, and name what `decode` calls by other names."""
    if lacking:
        raise UnsupportedError(
            f"{' and '.join(lacking)} cannot be given with page_table; attend to packed keys, with cu_seqlens_k, for that"
        )
    if cu_seqlens_k is not None:
        raise ShapeError("cu_seqlens_k and page_table exclude each other: how many tokens a paged document has is seqused_k")
    if seqused_k is None:
        raise ShapeError("seqused_k must be given with page_table: how many tokens each document has")
    q, k, v = qkv
    of_values = *PAGES[:3], "head_dim_v"
    for name, x, axes, dtypes in (("q", q, PACKED, errors.DTYPES), ("k", k, PAGES, OF_CACHES), ("v", v, of_values, OF_CACHES)):
        errors.check_tensor(name, x, axes, dtypes)
        errors.check_no_grad(name, x, NO_GRADIENT)
    for name, x, axes in (("cu_seqlens_q", cu_seqlens_q, ("documents + 1",)), ("seqused_k", seqused_k, ("documents",))):
        errors.check_tensor(name, x, axes, INDEX_DTYPES)
    errors.check_size("seqused_k", "documents", seqused_k.shape[0], cu_seqlens_q.shape[0] - 1, "cu_seqlens_q")
