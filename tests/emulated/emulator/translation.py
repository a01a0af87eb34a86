"""What Python each instruction of PTX becomes (PTX ISA 8.8, chapter 9), of those that the kernels have."""

import re
from collections.abc import Iterator

import numpy as np

from emulator.ptx import Instruction, split

KINDS = {"pred": "?", "bf16": "u2", "f16": "f2", "f32": "f4"}
KINDS |= {f"{sign}{8 * n}": f"{kind}{n}" for sign, kind in (("b", "u"), ("u", "u"), ("s", "i")) for n in (1, 2, 4, 8)}
SPECIAL = {
    "%tid.x": "w.place[1]",
    "%tid.y": "w.place[0]",
    "%laneid": "w.lane",
    "__dynamic_shmem__0": "w.block.shared_base",
    "global_smem": "w.block.shared_base",  # as Triton calls it
    "%cluster_ctarank": "w.block.rank",
    "%smid": "w.lane & 0",
    "%clock": "w.clock",
    "%globaltimer_lo": "w.clock",
}
for i, axis in enumerate("xyz"):
    SPECIAL |= {f"%ctaid.{axis}": f"w.block.index[{i}]", f"%nctaid.{axis}": f"w.block.grid[{i}]"}
NOTHING = ("fence.acq_rel", "fence.mbarrier_init", "fence.proxy.async.global", "griddepcontrol.", "prefetch.", "wgmma.fence")

UNARY = {"not": "~{}", "neg": "-{}", "abs": "absolute({})", "clz": "leading_zeros({})", "popc": "ones({})", "ex2": "power_of_two({})"}
UNARY |= {"lg2": "log2({})", "rcp": "1 / {}", "tanh": "tanh({})"}
BINARY = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}"}
BINARY |= {"rem": "remainder({}, {})", "bmsk": "bits_from({}, {})"}


class Unknown(NotImplementedError):
    """An instruction that nobody has translated yet."""


def lines_of(program, instruction: Instruction, masked: bool) -> list[str]:
    """Of a function's body. R: registers; K: constants; m: the lanes that take part, if not all do; w: the warp."""
    if instruction.op.startswith(NOTHING):
        return []
    guard = instruction.guard.lstrip("!")
    it = Translation(program, instruction, "m" if masked and not guard else "g" if guard else "")
    if not guard:
        return it.lines()
    p = f"{'~' * instruction.guard.startswith('!')}R[{program.numbers[guard]}]"
    return [f"g = m & {p}" if masked else f"g = {p}", f"if g.any(): {'; '.join(it.lines())}"]


class Translation:
    """One instruction. mask: the name of the lanes that take part; "": all."""

    def __init__(self, program, instruction: Instruction, mask: str) -> None:
        self.program, self.it, self.masked, self.mask = program, instruction, bool(mask), mask or "None"
        self.parts = instruction.op.split(".")
        self.kind = KINDS.get(self.parts[-1], "u4")

    def lines(self) -> list[str]:
        name = self.parts[0]
        if (
            name in ("add", "sub") and self.parts[-2] == "f32" and self.parts[-1] in ("bf16", "f16")
        ):  # the first operand is fp32 when it is read
            d, a, b = self.it.operands
            a = f"pair(zeros_u2, {self.value(a, 'u2')}).view(f4)" if self.parts[-1] == "bf16" else f"{self.value(a, 'f2')}.astype(f4)"
            return [self.put(d, BINARY[name].format(a, self.value(b, "f4")), "f4")]
        if self.parts[-1] == "bf16" and name in (*UNARY, *BINARY):  # bits are what numpy has of it
            if name != "abs":
                raise Unknown(str(self.it))
            return list(self._computed("{} & u2.type(0x7FFF)"))
        if name in UNARY:
            return list(self._computed(UNARY[name]))
        if name in BINARY and not {"wide", "hi"} & set(self.parts):
            return list(self._computed(BINARY[name]))
        if (translate := getattr(self, f"of_{name}", None)) is None:
            raise Unknown(str(self.it))
        return list(translate(*self.it.operands))

    def value(self, x: str, kind: str) -> str:
        """An operand, read as numpy's `kind`."""
        if (number := self.program.numbers.get(x)) is not None:
            own = self.program.kernel.registers[x]
            if own == kind:
                return f"R[{number}]"
            if np.dtype(own).itemsize == np.dtype(kind).itemsize:
                return f"R[{number}].view({kind})"
            return f"R[{number}].astype(u{kind[1]}).view({kind})"
        if x in SPECIAL:
            return SPECIAL[x]
        if x in self.program.kernel.parameters:
            return f"w.block.addresses[{x!r}]"
        if match := re.fullmatch(r"0f([0-9A-Fa-f]{8})", x):
            return self.program.constant(int(match[1], 16), kind)
        if re.fullmatch(r"-?\d+|-?0x[0-9A-Fa-f]+U?", x):
            return self.program.constant(int(x.rstrip("U"), 0), kind)
        raise Unknown(f"{x} in {self.it}")

    def put(self, d: str, expression: str, kind: str) -> str:
        """d = expression, which is of `kind`."""
        if d == "_":
            return "pass"
        number, own = self.program.numbers[d], self.program.kernel.registers[d]
        if own != kind:
            wider = np.dtype(own).itemsize != np.dtype(kind).itemsize
            expression = f"({expression}){f'.astype({kind[0]}{own[1]})' if wider else ''}.view({own})"
        return f"R[{number}] = where({self.mask}, {expression}, R[{number}])" if self.masked else f"R[{number}] = {expression}"

    def address(self, x: str, kind: str) -> str:
        """[register + number]."""
        base, _, offset = x.strip("[]").replace(" ", "").partition("+")
        return f"({self.value(base, kind)} + {self.program.constant(int(offset, 0), kind)})" if offset else self.value(base, kind)

    def _computed(self, expression: str) -> Iterator[str]:
        d, *sources = self.it.operands
        yield self.put(d, expression.format(*(self.value(x, self.kind) for x in sources)), self.kind)

    def of_setmaxnreg(self, n):
        yield f"w.block.registers[w] = {int(n)}"

    # Arithmetic

    def of_mul(self, d, a, b):
        if "hi" in self.parts:
            yield from self._computed("high({}, {})")
        else:
            wide = f"{self.kind[0]}{2 * int(self.kind[1])}"
            yield self.put(d, f"{self.value(a, self.kind)}.astype({wide}) * {self.value(b, self.kind)}.astype({wide})", wide)

    def of_mad(self, d, a, b, c):
        if "wide" in self.parts:
            wide = f"{self.kind[0]}{2 * int(self.kind[1])}"
            a, b = (f"{self.value(x, self.kind)}.astype({wide})" for x in (a, b))
            yield self.put(d, f"{a} * {b} + {self.value(c, wide)}", wide)
        else:
            yield from self._computed("{} * {} + {}")

    def of_fma(self, d, a, b, c):
        if self.parts[-1] in ("bf16x2", "f16x2"):
            a, b, c = (self.value(x, "u4") for x in (a, b, c))
            yield self.put(d, f"fma_of_pairs({a}, {b}, {c}, {self.parts[-1][:-2]!r})", "u4")
        else:
            yield from self._computed("fma({}, {}, {})")

    def of_div(self, *_):
        yield from self._computed("{} / {}" if self.kind == "f4" else "quotient({}, {})")

    def _extreme(self, name: str) -> Iterator[str]:
        if self.parts[-1] in ("bf16x2", "f16x2"):
            d, a, b = self.it.operands
            yield self.put(d, f"extreme_of_pairs({self.value(a, 'u4')}, {self.value(b, 'u4')}, f{name}, {self.parts[-1][:-2]!r})", "u4")
        elif self.kind == "f4":  # a number rather than NaN, if it is not said otherwise
            yield from self._computed(f"{name}imum({{}}, {{}})" if "NaN" in self.parts else f"f{name}({{}}, {{}})")
        else:
            yield from self._computed(f"maximum({name}imum({{}}, {{}}), 0)" if "relu" in self.parts else f"{name}imum({{}}, {{}})")

    def of_min(self, *_):
        yield from self._extreme("min")

    def of_max(self, *_):
        yield from self._extreme("max")

    def of_shl(self, d, a, b):
        yield self.put(d, f"left({self.value(a, self.kind)}, {self.value(b, 'u4')})", self.kind)

    def of_shr(self, d, a, b):
        yield self.put(d, f"right({self.value(a, self.kind)}, {self.value(b, 'u4')})", self.kind)

    def of_setp(self, p, a, b):
        if self.parts[-1] == "f16x2":  # a predicate for each half
            for each, shift in zip(p.split("|"), (0, 16), strict=True):
                halves = (f"({self.value(x, 'u4')} >> {shift}).astype(u2).view(f2)" for x in (a, b))
                yield self.put(each, f"{self.parts[1]}({', '.join(halves)})", "?")
            return
        a, b = (self.value(x, self.kind) for x in (a, b))
        if self.parts[-1] == "bf16":
            a, b = (f"pair(zeros_u2, {x}).view(f4)" for x in (a, b))
        yield self.put(p, f"{self.parts[1]}({a}, {b})", "?")

    def of_selp(self, d, a, b, p):
        yield self.put(d, f"where({self.value(p, '?')}, {self.value(a, self.kind)}, {self.value(b, self.kind)})", self.kind)

    def of_cvt(self, d, a, b=None):
        to, source = self.parts[-2:]
        if (to, source) == ("f16x2", "e4m3x2"):
            low, high = (f"E4M3[({self.value(a, 'u2')} >> {shift} & 255).astype(np.intp)].astype('f2').view('u2')" for shift in (0, 8))
            yield self.put(d, f"pair({low}, {high})", "u4")
        elif to in ("bf16x2", "f16x2"):
            high, low = (f"{to[:-2]}({self.value(x, 'f4')})" for x in (a, b))
            yield self.put(d, f"pair({low}, {high})", "u4")
        elif to == "e4m3x2" and source == "f32" and "satfinite" in self.parts:
            high, low = (f"e4m3({self.value(x, 'f4')})" for x in (a, b))
            yield self.put(d, f"pair({low}, {high})", "u2")
        elif (to, source) == ("tf32", "f32"):
            yield self.put(d, f"tf32({self.value(a, 'f4')})", "u4")
        elif to in ("bf16", "f16") and source == "f32":
            yield self.put(d, f"{to}({self.value(a, 'f4')})", "u2")
        elif to == "f32" and source == "bf16":
            yield self.put(d, f"pair(zeros_u2, {self.value(a, 'u2')})", "u4")
        elif (to[0] in "suf" and source[0] in "su") or (to, source) == ("f32", "f16"):
            yield self.put(d, f"{self.value(a, KINDS[source])}.astype({KINDS[to]})", KINDS[to])
        else:
            raise Unknown(str(self.it))

    def of_bfe(self, d, a, first, n):
        a = f"left({self.value(a, self.kind)}, 32 - {self.value(first, 'u4')} - {self.value(n, 'u4')})"
        yield self.put(d, f"right({a}, 32 - {self.value(n, 'u4')})", self.kind)

    def of_prmt(self, d, a, b, selector):
        yield self.put(d, f"bytes_chosen({', '.join(self.value(x, 'u4') for x in (a, b, selector))})", "u4")

    def of_cvta(self, d, a):
        yield self.put(d, self.value(a, "u8"), "u8")

    def of_mov(self, d, a):
        half = f"u{max(1, np.dtype(self.kind).itemsize // 2)}"
        if d.startswith("{"):
            low, high = split(d.strip("{}"))
            yield self.put(low, f"{self.value(a, self.kind)}.astype({half})", half)
            yield self.put(high, f"right({self.value(a, self.kind)}, {8 * int(half[1])}).astype({half})", half)
        elif a.startswith("{"):
            low, high = (self.value(x, half) for x in split(a.strip("{}")))
            yield self.put(d, f"pair({low}, {high})", self.kind)
        else:
            yield self.put(d, self.value(a, self.kind), self.kind)

    # Memory

    def _loaded(self, targets: str, call: str, kind: str) -> Iterator[str]:
        yield f"x = w.{call}"
        for i, target in enumerate(split(targets.strip("{}"))):
            yield self.put(target, f"x[{i}]", kind)

    def of_ld(self, d, a, *_):
        n = len(split(d.strip("{}")))
        if "param" in self.parts:
            name, _, offset = a.strip("[]").partition("+")
            call = f"parameter({name!r}, {offset or 0}, {self.kind}, {n})"
        else:
            space, wide = ("global", "u8") if "global" in self.parts else ("shared", "u4")
            call = f"load_{space}({self.address(a, wide)}, {self.mask}, {self.kind}, {n})"
        yield from self._loaded(d, call, self.kind)

    def of_st(self, a, x, *_):
        values = ", ".join(self.value(each, self.kind) for each in split(x.strip("{}")))
        spaces = {"global": ("global", "u8"), "shared::cluster": ("cluster", "u4")}
        space, wide = next((found for name, found in spaces.items() if name in self.parts), ("shared", "u4"))
        yield f"w.store_{space}({self.address(a, wide)}, {self.mask}, {self.kind}, ({values},))"

    def _added(self, a: str, x: str, offset: int = 0) -> str:
        if not {"add", "global"} <= set(self.parts):
            raise Unknown(str(self.it))
        address = f"{self.address(a, 'u8')} + {self.program.constant(offset, 'u8')}"
        return f"w.add_global({address}, {self.mask}, {self.kind}, {self.value(x, self.kind)})"

    def of_atom(self, d, a, x, y=None):
        if {"or", "shared"} <= set(self.parts):
            yield self.put(d, f"w.or_shared({self.address(a, 'u4')}, {self.mask}, {self.value(x, self.kind)})", self.kind)
        elif {"cas", "global"} <= set(self.parts):
            given = f"{self.mask}, {self.kind}, {self.value(x, self.kind)}, {self.value(y, self.kind)}"
            yield self.put(d, f"w.swap_global({self.address(a, 'u8')}, {given})", self.kind)
        elif {"inc", "global"} <= set(self.parts):
            yield self.put(d, f"w.count_global({self.address(a, 'u8')}, {self.mask}, {self.kind}, {self.value(x, self.kind)})", self.kind)
        else:
            yield self.put(d, self._added(a, x), self.kind)

    def of_red(self, a, x):
        for i, each in enumerate(split(x.strip("{}"))):
            yield self._added(a, each, i * np.dtype(self.kind).itemsize)

    def of_ldmatrix(self, d, a):
        yield from self._loaded(d, f"load_matrices({self.address(a, 'u4')}, {len(split(d.strip('{}')))}, {'trans' in self.parts})", "u4")

    def of_stmatrix(self, a, x):
        values = ", ".join(self.value(each, "u4") for each in split(x.strip("{}")))
        yield f"w.store_matrices({self.address(a, 'u4')}, ({values},), {'trans' in self.parts})"

    def of_movmatrix(self, d, a):
        yield self.put(d, f"w.transpose({self.value(a, 'u4')})", "u4")

    def of_mma(self, d, a, b, c):
        sums = "i4" if self.parts[-2] == "s8" else "f4"
        shapes = ("m16n8k32",) if sums == "i4" else ("m16n8k16", "m16n8k8")
        if self.parts[3] not in shapes or self.parts[4:6] != ["row", "col"]:
            raise Unknown(str(self.it))
        given = ", ".join(
            f"({', '.join(self.value(each, kind) for each in split(x.strip('{}')))},)" for x, kind in ((a, "u4"), (b, "u4"), (c, sums))
        )
        yield from self._loaded(d, f"product_of_registers({self.parts[-2]!r}, {given})", sums)

    # Other lanes, other warps

    def of_shfl(self, d, a, b, *_):
        if self.parts[2] not in ("bfly", "idx"):
            raise Unknown(str(self.it))
        lane = f"{'w.lane ^ ' if 'bfly' in self.parts else ''}{self.value(b, 'u4')}"
        yield self.put(d, f"{self.value(a, 'u4')}[({lane}) & 31]", "u4")

    def of_vote(self, d, p, *_):
        how = "ballot" if "ballot" in self.parts else self.parts[2]
        yield self.put(d, f"w.{how}({self.value(p, '?')}, {self.mask})", "u4" if how == "ballot" else "?")

    def of_redux(self, d, a, *_):
        yield self.put(d, f"w.reduce({self.value(a, self.kind)}, {self.mask}, {self.parts[2]!r})", self.kind)

    def of_elect(self, d, *_):
        lane, _, p = d.partition("|")
        yield f"x = w.elect({self.mask})"
        yield self.put(lane, "x[0]", "u4")
        yield self.put(p, "x[1]", "?")

    def of_bar(self, *operands):
        if "warp" not in self.parts:
            which, count = (*(self.value(x, "u4") for x in operands), "None")[:2]
            yield f"w.barrier({which}, {count}, {self.parts[1] == 'sync'})"

    def of_fence(self):
        if not self.it.op.startswith("fence.proxy.async"):
            raise Unknown(str(self.it))
        yield f"w.fence({self.mask})"

    def of_barrier(self):
        if self.parts[1] != "cluster":
            raise Unknown(str(self.it))
        yield f"w.{self.parts[2]}_of_cluster()"

    def of_mapa(self, d, a, rank):
        yield self.put(d, f"w.address_in_cluster({self.value(a, 'u4')}, {self.value(rank, 'u4')})", "u4")

    def of_nanosleep(self, *_):
        yield "w.may_go = False"

    # Barriers in shared memory, the copy engine, products

    def of_mbarrier(self, *operands):
        what = self.parts[1]
        if what == "init":
            a, n = operands
            yield f"w.init({self.address(a, 'u4')}, {self.mask}, {self.value(n, 'u4')})"
        elif what == "arrive":
            _, a, n = (*operands, "1")[:3]
            yield f"w.arrive({self.address(a, 'u4')}, {self.mask}, {self.value(n, 'u4')}, {'expect_tx' in self.parts})"
        elif what == "try_wait":
            p, a, parity, *_ = operands
            yield self.put(p, f"w.passed({self.address(a, 'u4')}, {self.mask}, {self.value(parity, 'u4')})", "?")
        else:
            raise Unknown(str(self.it))

    def of_cp(self, *operands):
        op = self.it.op
        if "bulk" not in self.parts:
            yield self._fetched(*operands)
        elif "commit_group" in self.parts:
            yield f"w.commit({self.mask})"
        elif "wait_group" in self.parts:
            yield f"w.wait({self.mask}, {operands[0]}, {'read' in self.parts})"
        elif "tensor" in self.parts:
            loads, everyone = self.parts[5].startswith("shared"), "multicast" in op
            where, what = operands[:2] if loads else operands[1::-1]
            described, corner = split(what.strip("[]"))
            given = [self.mask, self.address(where, "u4"), self.value(described, "u8")]
            given.append(f"({', '.join(self.value(x, 'i4') for x in split(corner.strip('{}')))},)")
            if loads:
                given += [self.address(operands[2], "u4"), self.value(operands[3], "u2") if everyone else "None"]
            yield f"w.{'load' if loads else 'store'}_box({', '.join(given)})"
        elif op.startswith("cp.async.bulk.shared") and "multicast" not in op:
            given = (self.mask, *(self.address(x, kind) for x, kind in zip(operands, ("u4", "u8", "u4", "u4"), strict=False)))
            yield f"w.load_bytes({', '.join(given)})"
        elif op.startswith("cp.async.bulk.global") or op.endswith("bulk_group.add.f32"):
            given = (self.mask, *(self.address(x, kind) for x, kind in zip(operands, ("u8", "u4", "u4"), strict=False)))
            yield f"w.store_bytes({', '.join(given)}, {op.endswith('.add.f32')})"
        else:
            raise Unknown(str(self.it))

    def _fetched(self, *operands) -> str:
        """cp.async of single threads."""
        if "commit_group" in self.parts:
            return "w.commit_fetches()"
        if "wait_group" in self.parts:
            return f"w.wait_fetches({operands[0]})"
        to, source, n, size = (*operands, operands[2])[:4]
        given = self.address(to, "u4"), self.address(source, "u8"), self.mask, int(n, 0), self.value(size, "u4")
        return f"w.fetch({', '.join(map(str, given))})"

    def of_wgmma(self, *operands):
        if "commit_group" in self.parts:
            yield "w.commit_products()"
        elif "wait_group" in self.parts:
            yield f"w.wait_products({operands[0]})"
        else:
            shape = re.search(r"\.m64n(\d+)k(16|32)\.(?:f32|satfinite\.s32)\.(bf16|f16|e4m3|s8)\.\3$", self.it.op)
            d, a, b, scale, *signs = operands
            if shape is None or any(sign != "1" for sign in signs[:2]):
                raise Unknown(str(self.it))
            transposed = signs[2:]
            if a.startswith("{"):
                a, transposed = [self.program.numbers[x] for x in split(a.strip("{}"))], ["0", *transposed]
            else:
                a = self.value(a, "u8")
            transposed = (*transposed, "0", "0")[:2]  # only of 16 bits there is a choice
            numbers = [self.program.numbers[x] for x in split(d.strip("{}"))]
            given = [shape[1], repr(self.parts[-1]), numbers, a, self.value(b, "u8"), self.value(scale, "?"), *transposed]
            yield f"w.product({', '.join(map(str, given))})"
