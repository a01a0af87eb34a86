"""What warps ask of the tensor cores: D += A B of a warpgroup, of which each warp has 16 rows (PTX ISA, "wgmma.mma_async")."""

from functools import cache, partial

import numpy as np

from emulator.arithmetic import E4M3, f2, f4, i1, i4, u1, u2, u4
from emulator.memory import Fault, swizzled
from emulator.proxies import UNIT

ROWS, DEPTH_BYTES = 16, 32  # of A


class Products:
    """Methods of a warp. A product may read its operands, and write D, any time until it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[list] = [[]]  # in groups; the last one is open

    def product(self, columns, kind, accumulator, a, b, scale, a_transposed, b_transposed):
        """a: registers, or a descriptor of shared memory, as b is; scale: whether D is added to."""
        a = a if isinstance(a, list) else int(a[0])
        given = columns, kind, accumulator, a, int(b[0]), bool(scale[0]), a_transposed, b_transposed, self.fenced(0)
        self.products[-1].append(partial(self._multiply, *given))
        if self.machine.pace == "eager":
            self.next_product()

    def commit_products(self):
        self.products.append([])

    def wait_products(self, left):
        while len(self.products) - 1 > left:
            for product in self.products.pop(0):
                product()

    def next_product(self):
        for group in self.products:
            if group:
                group.pop(0)()
                return

    def _multiply(self, columns, kind, accumulator, a, b, scale, a_transposed, b_transposed, fenced):
        if isinstance(a, list):
            first = _assembled([self.registers[register] for register in a], kind)
        else:
            row = ROWS * (self.number % 4)
            first = self._operand(a, range(row, row + ROWS), kind, a_transposed, fenced)
        second = self._operand(b, range(columns), kind, b_transposed, fenced)
        before = np.stack([self.registers[i] for i in accumulator]).view(i4 if kind == "s8" else f4) if scale else None
        fraction = self.machine.fraction if kind == "e4m3" else None
        found = added(_numbers(first, kind), _numbers(second, kind).T, _fragment(columns), before, fraction)
        found = np.clip(found, -(1 << 31), (1 << 31) - 1).astype(i4) if kind == "s8" else found.astype(f4)
        for i, x in zip(accumulator, found.view(u4), strict=True):
            self.registers[i] = x

    def product_of_registers(self, kind, a, b, c):
        """A warp's own, mma.m16n8k16, k8 of tf32 or k32 of s8. Of A's four matrices of 8 rows of 16 bytes the lower ones are second; each lane has
        of B two words of a column.
        """
        first, second = _assembled(a, kind), np.concatenate([_matrix(x, kind) for x in b], axis=1)
        found = (_numbers(first, kind) @ _numbers(second, kind).T)[_fragment(8)]
        return list(np.stack(c) + found.astype(c[0].dtype))

    def _operand(self, descriptor: int, rows: range, kind: str, transposed: bool, fenced: int) -> np.ndarray:
        """(rows, numbers of a sum) of what lies in shared memory (PTX ISA, "Matrix Descriptor Format")."""
        start, leading, stride = ((descriptor >> at & 0x3FFF) * 16 for at in (0, 16, 32))
        if descriptor >> 49 & 7:
            raise Fault("a descriptor with a base offset")
        swizzle = descriptor >> 62
        row_bytes = 256 >> swizzle if swizzle else 16
        bits = BITS[kind]
        places = swizzled(start + _places(leading, stride, row_bytes, rows.start, rows.stop, bits.itemsize, bool(transposed)), row_bytes)
        if places.max() >= self.block.size:
            raise Fault("a product reads beyond shared memory")
        self.block.proxies.read(places // UNIT, fenced)
        return self.block.view(bits)[places // bits.itemsize]


def added(a: np.ndarray, b: np.ndarray, fragment: tuple, before: np.ndarray | None, fraction: int | None) -> np.ndarray:
    """a b + before, where each register has it, as exact as numpy's; the products of one instruction.

    With a `fraction` as tensor cores of Hopper are said to add up products of e4m3: every term, `before` among them, keeps so many bits behind the
    leading one of the largest, and loses the rest.
    """
    if fraction is None:
        return (a @ b)[fragment] + (0 if before is None else before)
    row, column = fragment
    terms = a[row] * b.T[column]  # (registers, lanes, numbers of a sum)
    if before is not None:
        terms = np.concatenate([terms, before[..., None]], axis=-1)
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(terms).max(-1, keepdims=True), 1e-30))) - fraction)
    return (np.trunc(terms / step) * step).sum(-1)


def _assembled(words: list, kind: str) -> np.ndarray:
    """A of four matrices of 8 rows of 16 bytes, the lower ones second."""
    first, second, third, fourth = (_matrix(x, kind) for x in words)
    return np.block([[first, third], [second, fourth]])


@cache
def _places(leading: int, stride: int, row_bytes: int, first: int, last: int, item: int, transposed: bool) -> np.ndarray:
    """Bytes from an operand's start, before they are swizzled. transposed: neighbours in memory are rows (of 16-bit numbers)."""
    row, column = np.arange(first, last)[:, None], np.arange(DEPTH_BYTES // item)[None, :]
    if row_bytes == 16:  # matrices of 8 x 8, one after another
        if transposed:
            return row // 8 * stride + row % 8 * 2 + column // 8 * leading + column % 8 * 16
        return row // 8 * stride + row % 8 * 16 + column * item // 16 * leading + column * item % 16
    if transposed:
        across = row_bytes // 2
        return row // across * leading + row % across * 2 + column // 8 * stride + column % 8 * row_bytes
    return row // 8 * stride + row % 8 * row_bytes + column * item


@cache
def _fragment(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) that each register of D holds, (columns // 2, 32) each (PTX ISA, "Register Fragments": the figure of D)."""
    register, lane = np.arange(columns // 2)[:, None], np.arange(32)[None, :]
    return lane // 4 + 8 * (register >> 1 & 1), register // 4 * 8 + 2 * (lane % 4) + (register & 1)


BITS = {"bf16": u2, "f16": u2, "e4m3": u1, "s8": u1, "tf32": u4}


def _matrix(x: np.ndarray, kind: str) -> np.ndarray:
    """8 rows of 16 bytes, four neighbours a lane."""
    return np.ascontiguousarray(x).view(BITS[kind]).reshape(8, -1)


def _numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """As what they are added up in: fp32, and fp64, where sums are exact, for those of 8 bits."""
    if kind == "bf16":
        return (bits.astype(u4) << u4.type(16)).view(f4)
    if kind == "f16":
        return bits.view(f2).astype(f4)
    if kind == "tf32":
        return (bits & u4.type(0xFFFFE000)).view(f4)
    return (E4M3[bits] if kind == "e4m3" else bits.view(i1)).astype(np.float64)
