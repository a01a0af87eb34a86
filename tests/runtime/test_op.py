"""The operators' schemas, which exported programs hold: nothing in them may change unseen."""

import pytest
import torch

import tilewise as tw  # noqa: F401 (declares the operators)

ATTENTION = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sink, Tensor? q_scale, Tensor? k_scale, Tensor? "
    "v_scale, Tensor? diagonal, Tensor? rng, Tensor[] mask_tensors, str mask, float? scale, float softcap, float dropout_p, bool "
    "deterministic, bool grad, bool row_max, bool by_document, str? precision, ScalarType? out_dtype, str? backend"
)
SCHEMAS = {
    "attention_forward": f"({ATTENTION}) -> (Tensor, Tensor, Tensor)",
    "attention_backward": (
        f"(Tensor o, Tensor lse, Tensor d_o, Tensor? d_lse, bool bias_grad, {ATTENTION}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "decode": (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? page_table, Tensor? cu_seqlens_q, Tensor? "
        "cache_batch_idx, Tensor? leftpad, Tensor? tree, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? alibi_slopes, Tensor? sink, "
        "Tensor? k_scale, Tensor? v_scale, Tensor[] mask_tensors, str mask, SymInt? length, SymInt shared_prefix, SymInt? split, bool "
        "interleaved, float? scale, float softcap, str? backend, bool check, ScalarType? out_dtype, SymInt cp_rank, SymInt cp_world, "
        "SymInt cp_interleave) -> (Tensor, Tensor)"
    ),
    "append": (
        "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, Tensor? page_table, Tensor? "
        "cache_batch_idx, Tensor? cu_seqlens, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_first, bool interleaved, bool "
        "check, bool skip, SymInt cp_rank, SymInt cp_world, SymInt cp_interleave) -> ()"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name):
    for twin in (name, f"{name}_reading"):
        assert str(getattr(torch.ops.tilewise, twin).default._schema) == f"tilewise::{twin}{SCHEMAS[name]}"
