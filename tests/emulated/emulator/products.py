"""What warps ask of the tensor cores: D += A B of a warpgroup, of which each warp has 16 rows (PTX ISA, "wgmma.mma_async")."""

from functools import cache, partial

import numpy as np

from emulator.arithmetic import f2, f4, u2, u4
from emulator.memory import Fault, swizzled
from emulator.proxies import UNIT

ROWS = DEPTH = 16


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
            first = np.empty((ROWS, DEPTH), u2)
            for i, register in enumerate(a):  # four matrices of 8 x 8, the lower ones second
                row, column = 8 * (i % 2), 8 * (i // 2)
                first[row : row + 8, column : column + 8] = _matrix(self.registers[register])
        else:
            row = ROWS * (self.number % 4)
            first = self._operand(a, range(row, row + ROWS), a_transposed, fenced)
        second = self._operand(b, range(columns), b_transposed, fenced)
        found = (_numbers(first, kind) @ _numbers(second, kind).T)[_fragment(columns)]
        if scale:
            found = found + np.stack([self.registers[i] for i in accumulator]).view(f4)
        for i, x in zip(accumulator, found.view(u4), strict=True):
            self.registers[i] = x

    def product_of_registers(self, kind, a, b, c):
        """A warp's own, mma.m16n8k16: of A's four matrices of 8 x 8 the lower ones are second; each lane has of B two numbers of a column."""
        first, second = np.empty((ROWS, DEPTH), u2), np.concatenate([_matrix(x) for x in b], axis=1)
        for i, x in enumerate(a):
            first[8 * (i % 2) :, 8 * (i // 2) :][:8, :8] = _matrix(x)
        found = (_numbers(first, kind) @ _numbers(second, kind).T)[_fragment(8)]
        return list(np.stack(c) + found)

    def _operand(self, descriptor: int, rows: range, transposed: bool, fenced: int) -> np.ndarray:
        """(rows, DEPTH) of what lies in shared memory (PTX ISA, "Matrix Descriptor Format")."""
        start, leading, stride = ((descriptor >> at & 0x3FFF) * 16 for at in (0, 16, 32))
        if descriptor >> 49 & 7:
            raise Fault("a descriptor with a base offset")
        swizzle = descriptor >> 62
        row_bytes = 256 >> swizzle if swizzle else 16
        places = swizzled(start + _places(leading, stride, row_bytes, rows.start, rows.stop, bool(transposed)), row_bytes)
        if places.max() >= self.block.size:
            raise Fault("a product reads beyond shared memory")
        self.block.proxies.read(units := places // UNIT, fenced)
        return self.block.view(u2)[units]


@cache
def _places(leading: int, stride: int, row_bytes: int, first: int, last: int, transposed: bool) -> np.ndarray:
    """Bytes from an operand's start, before they are swizzled. transposed: neighbours in memory are rows."""
    row, column = np.arange(first, last)[:, None], np.arange(DEPTH)[None, :]
    if row_bytes == 16:  # matrices of 8 x 8, one after another
        if transposed:
            return row // 8 * stride + row % 8 * 2 + column // 8 * leading + column % 8 * 16
        return row // 8 * stride + row % 8 * 16 + column // 8 * leading + column % 8 * 2
    if transposed:
        across = row_bytes // 2
        return row // across * leading + row % across * 2 + column // 8 * stride + column % 8 * row_bytes
    return row // 8 * stride + row % 8 * row_bytes + column * 2


@cache
def _fragment(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) that each register of D holds, (columns // 2, 32) each (PTX ISA, "Register Fragments": the figure of D)."""
    register, lane = np.arange(columns // 2)[:, None], np.arange(32)[None, :]
    return lane // 4 + 8 * (register >> 1 & 1), register // 4 * 8 + 2 * (lane % 4) + (register & 1)


def _matrix(x: np.ndarray) -> np.ndarray:
    """8 x 8 numbers of 16 bits, two neighbours a lane."""
    return np.ascontiguousarray(x).view(u2).reshape(8, 8)


def _numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """As fp32."""
    if kind == "bf16":
        return (bits.astype(u4) << u4.type(16)).view(f4)
    if kind == "f16":
        return bits.view(f2).astype(f4)
    raise Fault(f"products of {kind} are not translated")
