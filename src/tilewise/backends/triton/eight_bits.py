"""What becomes of q, k and v before the forward pass multiplies them in 8 bits: five small kernels, which read nothing on the host."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.backends.eight_bits import E4M3, INT8, MOST, RECIPES, TILE, counted, spread
from tilewise.backends.tables import documents
from tilewise.backends.triton import config as configs
from tilewise.backends.triton.kernels import eight_bits as kernels
from tilewise.backends.triton.launch import Kernel
from tilewise.backends.triton.tape import scratch
from tilewise.masks import DeviceDocuments
from tilewise.problem import Call

NUMBERS = 8192  # of a program's tile
LEAST_DIM = 32  # that a product of int8 takes
SLICES = 16  # of V; the largest element of a channel is found in each
BLOCK = 64  # channels of a program that finds a centre
EXACT = configs.Config(BLOCK, BLOCK, 4, 1, fused=False)  # of small kernels that round every operation


class Quantiser:
    """Of calls like one with `precision`."""

    def __init__(self, call: Call, tile_n: int) -> None:
        assert call.precision is not None
        self.call, self.tile_n, recipe = call, tile_n, RECIPES[call.precision]
        self.most, self.held = MOST[recipe.qk], INT8 if recipe.qk == INT8 else torch.float16
        self.values = recipe.pv == E4M3
        self.width = 1 << (call.head_dim - 1).bit_length()
        self.v_width = configs.power(call.head_dim_v)
        self.unread = isinstance(call.mask, DeviceDocuments)
        self.tokens = 0 if self.unread else counted(call)
        self.numbers = {"scale": call.scale, "factor": call.scale / self.width}

    @property
    def flags(self) -> dict[str, object]:
        """The forward pass's constants."""
        return {"EIGHT": True, "V_EIGHT": self.values}

    @property
    def parts(self) -> dict[str, int]:
        return parts(self.width)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of the tensors that it is given."""
        call = self.call
        return {"q": self.held, "k": self.held, "v": torch.float16 if self.values else call.v.dtype, "o": call.q.dtype, "x": call.q.dtype}

    def kernel(self, name: str, aligned: bool, of_values: bool = False) -> Kernel:
        """of_values: where centres are V's."""
        call, width = self.call, self.v_width if of_values or name in VALUES else self.width
        rows = rows_of(width)
        constants = {
            "ENDS": self.unread,
            "GROUP": call.group,
            "WIDTH": width,
            "COLUMNS": call.head_dim_v if of_values or name in VALUES else call.head_dim,
            "BLOCK": min(BLOCK, width),
            "SLICES": SLICES,
            "MOST_OF": self.most,
            "TILE_N": self.tile_n,
            "ROWS": min(rows, self.tile_n) if name == "quantise_k" else rows,
        }
        function = getattr(kernels, name)
        given = tuple((each, constants[each]) for each in function.arg_names if each in constants)
        dtypes = dict.fromkeys(("q", "k", "v", "x"), call.q.dtype) | {"q8": self.held, "k8": self.held, "v8": torch.float16}
        return Kernel(function, given, tuple(dtypes.items()), EXACT, aligned)

    def kernels(self) -> list[Kernel]:
        """All that it launches, for tensors that lie at multiples of 16 bytes."""
        found = [self.kernel(name, True) for name in ("centres", "quantise_q", "quantise_k")]
        of_values = [self.kernel("centres", True, of_values=True), *(self.kernel(name, True) for name in VALUES)]
        return [*found, *(of_values if self.values else [])]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, packed: Sequence[Tensor | None], run: Callable
    ) -> tuple[dict[str, Tensor], dict[str, object]]:
        """The forward pass's operands and its other arguments. packed: cu_seqlens; run: launches a kernel by its name, as `Bound.small` does."""
        call, fp32, device = self.call, torch.float32, q.device
        batch, heads, heads_k, m, n = call.batch, call.heads_q, call.heads_k, call.seqlen_q, call.seqlen_k
        n_tiles, stride = -(-n // TILE), max(configs.LEAST_DIM, self.width)

        def new(*shape: int, dtype: torch.dtype = fp32) -> Tensor:
            return scratch(shape, dtype, device)

        keys: dict[str, object] = {"tokens": self.tokens, "seqlen_k": n, "heads": heads_k, "n_tiles": n_tiles}
        if self.unread:
            ends = packed[1]
            assert ends is not None
            keys["cu_k"] = cu_k = documents.on_device(ends, device)
            keys["documents"] = cu_k.shape[0] - 1
        pairs = batch * heads_k
        q8, k8 = new(batch, heads, m, stride, dtype=self.held), new(batch, heads_k, n, stride, dtype=self.held)
        found: dict[str, object] = {
            "row_factor": new(batch, heads, m),
            "row_shift": new(batch, heads, m),
            "k_scale": new(pairs, n_tiles),
            "k_whole": new(pairs, n_tiles * (TILE // self.tile_n)),
            "k_lost": new(pairs, n),
        }
        k_centre = new(pairs, self.width)
        blocks = -(-self.width // BLOCK)
        run("centres", pairs * blocks, {"x": k}, keys | {"centre": k_centre})
        m_tiles = -(-m // rows_of(self.width))
        more = self.numbers | {"seqlen_q": m, "heads": heads, "m_tiles": m_tiles, "q8": q8, "q8_row": stride, "k_centre": k_centre}
        run("quantise_q", m_tiles * batch * heads, {"q": q}, more | found)
        run("quantise_k", n_tiles * pairs, {"k": k}, keys | found | {"k8": k8, "k8_row": stride, "k_centre": k_centre})
        operands = {"q": q8.transpose(1, 2), "k": k8.transpose(1, 2), "v": v}
        if self.values:
            columns = -(-call.head_dim_v // 8) * 8
            v8 = new(batch, heads_k, n, columns, dtype=torch.float16)
            found["v_centre"], found["v_scale"] = v_centre, _ = new(pairs, self.v_width), new(pairs, self.v_width)
            largest = new(pairs, SLICES, self.v_width)
            given = keys | found | {"centre": v_centre, "largest": largest, "v8": v8, "v8_row": columns}
            run("centres", pairs * -(-self.v_width // BLOCK), {"x": v}, given, True)
            run("largest_values", pairs * SLICES, {"v": v}, given)
            tiles = max(-(-n // rows_of(self.v_width)), 1)  # without keys too, for the scales
            run("quantise_v", pairs * tiles, {"v": v}, given | {"n_tiles": tiles})
            operands["v"] = v8.transpose(1, 2)
        return operands, found


VALUES = "largest_values", "quantise_v"


class Given:
    """Of calls like one with tensors in 8 bits: e4m3 is held in fp16, and scales are spread out. It has what `Quantiser` has."""

    def __init__(self, call: Call, tile_n: int, scales: tuple[str, str, str] | None) -> None:
        self.call, self.tile_n, self.width, self.v_width = call, tile_n, call.head_dim, configs.power(call.head_dim_v)
        self.held, self.values, self.tokens = held(call.q.dtype), call.v.dtype == E4M3, scales is not None and scales[1] == "token"
        self.v_tokens = self.values and scales is not None and scales[2] in ("token", "tile")

    @property
    def flags(self) -> dict[str, object]:
        return {"EIGHT": True, "V_EIGHT": self.values, "K_TOKENS": self.tokens, "V_TOKENS": self.v_tokens}

    @property
    def parts(self) -> dict[str, int]:
        return parts(self.width)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        o = self.call.out_dtype or self.call.q.dtype
        return {"q": self.held, "k": self.held, "v": held(self.call.v.dtype), "o": o, "x": o}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, packed: Sequence[Tensor | None], run: Callable
    ) -> tuple[dict[str, Tensor], dict[str, object]]:
        call, (_, _, q_scale, k_scale, v_scale) = self.call, packed
        batch, heads_k, n_tiles = call.batch, call.heads_k, -(-call.seqlen_k // TILE)
        one = torch.ones((), dtype=torch.float32, device=q.device)

        def spread_to(scale: Tensor | None, heads: int, places: int) -> Tensor:
            scale = one if scale is None else scale
            shaped = scale if scale.dim() == 3 else scale[..., None] if scale.dim() == 2 else scale[None, None, None]
            return shaped.expand(batch, heads, places).contiguous()

        of_rows = spread_to(q_scale, call.heads_q, call.seqlen_q) * call.scale
        of_tiles = spread_to(None if self.tokens else k_scale, heads_k, n_tiles)
        found: dict[str, object] = {
            "row_factor": of_rows,
            "row_shift": torch.zeros_like(of_rows),
            "k_scale": of_tiles,
            "k_whole": of_tiles.repeat_interleave(TILE // self.tile_n, 2),
            "k_lost": spread_to(k_scale if self.tokens else torch.zeros_like(one), heads_k, call.seqlen_k),
        }
        if self.values:
            found["v_scale"] = of_v = spread_to(None if self.v_tokens else v_scale, heads_k, self.v_width)
            found["v_centre"] = torch.zeros_like(of_v)
        if self.v_tokens:
            assert v_scale is not None
            of_v = spread(v_scale, call.seqlen_k).expand(batch, heads_k, call.seqlen_k)
            of_v = torch.where(of_v.isfinite(), of_v, torch.nan)
            padded = pad(of_v.abs().nan_to_num(0.0), (0, -call.seqlen_k % TILE)).unflatten(2, (-1, TILE)).amax(3)
            found["v_units"] = units = torch.where(padded == 0.0, 1.0, padded)
            found["v_weights"] = of_v / spread(units, call.seqlen_k)
        return {name: x.to(held(x.dtype)) for name, x in (("q", q), ("k", k), ("v", v))}, found


def rows_of(width: int) -> int:
    """Of a program's tile of `width` columns."""
    return min(NUMBERS // width, TILE)


def held(dtype: torch.dtype) -> torch.dtype:
    """What the forward pass multiplies."""
    return torch.float16 if dtype == E4M3 else dtype


def parts(width: int) -> dict[str, int]:
    """`config.Parts` of which each is enough for a product of int8."""
    first, second, _ = configs.parts(width)
    first, second = max(first, LEAST_DIM), max(second, LEAST_DIM) if second else 0
    return {"DIM": first, "DIM_B": second, "CUT": (width - first) % second if second else width % first}
