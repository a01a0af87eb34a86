"""The one module that imports NVIDIA's CuTe DSL: its names move between versions, and here is where that is mended."""

import operator

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import (
    BFloat16,
    Boolean,
    Constexpr,
    Float8E4M3FN,
    Float16,
    Float32,
    Int8,
    Int16,
    Int32,
    Int64,
    Uint32,
    const_expr,
    pipeline,
    range_constexpr,
)
from cutlass._mlir.ir import Value
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.nvgpu.tcgen05 import int_to_smem_descriptor, smem_descriptor_to_int  # of descriptors that wgmma reads, too
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.utils import LayoutEnum, SmemAllocator
from cutlass.utils import hopper_helpers as sm90

__all__ = [
    "BFloat16",
    "Boolean",
    "CUstream",
    "Constexpr",
    "Float8E4M3FN",
    "Float16",
    "Float32",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "LayoutEnum",
    "OperandMajorMode",
    "SmemAllocator",
    "Uint32",
    "Value",
    "arch",
    "const_expr",
    "cpasync",
    "cute",
    "cutlass",
    "int_to_smem_descriptor",
    "make_fake_stream",
    "make_fake_tensor",
    "operator",
    "pipeline",
    "range_constexpr",
    "sm90",
    "smem_descriptor_to_int",
    "warp",
    "warpgroup",
]
