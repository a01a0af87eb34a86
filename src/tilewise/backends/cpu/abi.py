"""The kernel's argument struct as Python sees it: a mirror of csrc/tilewise_cpu.h, field by field."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p

NAME = "libtilewise_cpu.so"  # of the compiled kernel

ABI_VERSION = 9
OK, NO_MEMORY, BAD_ABI, BAD_ISA = range(4)
FP32, BF16, FP16 = range(3)
RUN_FORWARD, RUN_BACKWARD, RUN_DECODE = range(3)
ISAS = ("auto", "generic", "avx2", "avx512", "avx512_bf16", "amx")
ROW_BLOCK = 96


class TensorArg(ctypes.Structure):
    """Address and element strides (batch, seqlen, heads) of a tensor with a contiguous last dimension."""

    _fields_ = [("data", c_void_p), ("batch", c_int64), ("seq", c_int64), ("head", c_int64)]


class PlaneArg(ctypes.Structure):
    """The bands of one plane of the mask."""

    _fields_ = [
        ("bands", c_void_p),
        ("n_bands", c_int64),
        ("row_ptr", c_void_p),
        ("row_bands", c_void_p),
        ("in_bitmap", c_void_p),
        ("bits", c_void_p),
        ("bits_stride", c_int64),
    ]


class Args(ctypes.Structure):
    """tw_args: one attention call."""

    _fields_ = [
        ("abi_version", c_int32),
        ("isa", c_int32),
        ("dtype", c_int32),
        ("threads", c_int32),
        ("batch", c_int64),
        ("seqlen_q", c_int64),
        ("seqlen_k", c_int64),
        ("heads_q", c_int64),
        ("heads_k", c_int64),
        ("head_dim", c_int64),
        ("head_dim_v", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("planes", c_void_p),
        ("plane_of", c_void_p),
        ("q", TensorArg),
        ("k", TensorArg),
        ("v", TensorArg),
        ("o", TensorArg),
        ("d_o", TensorArg),
        ("lse", c_void_p),
        ("d_lse", c_void_p),
        ("row_max", c_void_p),
        ("dq", TensorArg),
        ("dk", TensorArg),
        ("dv", TensorArg),
        ("bias", TensorArg),
        ("bias_dtype", c_int32),
        ("wide", c_int32),
        ("dbias", TensorArg),
        ("alibi_slopes", c_void_p),
        ("alibi_batch", c_int64),
        ("diagonal", c_void_p),
        ("sink", c_void_p),
        ("dsink", c_void_p),
        ("dropout_key", c_uint32 * 2),
        ("dropout_offset", c_uint32),
        ("dropout_threshold", c_uint32),
        ("dropout_rescale", c_float),
        ("few", c_int32),
        ("documents", c_int64),
        ("bounds", c_void_p),
        ("document_planes", c_void_p),
        ("document_few", c_void_p),
        ("whole_q", c_int64),
        ("rows", c_void_p),
        ("first_head", c_int64),
        ("all_heads", c_int64),
        ("seqlens_k", c_void_p),
        ("page_table", c_void_p),
        ("page_size", c_int64),
        ("page_table_stride", c_int64),
        ("cu_seqlens_q", c_void_p),
        ("cache_batch_idx", c_void_p),
        ("leftpad", c_void_p),
        ("tree", c_void_p),
        ("tree_batch", c_int64),
        ("tree_new", c_int64),
        ("workspace", c_void_p),
    ]


class Info(ctypes.Structure):
    """tw_info_t: what was compiled and what this processor runs."""

    _fields_ = [
        ("abi_version", c_int32),
        ("sizeof_args", c_int32),
        ("sizeof_plane", c_int32),
        ("sizeof_tensor", c_int32),
        ("best_isa", c_int32),
        ("isas", c_uint32),
        ("shared_pool", c_int32),
        ("reserved", c_int32),
    ]
