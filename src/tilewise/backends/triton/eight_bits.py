"""What becomes of q, k and v before the forward pass multiplies them in 8 bits: five small kernels, which read nothing on the host."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.eight_bits import E4M3, INT8, MOST, RECIPES, TILE, counted
from tilewise.backends.tables import documents
from tilewise.backends.triton import config as configs
from tilewise.backends.triton.kernels import eight_bits as kernels
from tilewise.backends.triton.launch import Kernel
from tilewise.masks import Unread
from tilewise.problem import Call

NUMBERS = 8192  # of a program's tile
LEAST_DIM = 32  # that a product of int8 takes
SLICES = 16  # of V, whose channels' largest numbers are found apart
BLOCK = 64  # channels of a program that finds a centre
EXACT = configs.Config(BLOCK, BLOCK, 4, 1, fused=False)  # of small kernels whose every operation is rounded


class Quantiser:
    """Of calls like one with `precision`."""

    def __init__(self, call: Call, tile_n: int) -> None:
        self.call, self.tile_n, recipe = call, tile_n, RECIPES[call.precision]
        self.most, self.held = MOST[recipe.qk], INT8 if recipe.qk == INT8 else torch.float16
        self.values = recipe.pv == E4M3
        self.width = 1 << (call.head_dim - 1).bit_length()
        self.v_width = configs.power(call.head_dim_v)
        self.unread = isinstance(call.mask, Unread)
        self.tokens = 0 if self.unread else counted(call)
        self.numbers = {"scale": call.scale, "factor": call.scale / self.width}

    @property
    def flags(self) -> dict[str, object]:
        """The forward pass's constants."""
        return {"EIGHT": True, "V_EIGHT": self.values}

    @property
    def parts(self) -> dict[str, int]:
        """Of a head_dim that is less than products of int8 take: `config.Parts` of one that they do."""
        return {"DIM": LEAST_DIM, "DIM_B": 0, "CUT": self.width} if self.width < LEAST_DIM else {}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of the tensors that it is given."""
        call = self.call
        return {"q": self.held, "k": self.held, "v": torch.float16 if self.values else call.v.dtype, "o": call.q.dtype, "x": call.q.dtype}

    def kernels(self) -> dict[str, Kernel]:
        """Its kernels, for tensors that lie at multiples of 16 bytes."""
        return {name: self.kernel(name, True) for name in ("centres", "quantise_q", "quantise_k", *VALUES[: 2 * self.values])}

    def kernel(self, name: str, aligned: bool, of_values: bool = False) -> Kernel:
        """of_values: where centres are V's."""
        call, width = self.call, self.v_width if of_values or name in VALUES else self.width
        rows = max(1, NUMBERS // width)
        constants = {
            "ENDS": self.unread,
            "GROUP": call.group,
            "WIDTH": width,
            "COLUMNS": call.head_dim_v if of_values or name in VALUES else call.head_dim,
            "BLOCK": min(BLOCK, width),
            "SLICES": SLICES,
            "MOST_OF": self.most,
            "TILE_N": self.tile_n,
            "ROWS": min(rows, self.tile_n) if name == "quantise_k" else min(rows, TILE),
        }
        function = getattr(kernels, name)
        given = tuple((each, constants[each]) for each in function.arg_names if each in constants)
        dtypes = dict.fromkeys(("q", "k", "v", "x"), call.q.dtype) | {"q8": self.held, "k8": self.held, "v8": torch.float16}
        return Kernel(function, given, tuple(dtypes.items()), EXACT, aligned)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor | None, run: Callable
    ) -> tuple[dict[str, Tensor], dict[str, object]]:
        """The forward pass's operands and its other arguments. run: launches a kernel by its name, as `Bound.small` does."""
        call, fp32, device = self.call, torch.float32, q.device
        batch, heads, heads_k, m, n = call.batch, call.heads_q, call.heads_k, call.seqlen_q, call.seqlen_k
        n_tiles, stride = -(-n // TILE), max(configs.LEAST_DIM, self.width)

        def new(*shape: int, dtype: torch.dtype = fp32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        keys: dict[str, object] = {"tokens": self.tokens, "seqlen_k": n, "heads": heads_k, "n_tiles": n_tiles}
        if self.unread:
            keys["cu_k"] = cu_k = documents.on_device(cu_seqlens_k, device)
            keys["documents"] = cu_k.shape[0] - 1
        pairs = batch * heads_k
        q8, k8 = new(batch, heads, m, stride, dtype=self.held), new(batch, heads_k, n, stride, dtype=self.held)
        found = {
            "row_factor": new(batch, heads, m),
            "row_shift": new(batch, heads, m),
            "k_scale": new(pairs, n_tiles),
            "k_whole": new(pairs, n_tiles * (TILE // self.tile_n)),
            "k_lost": new(pairs, n),
        }
        k_centre = new(pairs, self.width)
        blocks = -(-self.width // BLOCK)
        run("centres", pairs * blocks, {"x": k}, keys | {"centre": k_centre})
        of_q = self.kernel("quantise_q", True)
        rows = dict(of_q.constants)["ROWS"]
        m_tiles = -(-m // rows)
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
            tiles = -(-max(n, 1) // min(TILE, NUMBERS // self.v_width))
            run("quantise_v", pairs * tiles, {"v": v}, given | {"n_tiles": tiles})
            operands["v"] = v8.transpose(1, 2)
        return operands, found


VALUES = "largest_values", "quantise_v"
