"""Peers for decoding, whose packages are not here: what they are called with, by stand-ins that compute what the arguments say."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise.bench.gate import DecodeGate
from tilewise.bench.peers import flash_attention, known_for_decode
from tilewise.bench.sets.decode import Cell, Pool

CPU = torch.device("cpu")
SMALL = {"heads_q": 4, "heads_k": 2, "head_dim": 16, "dtype": torch.float32}
CONTIGUOUS, PAGED = Cell(lengths=(20, 20), **SMALL), Cell(lengths=(5, 40, 17), page=8, **SMALL)
SEVERAL = Cell(lengths=(5, 40, 17), page=8, new=4, **SMALL)
LATENT = Cell(lengths=(40, 40), page=8, new=2, **SMALL | {"heads_k": 1, "head_dim": 24, "head_dim_v": 16})


def module(**functions) -> ModuleType:
    made = ModuleType("stand_in")
    vars(made).update(functions)
    return made


def fa2(q, k, v, *, cache_seqlens, block_table, causal):
    return tw.decode(q, k, v, cache_seqlens=cache_seqlens, page_table=block_table, causal=causal)


def metadata(batch, new, capacity, heads_q, heads_k, dim, seqlens, dtype, *, causal, page_size=None, headdim_v=None):
    return batch, new, capacity, heads_q, heads_k, dim, page_size, headdim_v


def fa3(q, k, v, *, cache_seqlens, page_table, causal, scheduler_metadata, qv=None, softmax_scale=None):
    capacity = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    assert scheduler_metadata[:7] == (
        *q.shape[:2],
        capacity,
        q.shape[2],
        k.shape[2],
        q.shape[3],
        None if page_table is None else k.shape[1],
    )
    assert scheduler_metadata[7] == (None if qv is None else v.shape[3])
    q, k = put_together(q, k, v, qv)
    return tw.decode(q, k, v, cache_seqlens=cache_seqlens, page_table=page_table, causal=causal, scale=softmax_scale)


def put_together(q, k, v, qv):
    """Q and K of plain attention that scores as FlashAttention-3 does with qv: Q K^T + QV V^T."""
    return (q, k) if qv is None else (torch.cat([qv, q], -1), torch.cat([v, k], -1))


def fa4(q, k, v, *, seqused_k, page_table, causal):
    return tw.decode(q, k, v, cache_seqlens=seqused_k, page_table=page_table, causal=causal), None


class Wrapper:
    """Of FlashInfer, for decode and for prefill: pages in one row, where each sequence's begin, and how full the last is."""

    def __init__(self, workspace, layout, use_tensor_cores=False):
        assert layout == "NHD" and not workspace.any()

    def plan(self, *given, causal=False, q_data_type, kv_data_type):
        *rows, starts, indices, last, self.heads_q, self.heads_k, self.dim, page = given
        used = starts.diff()
        self.table = torch.zeros(len(used), int(used.max()), dtype=torch.int32)
        for b, (begin, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
            self.table[b, : end - begin] = indices[begin:end]
        self.seqlens, self.rows, self.causal = (used - 1) * page + last, rows[0] if rows else torch.arange(len(used) + 1), causal

    def run(self, q, caches):
        assert q.shape[1:] == (self.heads_q, self.dim)
        return tw.decode(q, *caches, cache_seqlens=self.seqlens, page_table=self.table, cu_seqlens_q=self.rows, causal=self.causal)


def xqa(q, caches, workspace, table, seqlens, longest, *, bmm1_scale, bmm2_scale, kv_layout):
    assert kv_layout == "NHD" and bmm2_scale == 1.0 and longest == table.shape[1] * caches[0].shape[1] and not workspace.any()
    return tw.decode(q[:, None], *caches, cache_seqlens=seqlens, page_table=table, scale=bmm1_scale)[:, 0]


STAND_INS = {
    "flash_attn": module(flash_attn_with_kvcache=fa2),
    "flash_attn.cute": module(flash_attn_varlen_func=fa4),
    "flash_attn_interface": module(flash_attn_with_kvcache=fa3, get_scheduler_metadata=metadata),
    "flashinfer": module(BatchDecodeWithPagedKVCacheWrapper=Wrapper, BatchPrefillWithPagedKVCacheWrapper=Wrapper),
    "flashinfer.decode": module(xqa_batch_decode_with_kv_cache=xqa),
}


@pytest.fixture
def installed(monkeypatch):
    for name, stand_in in STAND_INS.items():
        monkeypatch.setitem(sys.modules, name, stand_in)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *((name, cell) for name in ("fa2", "fa3", "fa4") for cell in (CONTIGUOUS, PAGED, SEVERAL)),
        ("fa3", LATENT),
        ("flashinfer", PAGED),
        ("flashinfer", SEVERAL),
        ("flashinfer:xqa", PAGED),
        ("sdpa:math", CONTIGUOUS),
    ],
    ids=lambda x: x if isinstance(x, str) else x.title,
)
def test_what_peers_are_called_with(name, cell, installed):
    caches = Pool(CPU, cold_bytes=2 * cell.bytes).caches(cell)
    attend = known_for_decode()[name].prepare(caches)
    DecodeGate(caches).verify(attend)
    assert attend(1).shape[:3] == caches.q.shape[:3] and not torch.equal(attend(0), attend(1))


SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, float? softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, int attention_chunk, float softcap, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa=None, int sm_margin=0) -> Tensor[]"
)
AHEAD = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, int headdim_v, "
    "ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, int? page_size=None, bool is_causal=False, int num_splits=0) -> Tensor"
)


def operator(schema, run):
    parsed = torch._C.parse_schema(schema)
    names = [each.name for each in parsed.arguments]
    called = lambda *given: run(dict(zip(names, given, strict=True)))  # noqa: E731
    called._schema = parsed
    return SimpleNamespace(default=called)


@pytest.mark.parametrize("cell", [CONTIGUOUS, PAGED, SEVERAL, LATENT], ids=lambda cell: cell.title)
def test_flash_attention_3_of_vllm(cell, monkeypatch):
    def ahead(given):
        assert (given["batch_size"], given["max_seqlen_q"], given["page_size"]) == (cell.batch, cell.new, cell.page or None)
        assert (given["headdim"], given["headdim_v"]) == ((8, 16) if cell.latent else (16, 16))
        return torch.tensor([7])

    def fwd(given):
        assert given["scheduler_metadata"].item() == 7 and given["k_new"] is None and given["num_splits"] == 0
        same = {"cu_seqlens_q": given["cu_seqlens_q"], "cache_seqlens": given["seqused_k"], "page_table": given["page_table"]}
        q, k = put_together(given["q"], given["k"], given["v"], given["q_v"])
        return [tw.decode(q, k, given["v"], **same, causal=given["is_causal"], scale=given["softmax_scale"])]

    library = SimpleNamespace(fwd=operator(SCHEMA, fwd), get_scheduler_metadata=operator(AHEAD, ahead))
    monkeypatch.setattr(flash_attention, "library", lambda: library)
    caches = Pool(CPU).caches(cell)
    DecodeGate(caches).verify(known_for_decode()["fa3:vllm"].prepare(caches))


def test_a_library_without_qv(monkeypatch):
    library = SimpleNamespace(
        fwd=operator(SCHEMA.replace(" Tensor? q_v,", ""), None), get_scheduler_metadata=operator(AHEAD, lambda given: 7)
    )
    monkeypatch.setattr(flash_attention, "library", lambda: library)
    with pytest.raises(NotImplementedError, match="its operator has no qv"):
        known_for_decode()["fa3:vllm"].prepare(Pool(CPU).caches(LATENT))


def test_without_the_library(monkeypatch):
    monkeypatch.delenv(flash_attention.LIBRARY, raising=False)
    assert known_for_decode()["fa3:vllm"].why_not(PAGED, torch.device("cuda")) == [
        "the environment variable TILEWISE_FA3_LIBRARY does not name the library of vLLM's wheel, _vllm_fa3_C.abi3.so"
    ]
