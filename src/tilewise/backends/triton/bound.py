"""A call with its kernels and arguments found once, for more tensors of the same shapes, strides and dtypes."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.backends import OfInputs, philox
from tilewise.backends.tables import documents
from tilewise.backends.tables.band import band_of
from tilewise.backends.tables.keeping import kept
from tilewise.backends.tables.runs import tables
from tilewise.backends.triton import config as configs
from tilewise.backends.triton.config import ROWS, SMALL
from tilewise.backends.triton.eight_bits import Given, Quantiser
from tilewise.backends.triton.gradients import Gradients
from tilewise.backends.triton.kernels import backward, forward, scores
from tilewise.backends.triton.kernels import documents as document_kernels
from tilewise.backends.triton.launch import Kernel, interpreted, launcher, on
from tilewise.backends.triton.tape import ALIGNED, Tapes, scratch
from tilewise.backends.triton.targets import Target, multiprocessors, of_device
from tilewise.errors import check_memory
from tilewise.masks import DeviceDocuments, Documents, Mask, SlidingWindow
from tilewise.masks.mask import Plane
from tilewise.problem import Call, DecodeCall, Dropout, in_fp32

WORD = 2**32
KEPT_BYTES = 256 << 10  # of a mask's tables: a call with larger ones takes long, and is not kept
FEW_KEYS = 2048  # of a window
BY_NUMBERS = "band", "window"  # kinds of masks that kernels see as numbers for all rows
MOST_ROWS = 512  # of any program's tile
MENDERS = 2  # programs a multiprocessor, of what runs CAREFUL
OWN = "bias", "slopes", "sink", "rng", "cu_q", "cu_k", "q_scales", "k_scales", "v_scales"  # extras, as tapes name them
PARTS = ("DIM", "DIM_B", "CUT"), ("V_DIM", "V_DIM_B", "V_CUT")


class Visible:
    """Which keys each query sees, or, `by_keys`, which queries see each key, as kernels/visible.py reads it."""

    def __init__(self, call: Call, device: torch.device, config: configs.Config, by_keys: bool = False) -> None:
        mask, seqlen_q, seqlen_k = call.mask, call.seqlen_q, call.seqlen_k
        self.find, self.nbytes = None, 0
        self.arguments: dict[str, object] = dict(zip(("row0", "row1", "column0", "column1", "low", "high"), (0,) * 6, strict=True))
        self.kind = kind_of(mask)
        if self.kind in BY_NUMBERS:
            row0, row1, column0, column1, low, high = band_of(mask, seqlen_q, seqlen_k)
            turned = (column0, column1, row0, row1, -high, -low)
            self.arguments = dict(zip(self.arguments, turned if by_keys else (row0, row1, column0, column1, low, high), strict=True))
        elif self.kind == "varlen":
            assert isinstance(mask, Documents | DeviceDocuments)
            self.find = _finder(mask, seqlen_q, seqlen_k, device, by_keys)
            if isinstance(mask, Documents):
                ends = _of_documents(mask, seqlen_q, seqlen_k, device, by_keys, self.find)
                self.arguments["ends"], self.find, self.nbytes = ends, None, ends.nbytes
        else:
            planes = mask.planes(seqlen_q, seqlen_k, call.batch, call.heads_q)
            if by_keys:
                planes = tuple(Plane(plane.batch, plane.heads, plane.region.transpose()) for plane in planes)
            tiles = (config.tile_n, config.tile_m) if by_keys else (config.tile_m, config.tile_n)
            found = tables(planes, call.batch, call.heads_q, *tiles, device)
            names = "order", "spans", "runs", "bands", "bitmaps", "planes"
            self.arguments |= {name: getattr(found, name) for name in names}
            self.nbytes = sum(getattr(found, name).nbytes for name in names)

    def of(self, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> dict[str, object]:
        """The arguments of a call that has these documents."""
        if self.find is None:
            return self.arguments
        assert cu_seqlens_q is not None and cu_seqlens_k is not None
        return self.arguments | {"ends": self.find(cu_seqlens_q, cu_seqlens_k)}


def kind_of(mask: Mask) -> str:
    """How kernels see the mask: by numbers for all rows ("band", or "window" of few keys, which may have other tiles), by an interval for each
    ("varlen"), or by tables of tiles ("tiles").
    """
    if mask.kind in ("full", "band"):
        if not isinstance(mask, SlidingWindow) or mask.left is None or mask.right is None:
            return "band"
        return "window" if mask.left + mask.right < FEW_KEYS else "band"
    return "varlen" if documents.by_rows(mask) else "tiles"


def _finder(
    mask: Documents | DeviceDocuments, seqlen_q: int, seqlen_k: int, device: torch.device, by_keys: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """What finds the intervals of rows from cu_seqlens on the device."""
    inner = documents.offsets(mask.inner)
    assert inner is not None  # or `documents.by_rows` had refused the mask
    low, high, low_left, high_left = inner
    run, rows = launcher(finding(by_keys), of_device(device)), seqlen_k if by_keys else seqlen_q
    fixed = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "low": low, "high": high, "low_left": low_left, "high_left": high_left}

    def find(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
        cu_q, cu_k = documents.on_device(cu_seqlens_q, device), documents.on_device(cu_seqlens_k, device)
        count, ends = cu_q.shape[0] - 1, scratch((2, rows), torch.int32, device)
        if count and rows:
            given = {"cu_q": cu_q, "cu_k": cu_k, "ends": ends, "documents": count, "steps": count.bit_length() + 1}
            run(-(-rows // ROWS), fixed | given)
        return ends

    return find


def finding(by_keys: bool) -> Kernel:
    """The kernel of `_finder`."""
    return Kernel(document_kernels.ends_of_documents, (("KEYS", by_keys), ("TILE", ROWS)), (), SMALL)


def _of_documents(mask: Documents, seqlen_q: int, seqlen_k: int, device: torch.device, by_keys: bool, find: Callable) -> Tensor:
    """The intervals of documents with lengths that are numbers, found once and kept."""
    (plane,) = mask.planes(seqlen_q, seqlen_k)

    def make() -> Tensor:
        ends = find(*(torch.tensor(each, dtype=torch.int32, device="cpu") for each in (mask.cu_seqlens_q, mask.cu_seqlens_k)))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams may use them next
        return ends

    return kept(plane.region.memo, ("triton ends", by_keys, device), make)


class Bound:
    """See `backends.Bound`. Rows of q, k and v are contiguous. chosen: configurations of passes by name, in place of the table's (tune.py).
    target: in place of the device's own. begin: takes it before it compiles anything.
    """

    def __init__(
        self,
        call: Call,
        chosen: Mapping[str, configs.Config] | None = None,
        target: Target | None = None,
        begin: Callable[["Bound"], None] = lambda _: None,
    ) -> None:
        self.target, self.chosen = target or of_device(call.q.device), chosen or {}
        self.like = replace(
            call,
            bias=None,
            alibi_slopes=None,
            sink=None,
            out=None,
            q_scale=None,
            k_scale=None,
            v_scale=None,
            **{name: _on_meta(getattr(call, name)) for name in "qkv"},
        )
        self.device, self.batch, self.heads = call.q.device, call.batch, call.heads_q
        self.flags = _flags(call)
        self.weight: configs.Weight = configs.weight_of(call)
        typed = {"q": call.q, "bias": call.bias, "d_bias": call.bias, "sink": call.sink}
        dtypes = {name: x.dtype for name, x in typed.items() if x is not None}
        dtypes |= {"d_k": torch.float32, "d_v": torch.float32} if call.wide_keys else {}
        self.strided = all(wide(x) for x in (call.q, call.k, call.v))
        self.dims = call.head_dim, call.head_dim_v
        self.config = self.config_of("forward")
        self.quantiser: Quantiser | Given | None = None
        if call.problem.eight_bits:
            tile_n = self.config.tile_n
            self.quantiser = Given(self.like, tile_n, call.scales) if call.precision is None else Quantiser(self.like, tile_n)
            self.dims, self.strided = (self.quantiser.width, call.head_dim_v), True
            self.flags, dtypes = self.flags | self.quantiser.flags, dtypes | self.quantiser.dtypes
        self.dtypes = tuple(dtypes.items())
        self.biased = self.of_bias(call.bias)  # as long as others begin at such addresses, too
        self.scores = {
            "scale": call.scale if self.quantiser is None else 1.0,
            "softcap": in_fp32(call.softcap),
            "shift": call.seqlen_k - call.seqlen_q,
        }
        if call.diagonal is not None:
            self.scores["diagonals"] = call.diagonal.to(torch.int32)
        begin(self)
        self.visible = Visible(call, self.device, self.config)
        self.back: Gradients | None = None
        self.launchers: dict[tuple, Callable] = {}  # by what `run` was asked for
        self.tapes = Tapes()

    def config_of(self, purpose: str, mask: str = "") -> configs.Config:
        """Of one pass. mask: in place of the call's, as `kind_of` has it."""
        kind = mask or kind_of(self.like.mask)
        return self.chosen.get(purpose) or configs.config_of_call(self.target, purpose, self.like, self.weight, kind)

    @property
    def kept(self) -> bool:
        """Not where the call depends on what tensors hold, or its mask's tables are large."""
        reads = self.like.diagonal is not None or (isinstance(self.like.mask, DeviceDocuments) and self.visible.find is None)
        return not reads and self.visible.nbytes <= KEPT_BYTES

    def kernels(self, purpose: str, mask: str = "") -> list[Kernel]:
        """What a pass launches, "forward", "dkdv" or "dq": its kernel, and once more CAREFUL. mask: in place of the call's, as `kind_of` has it."""
        function = {"forward": forward.forward, "dkdv": backward.dkdv, "dq": backward.dq}[purpose]
        more = {"SINK": any(name == "sink" for name, _ in self.dtypes), **self.wanted, **self.biased}
        config, mask = self.config_of(purpose, mask), mask or self.visible.kind
        return [
            self.kernel(function, config, mask, True, more),
            self.kernel(function, once(config), mask, True, {**more, "CAREFUL": True}),
        ]

    def preparing(self, d_lse: bool) -> Kernel:
        """What gradients begin with; d_lse: whether one of LSE is given."""
        sink = any(name == "sink" for name, _ in self.dtypes)
        return self.kernel(backward.prepare, SMALL, "", True, {"D_LSE": d_lse, "SINK": sink})

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor | None, ...], with_lse: bool, heads_first: bool = False
    ) -> tuple[Tensor, Tensor]:
        """O and LSE."""
        shape = self.batch, self.like.seqlen_q, self.heads, self.like.head_dim_v
        if heads_first:
            batch, seqlen, heads, dim = shape
            o = torch.empty((batch, heads, seqlen, dim), dtype=self.like.out_dtype or q.dtype, device=q.device).transpose(1, 2)
        else:
            o = torch.empty(shape, dtype=self.like.out_dtype or q.dtype, device=q.device)
        return self._forward(q, k, v, o, extras)[:2]

    def results(self, call: Call) -> tuple[Tensor, ...]:
        """As `Backend.forward`, of the bound call itself."""
        shape = self.batch, self.like.seqlen_q, self.heads, self.like.head_dim_v
        o = torch.empty(shape, dtype=call.out_dtype or call.q.dtype, device=call.q.device) if call.out is None else call.out
        o, lse, row_max = self._forward(call.q, call.k, call.v, o, call.extras)
        return (o, lse) if row_max is None else (o, lse, row_max)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, extras: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """O, LSE and, where the call wants it, each row's largest score."""
        seqlen_q = self.like.seqlen_q
        shape, tiles = (self.batch, self.heads, seqlen_q), -(-seqlen_q // self.config.tile_m)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        row_max = torch.empty_like(lse) if self.like.row_max else None
        if not self.batch * self.heads * tiles:
            return o, lse, row_max
        written = {"o": o, "lse": lse, "row_max": row_max}
        with on(self.device):
            self.tapes.run(
                ("forward", o.stride()),
                {"q": q, "k": k, "v": v, **written, **self.of_extras(extras)},
                self.visible.arguments.values(),
                lambda: self._attend(q, k, v, written, tiles, extras),
            )
        return o, lse, row_max

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, written: Mapping, tiles: int, extras: tuple[Tensor | None, ...]) -> None:
        """Launch all of the forward pass."""
        bias, slopes, sink, rng, *packed = extras
        check_memory(q=q, k=k, v=v, bias=bias, alibi_slopes=slopes, sink=sink)
        operands, more, o = {"q": q, "k": k, "v": v}, {}, written["o"]
        sizes = {"seqlen_q": self.like.seqlen_q, "seqlen_k": self.like.seqlen_k, "heads": self.heads, "m_tiles": tiles}
        if self.quantiser is not None:
            operands, more = self.quantiser(q, k, v, packed, self.small)
        found = self.arguments(operands | {"o": o}, bias, slopes, rng)
        arguments = {**found, **written, **sizes, "sink": sink, **more, **self.visible.of(*packed[:2])}
        more = self.wanted | self.of_bias(bias)
        self.twice(forward.forward, self.config, self.visible, operands | {"o": o}, SINK=sink is not None, **more)(
            tiles * self.batch * self.heads, arguments
        )

    @property
    def wanted(self) -> dict[str, object]:
        """Constants of the forward pass other than those of all kernels."""
        return {"ROW_MAX": self.like.row_max}

    def small(
        self, name: str, programs: int, operands: Mapping[str, Tensor], arguments: Mapping[str, object], of_values: bool = False
    ) -> None:
        """Launch one of the quantiser's kernels for tensors that lie as these do."""
        if not programs:
            return
        assert isinstance(self.quantiser, Quantiser)
        found = dict(arguments)
        for each, x in operands.items():
            found[each] = x
            found[f"{each}_batch"], found[f"{each}_row"], found[f"{each}_head"], _ = x.stride()
        aligned = all(x.data_ptr() % ALIGNED == 0 and wide(x) for x in operands.values())
        key = name, aligned, of_values
        if key not in self.launchers:
            self.launchers[key] = launcher(self.quantiser.kernel(name, aligned, of_values), self.target)
        self.launchers[key](programs, found)

    def twice(
        self, function: Callable, config: configs.Config, visible: Visible, operands: Mapping[str, Tensor], **more: object
    ) -> Callable[[int, Mapping], None]:
        """What launches a kernel that has products with values that a mask may hide, and then mends its results (careful.py)."""
        run = self.run(function, config, visible.kind, operands, **more)
        mend = self.run(function, once(config), visible.kind, operands, **more, CAREFUL=True)

        def both(programs: int, arguments: Mapping) -> None:
            arguments = {**arguments, "tiles": programs, "spoils": scratch((programs,), torch.int32, self.device)}
            run(programs, arguments)
            mend(min(programs, MENDERS * multiprocessors(self.device) - 1), arguments)  # odd: or some had the longest tile of each head

        return both

    @functools.cached_property
    def widths(self) -> dict[str, int]:
        """head_dim_v in one tile, and how many columns exist of it."""
        width = configs.power(self.dims[1])
        return {"V_WIDTH": width, "V_COLUMNS": self.dims[1] % width}

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        d_o: Tensor,
        d_lse: Tensor | None,
        extras: tuple[Tensor | None, ...],
        bias_grad: bool,
    ) -> OfInputs:
        """dQ, dK, dV, dBias and dSink from what `forward` returned, dO and dLSE."""
        if self.back is None:
            keys = Visible(self.like, self.device, self.config_of("dkdv"), by_keys=True)
            self.back = Gradients(self, keys, Visible(self.like, self.device, self.config_of("dq")))
        return self.back(q, k, v, o, lse, d_o, d_lse, extras, bias_grad)

    def arguments(
        self, operands: Mapping[str, Tensor], bias: Tensor | None, slopes: Tensor | None, rng: Tensor | None
    ) -> dict[str, object]:
        """What all kernels take: tensors and their strides, and what becomes of scores."""
        found: dict[str, object] = dict(self.scores)
        for name, x in operands.items():
            found[name] = x
            found[f"{name}_batch"], found[f"{name}_row"], found[f"{name}_head"], _ = x.stride()
        if bias is not None:
            steps = [0 if size == 1 else step for size, step in zip(bias.shape, bias.stride(), strict=True)]
            found["bias"] = bias
            found["bias_batch"], found["bias_head"], found["bias_row"], found["bias_column"] = steps
        if slopes is not None:
            found["slopes"] = slopes = slopes.contiguous()
            found["slopes_batch"] = 0 if slopes.shape[0] == 1 else self.heads
        return found | self.drawn | self.random(rng)

    def of_bias(self, bias: Tensor | None) -> dict[str, int]:
        """A constant of kernels that read a bias, where 16 keys of it lie together and begin at a multiple of 16 bytes: one load takes several."""
        if bias is None or bias.shape[3] % 16 or bias.stride(3) != 1 or bias.data_ptr() % ALIGNED:
            return {}
        steps = (step for size, step in zip(bias.shape[:3], bias.stride(), strict=False) if size > 1)
        return {} if any(step % 16 for step in steps) else {"bias_column": 1}

    def random(self, rng: Tensor | None) -> dict[str, object]:
        """Dropout as the kernels take it."""
        dropout = self.like.dropout
        return _NOT_DROPPED if dropout is None else _drawn(dropout if rng is None else dropout.drawn_by(rng))

    def of_extras(self, extras: tuple[Tensor | None, ...]) -> Mapping[str, object]:
        """What is a call's own other than q, k, v and the results, for `Tapes.run`."""
        found = {name: x for name, x in zip(OWN, extras, strict=True) if x is not None}
        rng = found.pop("rng", None)
        return found if self.like.dropout is None else found | self.random(rng)

    @property
    def drawn(self) -> dict[str, object]:
        """Where rows and heads are counted in a larger call (`Dropout.part`), made by the current stream each time."""
        dropout = self.like.dropout
        if dropout is None or (rows := dropout.rows(self.device)) is None:
            return {}
        first, every = dropout.heads(self.heads)
        return {"drawn": pad(rows, (0, -len(rows) % MOST_ROWS)).to(torch.int32), "every": every, "first_head": first}

    def run(self, function: Callable, config: configs.Config, mask: str, operands: Mapping[str, Tensor], **more: object) -> Callable:
        """What launches the kernel for tensors that lie as these do."""
        aligned = self.strided and all(x.data_ptr() % ALIGNED == 0 and wide(x) for x in operands.values())
        key = function, config, mask, aligned, *more.items()
        if key not in self.launchers:
            self.launchers[key] = launcher(self.kernel(function, config, mask, aligned, more), self.target)
        return self.launchers[key]

    def kernel(self, function: Callable, config: configs.Config, mask: str, aligned: bool, more: Mapping[str, object]) -> Kernel:
        """The kernel with the constants that it has of these."""
        mask = "band" if mask in BY_NUMBERS else mask
        tiles = {"TILE_M": config.tile_m, "TILE_N": config.tile_n, "STAGES": config.stages}
        constants: dict[str, object] = {**self.flags, "CAREFUL": False, "MASK": mask, **tiles, **self.widths, **more}
        for names, dim in zip(PARTS, self.dims, strict=True):
            constants |= dict(zip(names, configs.parts(dim, halves=bool(constants["CAREFUL"])), strict=True))
        if self.quantiser is not None:
            constants |= self.quantiser.parts
        config = config if aligned else config._replace(registers=0)  # addresses of single elements take more
        narrow = self.like.q.dtype.itemsize < 4
        constants |= {"BF16_PARTS": not narrow and self.target.nvidia, "EMULATED": interpreted()}
        given = tuple((name, constants[name]) for name in function.arg_names if name in constants)
        return Kernel(function, given, self.dtypes, config, aligned)


def once(config: configs.Config) -> configs.Config:
    """The tiles of a pass for what it does CAREFUL: seldom, so that nothing has to be loaded ahead."""
    return config._replace(stages=1, registers=0)


def softcap_of(call: Call | DecodeCall) -> bool | int:
    """The kernels' constant SOFTCAP."""
    return call.softcap > 0.0 and (scores.STEEP.value if call.q.dtype == torch.float32 else True)


def _flags(call: Call) -> dict[str, object]:
    """The constants that say what becomes of scores."""
    flags: dict[str, object] = {"SOFTCAP": softcap_of(call), "BIAS": call.bias is not None, "ALIBI": call.alibi_slopes is not None}
    return flags | {
        "MODIFIED": any(flags.values()) or call.scale <= 0.0,  # a plain score is scaled in the exponent, where 0 * -inf is NaN
        "DIAGONALS": call.diagonal is not None,
        "DROPOUT": call.dropout is not None,
        "PARTED": call.dropout is not None and call.dropout.part is not None,
        "GROUP": call.group,
        "EIGHT": False,
        "V_EIGHT": False,
        "K_TOKENS": False,
        "V_TOKENS": False,
    }


_NOT_DROPPED: dict[str, object] = {"keep_scale": 1.0}


def _drawn(dropout: Dropout) -> dict[str, object]:
    """Dropout as the kernels take it: seed in 64 bits with a sign."""
    seed = dropout.seed % 2**64
    return {
        "seed": seed - 2**64 if seed >= 2**63 else seed,
        "offset": dropout.offset % WORD,
        "threshold": min(philox.threshold(dropout.p), WORD - 1),
        "keep_scale": philox.keep_scale(dropout.p),
    }


def wide(x: Tensor) -> bool:
    """Whether rows of x begin at multiples of 16 bytes, if it does."""
    return all(step * x.element_size() % ALIGNED == 0 for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
