"""Maxima of whole tiles."""

from tilewise.hopper import fragments
from tilewise.hopper.dsl import Constexpr, Float32, Int32, arch, const_expr, cute, range_constexpr


def largest3(values: list, kind: str) -> Int32:
    """Their largest, or smallest, as a tree of instructions that take three."""
    while len(values) > 1:
        n = 3 if len(values) >= 3 else 2
        joined = [join(batch, kind) for batch in fragments.batched(values, n)]
        values = joined
    return values[0]


def join(batch: list, kind: str) -> Int32:
    if len(batch) == 1:
        return batch[0]
    if len(batch) == 2:
        ptx = f"{kind} {{$w0}}, {{$r0}}, {{$r1}};"
    else:
        ptx = f"{{ .reg .b32 t; {kind} t, {{$r0}}, {{$r1}}; {kind} {{$w0}}, t, {{$r2}}; }}"
    return arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=batch)


def over_quad(x: Int32, kind: str) -> Int32:
    for distance in (2, 1):
        x = join([x, arch.shuffle_sync_bfly(x, distance)], kind)
    return x


def number(bits: Int32) -> Float32:
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


@cute.jit
def row_maxima(acc_S: cute.Tensor, rows: fragments.Rows, quad: Constexpr[bool]) -> cute.Tensor:
    """(ROWS,) bits of the row's largest score, or of any negative one where the row's maximum so far is not negative and all scores are."""
    S = fragments.by_rows(cute.recast_tensor(acc_S, Int32))
    top = cute.make_rmem_tensor(fragments.ROWS, Int32)
    for r in range_constexpr(fragments.ROWS):
        top[r] = largest3([S[r, c] for c in range(cute.size(S, mode=[1]))], "max.s32")
    return top


@cute.jit
def exact(acc_S: cute.Tensor, rows: fragments.Rows, top: cute.Tensor):
    """top over the quad, and right where all are negative."""
    S = fragments.by_rows(cute.recast_tensor(acc_S, Int32))
    for r in range_constexpr(fragments.ROWS):
        top[r] = over_quad(top[r], "max.s32")
    unknown = (top[0] < 0 and rows.m[0] < 0.0) or (top[1] < 0 and rows.m[1] < 0.0)
    if arch.vote_any_sync(unknown):
        for r in range_constexpr(fragments.ROWS):
            least = over_quad(largest3([S[r, c] for c in range(cute.size(S, mode=[1]))], "min.u32"), "min.u32")
            top[r] = least if top[r] < 0 else top[r]


@cute.jit
def exact_softmax(acc_S: cute.Tensor, rows: fragments.Rows, scale_log2: Float32) -> cute.Tensor:
    top = row_maxima(acc_S, rows, True)
    exact(acc_S, rows, top)
    return finish(acc_S, rows, top, scale_log2)


@cute.jit
def finish(acc_S: cute.Tensor, rows: fragments.Rows, top: cute.Tensor, scale_log2: Float32) -> cute.Tensor:
    S = fragments.by_rows(acc_S)
    rescale, base = (cute.make_rmem_tensor(fragments.ROWS, Float32) for _ in range(2))
    for r in range_constexpr(fragments.ROWS):
        m = arch.fmax(number(top[r]) * scale_log2, rows.m[r])
        base[r] = 0.0 if m == -Float32.inf else m
        rescale[r] = cute.math.exp2(rows.m[r] - base[r], fastmath=True)
        rows.m[r] = m
    for r in range_constexpr(fragments.ROWS):
        p = cute.math.exp2(S[r, None].load() * scale_log2 - base[r], fastmath=True)
        rows.l[r] = p.reduce(cute.ReductionOp.ADD, rows.l[r] * rescale[r], 0)
        S[r, None].store(p)
    return rescale


@cute.jit
def set_limits(rows: fragments.Rows, lim: cute.Tensor, config: Constexpr):
    for r in range_constexpr(fragments.ROWS):
        slack = Float32(0.0)
        if const_expr(config.maxima == "slack"):
            slack = arch.fmax(cute.math.log2(rows.l[r], fastmath=True) - 3.0, 0.0)
        lim[r] = rows.m[r] + slack if rows.m[r] >= 0.0 else -Float32.inf


@cute.jit
def lazy_softmax(acc_S: cute.Tensor, rows: fragments.Rows, lim: cute.Tensor, scale_log2: Float32, config: Constexpr):
    top = row_maxima(acc_S, rows, False)
    grows = number(top[0]) * scale_log2 > lim[0] or number(top[1]) * scale_log2 > lim[1]
    grew = arch.vote_any_sync(grows)
    rescale = cute.make_rmem_tensor(fragments.ROWS, Float32)
    rescale.fill(1.0)
    if grew:
        exact(acc_S, rows, top)
        for r in range_constexpr(fragments.ROWS):
            m = arch.fmax(number(top[r]) * scale_log2, rows.m[r])
            base = 0.0 if m == -Float32.inf else m
            rescale[r] = cute.math.exp2(rows.m[r] - base, fastmath=True)
            rows.m[r] = m
            rows.l[r] *= rescale[r]
        set_limits(rows, lim, config)
    S = fragments.by_rows(acc_S)
    for r in range_constexpr(fragments.ROWS):
        base = rows.m[r]
        p = cute.math.exp2(S[r, None].load() * scale_log2 - base, fastmath=True)
        rows.l[r] = p.reduce(cute.ReductionOp.ADD, rows.l[r], 0)
        S[r, None].store(p)
    return rescale, grew


@cute.jit
def free_softmax(acc_S: cute.Tensor, rows: fragments.Rows, scale_log2: Float32) -> cute.Tensor:
    top = row_maxima(acc_S, rows, True)
    for r in range_constexpr(fragments.ROWS):
        top[r] = over_quad(top[r], "max.s32")
    return finish(acc_S, rows, top, scale_log2)
