"""Tensors in 8 bits with their scales, for `attention` and for caches: the contract and its checks. The arithmetic is backends/eight_bits.py's."""

from typing import Literal, overload

from torch import Tensor

from tilewise import errors
from tilewise.backends import eight_bits
from tilewise.backends.eight_bits import E4M3, INT8

DTYPES = {"fp8": E4M3, "int8": INT8}
PER = ("tensor", "head", "token", "tile")
NO_GRADIENT = "quantise has none; a gradient comes from attention(..., precision=)"


@overload
def quantise(
    x: Tensor, recipe: str = "fp8", *, per: str = "tensor", hadamard: bool = False, centre: Literal[False] = False
) -> tuple[Tensor, Tensor]: ...
@overload
def quantise(
    x: Tensor, recipe: str = "fp8", *, per: str = "tensor", hadamard: bool = False, centre: Literal[True]
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def quantise(
    x: Tensor, recipe: str = "fp8", *, per: str = "tensor", hadamard: bool = False, centre: bool = False
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]: ...
def quantise(
    x: Tensor, recipe: str = "fp8", *, per: str = "tensor", hadamard: bool = False, centre: bool = False
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """x in 8 bits an element and the scales that they are multiplied by, for q, k or v of `attention` or a cache of `decode`.

    Args:
        x: (batch, tokens, heads, dim), fp32, bf16, fp16 or fp64; a cache's pages stand for its batch.
        recipe: "fp8" for float8_e4m3fn, up to 448, or "int8", from -127 to 127. Both round to nearest even.
        per: what has a scale of its own: "tensor", "head" (of each batch entry), "token" (and head), or "tile", 128 tokens of a head, for k and v.
        hadamard: rotate the last dimension, a power of two, by fixed signs and a Hadamard matrix, which spreads outliers over it. Products of q and k
            that are both rotated stay; do not rotate v.
        centre: subtract from each head's channels their mean over up to 128 tokens, before all else.

    Returns:
        The elements, shaped as x, and their scale, fp32: (), (batch, heads), (batch, heads, tokens) or (batch, heads, ceil(tokens / 128)), as
        `attention` takes it; `decode` takes a token's as (batch, tokens, heads). With `centre` also that, (batch, heads, dim) fp32: attention with
        k - centre has the same O, and an LSE that lacks scale q centre^T; of v - centre it is O - centre.
        The largest finite |x| of a group sets its scale, which is 1 for a group of zeros. What is not finite is never taken for a large number: it
        is NaN in float8_e4m3fn, and in int8, which has none, the scale of its group is NaN, so that either shows in O.

    Raises:
        ShapeError: x of the wrong shape or dtype, or with `hadamard` of a last dimension that is no power of two.
        ValueError: a recipe, `per` or flag that does not exist; x that requires grad.
    """
    errors.check_tensor("x", x, ("batch", "tokens", "heads", "dim"))
    for name, given, names in (("recipe", recipe, tuple(DTYPES)), ("per", per, PER)):
        if given not in names:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, names))}, got {given!r}")
    errors.check_flag("hadamard", hadamard)
    errors.check_flag("centre", centre)
    errors.check_no_grad("x", x, NO_GRADIENT)
    errors.check_no_tangent("x", x, NO_GRADIENT)
    dim = x.shape[-1]
    if hadamard and (dim == 0 or dim & (dim - 1)):
        raise errors.ShapeError(
            f"x has dim {dim}, but hadamard=True needs a power of two; pad q and k with zeros, and pass attention the scale of the dim that they had"
        )
    middle, x = eight_bits.centred(x) if centre else (None, x.float())
    if hadamard:
        x = eight_bits.rotated(x)
    numbers, scale = eight_bits.quantised(x, DTYPES[recipe], per)
    scale = scale * dim**-0.5 if hadamard else scale
    return (numbers, scale) if middle is None else (numbers, scale, middle)
