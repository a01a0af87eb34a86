"""Decode seen from torch: what the kernels cover, and calls with their kernels and scalars found once.

Keys are shared out by the number of multiprocessors and by shapes; how many a sequence has, its programs find on the device.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tilewise.backends.tables.window import window_of
from tilewise.backends.triton import config as configs
from tilewise.backends.triton import helpers, merging
from tilewise.backends.triton.bound import PARTS, on, softcap_of, wide
from tilewise.backends.triton.kernels import decode as kernels
from tilewise.backends.triton.launch import Kernel, launcher
from tilewise.backends.triton.tape import ALIGNED, Tapes, scratch
from tilewise.backends.triton.targets import Target, interpreted, multiprocessors, of_device
from tilewise.errors import EIGHT_BITS, check_memory
from tilewise.problem import DecodeCall, DecodeTensors, Share, in_fp32

DTYPES = torch.float32, torch.bfloat16, torch.float16
LEAST_KEYS = 256  # of a part, where a split is not given
PER_MULTIPROCESSOR = 2  # programs that there are parts for
IN_TURNS = 12  # where sequences alone are as many, so that the last turn leaves few multiprocessors without one
SEQUENCES = 128, 1024  # at most, of which each program reads all lengths; there is a kernel for either
FEW_QUERIES = 16  # of a sequence, of which long sequences have parts though all sequences fill the GPU
MOST_BYTES = 1 << 30  # of parts, with a split
MOST_OF_FEW = 1 << 27  # bytes of two parts, where sequences fill the GPU without any
READ = DecodeTensors.getter(
    "q", "k_cache", "v_cache", "page_table", "cu_seqlens_q", "cache_batch_idx", "leftpad", "tree", "alibi_slopes", "sink", "k_scale", "v_scale",
    "rotary_cos", "rotary_sin",
)  # fmt: skip


def why_not(call: DecodeCall) -> list[str]:
    """Sentences that say why the kernels do not cover the call; empty where they do."""
    dtype, cached = call.q.dtype, {call.k_cache.dtype, call.v_cache.dtype}
    dims, reasons = (call.q.shape[-1], call.v_cache.shape[3]), []
    if not configs.decodes(dtype, *dims):
        reasons.append(f"it does not take head_dim {dims[0]} with head_dim_v {dims[1]} in {dtype}")
    if dtype not in DTYPES or not (cached == {dtype} or cached <= set(EIGHT_BITS)):
        reasons.append(f"it takes fp32, bf16 and fp16, and caches of q's dtype or of 8 bits, not {dtype}, {cached}")
    if window_of(call.mask) is None:
        reasons.append(f"it takes masks of one band on the bottom right diagonal, not {call.mask}")
    if call.cache_batch_idx is not None and call.page_table is not None:
        reasons.append("it takes cache_batch_idx or page_table, not both")
    if call.rotary is not None and not {call.rotary.cos.dtype, call.rotary.sin.dtype} <= set(DTYPES):
        reasons.append(f"it takes rotary tables in fp32, bf16 and fp16, not {call.rotary.cos.dtype} and {call.rotary.sin.dtype}")
    if call.rotary is not None and 0 in call.rotary.cos.shape:
        reasons.append("a rotary table is empty")
    if not reasons and call.split is not None and (size := Shares(call).bytes) > MOST_BYTES:
        reasons.append(f"with a split of {call.split} keys it would keep {size >> 20} MB of parts, more than {MOST_BYTES >> 20}")
    return reasons


class Shares:
    """How a call's rows and keys are shared out: found without looking at any length. most: keys, where fewer than the cache has room for count;
    target: a GPU other than the call's.
    """

    def __init__(self, call: DecodeCall, most: int | None = None, target: Target | None = None) -> None:
        q, self.batch, self.heads_k = call.q, call.seqlens.shape[0], call.k_cache.shape[2]
        self.target, self.ragged = target or of_device(q.device), call.cu_seqlens_q is not None
        self.heads, self.seqlen_q = q.shape[-2], q.shape[0 if self.ragged else 1]
        self.group = max(self.heads // max(self.heads_k, 1), 1)
        pages = 1 if call.page_table is None else call.page_table.shape[1]
        self.capacity = 0 if 0 in call.k_cache.shape else call.k_cache.shape[1] * pages
        rows = self.group * (1 if self.ragged and call.split is not None else self.queries())
        dims, cached = (q.shape[-1], call.v_cache.shape[3]), call.k_cache.dtype
        one_kernel = self.ragged and call.split is not None  # one set of bits, whatever the number of queries
        self.several = call.max_seqlen_q > 1 or call.tree is not None or one_kernel
        config = configs.config_of_decode(self.target, rows, q.dtype, cached, *dims)
        self.config = config._replace(fused=call.rotary is None)  # torch rotates with products and sums rounded one by one
        tiles = self.seqlen_q * self.group // self.config.tile_m + self.batch + 1
        self.m_tiles = tiles if self.ragged else -(-self.seqlen_q * self.group // self.config.tile_m)
        self.tiles = self.m_tiles * (1 if self.ragged else self.batch)
        self.rows = (self.seqlen_q if self.ragged else self.batch * self.seqlen_q) * self.heads
        self.sequences = 0  # parts by length, for at most so many
        if call.split is not None:
            self.piece = -(-max(call.split, 1) // self.config.tile_n) * self.config.tile_n
            self.splits = max(-(-self.capacity // self.piece), 1)
        else:
            self.piece, pieces = LEAST_KEYS, -(-(self.capacity if most is None else min(most, self.capacity)) // LEAST_KEYS)
            programs, most_programs = max(self.tiles * self.heads_k, 1), PER_MULTIPROCESSOR * multiprocessors(q.device)
            by_length = pieces > 1 < self.batch and not self.ragged and call.share is None
            few = self.seqlen_q <= FEW_QUERIES and 2 * self.rows * (dims[1] + 1) * 4 <= MOST_OF_FEW
            if by_length and few and programs >= most_programs and max(dims) <= configs.MOST_DIM:
                most_programs = IN_TURNS * multiprocessors(q.device)
            self.splits = max(min(most_programs // programs, pieces), 1)
            if by_length and (few or self.splits > 1):
                self.sequences = next((most for most in SEQUENCES if self.batch <= most), 0)
        self.bytes = self.splits * self.rows * (call.v_cache.shape[3] + 1) * 4 if self.splits > 1 else 0

    def queries(self) -> int:
        """Of a sequence, on average where they are packed."""
        return max(-(-self.seqlen_q // max(self.batch, 1)), 1) if self.ragged else max(self.seqlen_q, 1)


class Decoder:
    """Calls of one launch, or two, as `Backend.bind_decode` has them. prefix: its keys are behind those of an earlier launch (prefix.py), and it adds
    up the parts of both; parts: it writes parts alone.
    """

    def __init__(self, call: DecodeCall, shares: Shares | None = None, prefix: bool = False, parts: bool = False) -> None:
        self.shares, self.prefix, self.parts = shares or Shares(call), prefix, parts
        self.target, self.device = self.shares.target, call.q.device
        self.sequences = 0 if prefix or parts else self.shares.sequences
        self.split = self.shares.splits > 1 or prefix or parts or self.sequences > 0
        self._launchers: dict[tuple[bool, bool], Callable] = {}
        self.tapes = Tapes()
        self.dtype, self.dim_v, self.out_dtype = call.q.dtype, call.v_cache.shape[3], call.out_dtype or call.q.dtype
        self.shape = (*call.q.shape[:-1], self.dim_v)
        shares, window, page_size = self.shares, window_of(call.mask), call.k_cache.shape[1]
        assert window is not None  # or `why_not` had said so
        self.numbers = {
            "batch": shares.batch, "seqlen_q": shares.seqlen_q, "heads": shares.heads, "heads_k": shares.heads_k, "m_tiles": shares.m_tiles,
            "steps": (shares.batch + 1).bit_length() + 1, "capacity": shares.capacity, "page_size": page_size, "splits": shares.splits,
            "piece": shares.piece, "low": window.lo, "high": window.hi, "scale": call.scale, "softcap": in_fp32(call.softcap),
            "rows_of_all": shares.rows, "o_row": self.dim_v, "lse_batch": shares.heads * shares.seqlen_q, "lse_head": shares.seqlen_q,
            "entries": call.k_cache.shape[0], "prefix": call.shared_prefix,
        }  # fmt: skip
        self.stored = tuple(self._stored(x.dtype) for x in (call.k_cache, call.v_cache))
        self.constants = self._constants(call)
        cos, sin, _ = call.rotary or (None, None, None)
        typed = {"lengths": call.seqlens, "starts": call.cu_seqlens_q, "pages": call.page_table, "entry_of": call.cache_batch_idx,
                 "leftpad": call.leftpad, "cos": cos, "sin": sin}  # fmt: skip
        stored = {"k_cache": self.stored[0], "v_cache": self.stored[1], "o": self.out_dtype, "q": self.dtype, "sink": torch.float32}
        self.latent = self._latent({"k_cache": call.k_cache, "v_cache": call.v_cache})  # of the call that it is made for
        self.dtypes = tuple((stored | {name: x.dtype for name, x in typed.items() if x is not None}).items())

    def begin(self) -> "Decoder":
        """Have its kernels compiled side by side."""
        if self.split and not self.parts:
            kind = tuple(self.constants.items()), self.dtypes, self.shares.config, self.latent
            helpers.begin(kind, lambda: [self.kernel(True, self.latent), self.merge()], self.target)
        return self

    def merge(self) -> Kernel:
        """The kernel that puts its parts together; torch's memory begins where wide loads can."""
        return merging.kernel(self.dim_v, self.out_dtype, self.dim_v % merging.MULTIPLE == 0, self.sequences > 0)

    def _constants(self, call: DecodeCall) -> dict[str, object]:
        shares, config = self.shares, self.shares.config
        bits = ["" if x.dtype == self.dtype else "own" if x.dtype == stored else "e4m3"
                for x, stored in zip((call.k_cache, call.v_cache), self.stored, strict=True)]  # fmt: skip
        scaled = ["" if x is None else "token" if x.dim() == 3 else "head" for x in (call.k_scale, call.v_scale)]
        changes = {"SOFTCAP": softcap_of(call), "ALIBI": call.alibi_slopes is not None}
        constants = {
            "RAGGED": shares.ragged, "SPLIT": self.split, "SEQUENCES": self.sequences, "JOINS": self.prefix,
            "FIXED": call.split is not None, "ENTRIES": call.cache_batch_idx is not None,
            "PAGES": "" if call.page_table is None else "row" if call.k_cache.shape[1] % config.tile_n else "tile",
            "SEVERAL": shares.several,
            "LEFTPAD": call.leftpad is not None, "TREE": call.tree is not None,
            "K_BITS": bits[0], "V_BITS": bits[1], "K_SCALE": scaled[0], "V_SCALE": scaled[1],
            "ROTARY": "" if call.rotary is None else "interleaved" if call.rotary.interleaved else "half",
            "MODIFIED": any(changes.values()) or call.scale <= 0.0,  # as in the forward pass
            "SINK": call.sink is not None, "GROUP": shares.group, "TILE_M": config.tile_m, "TILE_N": config.tile_n,
            "BF16_PARTS": self.dtype == torch.float32 and self.target.nvidia, "EMULATED": interpreted(), **changes, **ranks(call.share),
        }  # fmt: skip
        for names, dim in zip(PARTS, (call.q.shape[-1], self.dim_v), strict=True):
            constants |= dict(zip(names, configs.parts(dim), strict=True))
        return constants

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        """What elements are in memory, as the GPU's own instructions know them."""
        return torch.int8 if dtype == torch.float8_e4m3fn and not self.target.knows_e4m3 else dtype

    def __call__(
        self,
        given: tuple,
        seqlens: Tensor,
        out: Tensor | None = None,
        with_lse: bool = True,
        joined: tuple[Tensor, Tensor, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """O and LSE, contiguous. joined: partial O and LSE, and how many of the first are there already."""
        shares = self.shares
        o = out if out is not None and out.is_contiguous() else torch.empty(self.shape, dtype=self.out_dtype, device=self.device)
        shape = (shares.heads, shares.seqlen_q) if shares.ragged else (shares.batch, shares.heads, shares.seqlen_q)
        lse = torch.empty(shape, dtype=torch.float32, device=self.device)
        if lse.numel() == 0:
            return o, lse
        operands, whole = self._operands(given, seqlens), {"o": o, "lse": lse}
        made = {} if joined is None else {"partial_o": joined[0], "partial_lse": joined[1]}
        behind = {} if joined is None else {"behind": joined[0][joined[2] :], "lse_behind": joined[1][joined[2] :]}
        with on(self.device):
            key, tensors = (joined is None, self._latent(operands)), {**operands, **whole, **made, **behind}
            self.tapes.run(key, tensors, (), lambda: self._launch(operands, whole, joined))
        return o, lse

    def partials(self, parts: int, rows: int) -> tuple[Tensor, Tensor]:
        """Memory for O and LSE of `rows` rows over `parts` parts of the keys, in fp32."""
        shapes = (parts, rows, self.dim_v), (parts, rows)
        found = [scratch(shape, torch.float32, self.device) for shape in shapes]
        return found[0], found[1]

    def attend(self, given: tuple, seqlens: Tensor, partial_o: Tensor, partial_lse: Tensor) -> None:
        """Write the parts alone."""
        operands, written = self._operands(given, seqlens), {"partial_o": partial_o, "partial_lse": partial_lse}
        written |= {"o": partial_o, "lse": partial_lse}
        with on(self.device):
            self.tapes.run(("parts", self._latent(operands)), operands | written, (), lambda: self._attend(operands, written))

    def _launch(
        self, operands: Mapping[str, Tensor | None], whole: Mapping[str, Tensor], joined: tuple[Tensor, Tensor, int] | None
    ) -> None:
        """Launch all of a call."""
        if not self.split:
            self._attend(operands, whole)
            return
        shares, counted = self.shares, {}
        if self.sequences:
            partial_o, partial_lse = self.partials((shares.splits + 1) * shares.batch, shares.rows // shares.batch)
            there, counted = 0, {"parts_of": scratch((shares.batch, 2), torch.int32, self.device)}
        else:
            partial_o, partial_lse, there = joined or (*self.partials(shares.splits, shares.rows), 0)
        self._attend(operands, {**whole, "partial_o": partial_o[there:], "partial_lse": partial_lse[there:], **counted})
        merging.merge(partial_o, partial_lse, whole["o"], whole["lse"], **counted)

    def _operands(self, given: tuple, seqlens: Tensor) -> dict[str, Tensor | None]:
        """A call's tensors by the names that kernels have for them, as these read them; copies only of what lies otherwise."""
        q, k, v, pages, starts, entry_of, leftpad, tree, slopes, sink, k_scale, v_scale, cos, sin = READ(given)
        assert q is not None and k is not None and v is not None
        check_memory(q=q, k_cache=k, v_cache=v, alibi_slopes=slopes, sink=sink)
        q, k, v = map(in_rows, (q, k, v))
        k, v = (x if x.dtype == stored else x.view(stored) for x, stored in zip((k, v), self.stored, strict=True))
        found = {"q": q, "k_cache": k, "v_cache": v, "lengths": seqlens.contiguous(), "k_scale": k_scale, "v_scale": v_scale}
        found |= {
            name: None if x is None else x.contiguous() for name, x in (("starts", starts), ("entry_of", entry_of), ("leftpad", leftpad))
        }
        found |= {name: None if x is None else in_rows(x) for name, x in (("pages", pages), ("cos", cos), ("sin", sin))}
        found |= {name: None if x is None else x.float().contiguous() for name, x in (("slopes", slopes), ("sink", sink))}
        return found | {"tree": None if tree is None else tree.contiguous().view(torch.int8)}

    def _attend(self, operands: Mapping[str, Tensor | None], written: Mapping[str, Tensor]) -> None:
        """Launch `kernels.decode`."""
        q, k, v, pages, tree, slopes, cos, sin = (
            operands[name] for name in ("q", "k_cache", "v_cache", "pages", "tree", "slopes", "cos", "sin")
        )
        assert q is not None and k is not None and v is not None
        shares, arguments = self.shares, {**self.numbers, **operands, **written}
        arguments |= strides("q", q[None] if shares.ragged else q, "batch", "row", "head")
        for name, x in (("k_cache", k), ("v_cache", v)):
            arguments |= strides(name, x, "page", "row", "head")
        if pages is not None:
            arguments["pages_batch"] = pages.stride(0)
        if tree is not None:
            new = tree.shape[1]
            arguments |= {"tree_batch": 0 if tree.shape[0] == 1 else new * new, "new": new}
        if slopes is not None:
            arguments["slopes_batch"] = 0 if slopes.shape[0] == 1 else shares.heads
        for name in ("k", "v"):
            if (x := operands[f"{name}_scale"]) is not None:
                arguments |= strides(f"scale_{name}", self._spread(x), "page", "row", "head")
        if cos is not None and sin is not None:
            arguments |= tables(cos, sin)
        kind = all(x.data_ptr() % ALIGNED == 0 and wide(x) for x in (q, k, v, written["o"])), self._latent(operands)
        if kind not in self._launchers:
            self._launchers[kind] = launcher(self.kernel(*kind), self.target)
        tiles = shares.m_tiles * shares.batch * (shares.splits + 1) if self.sequences else shares.tiles * shares.splits
        self._launchers[kind](tiles * shares.heads_k, arguments)

    def _spread(self, scale: Tensor) -> Tensor:
        """(entries, places, heads), or of each sequence's heads (batch, 1, heads)."""
        return scale if scale.dim() == 3 else scale.expand(self.shares.batch, self.shares.heads_k)[:, None]

    def _latent(self, operands: Mapping[str, Tensor | None]) -> bool:
        """Whether values are the first columns of keys, which are read once then: of 16 bits, one query, and all of them one part of a key."""
        k, v = operands["k_cache"], operands["v_cache"]
        assert k is not None and v is not None
        if not self.target.nvidia or self.shares.several or self.constants["DIM"] != self.dim_v or self.constants["DIM_B"] == 0:
            return False
        return k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.dtype == v.dtype == self.dtype != torch.float32

    def kernel(self, aligned: bool, latent: bool = False) -> Kernel:
        """`kernels.decode` with its constants."""
        names, constants, stages = set(kernels.decode.arg_names), self.constants | {"LATENT": latent}, self.shares.config.stages
        if latent:  # half as much to load, so that there is room for one more
            constants |= {"V_DIM": self.dim_v, "V_DIM_B": 0, "V_CUT": 0}
            stages += 1
        if constants["PAGES"] and self.target.nvidia:  # Triton loads pages one stage ahead of what they hold, for each stage
            stages = 2 * stages - 1
        constants["STAGES"] = stages
        constants = tuple((name, value) for name, value in constants.items() if name in names)
        return Kernel(kernels.decode, constants, self.dtypes, self.shares.config, aligned)


def strides(name: str, x: Tensor, *axes: str) -> dict[str, int]:
    """x's strides, but for the last, as kernels name them."""
    return {f"{name}_{axis}": step for axis, step in zip(axes, x.stride(), strict=False)}


def ranks(share: Share | None) -> dict[str, int]:
    """A share as kernels take it: a process has one rank."""
    return dict(zip(("RANK", "WORLD", "RUN"), share or (0, 1, 1), strict=True))


def tables(cos: Tensor, sin: Tensor) -> dict[str, object]:
    """Rotary tables with contiguous rows as kernels take them."""
    found: dict[str, object] = {"cos": cos, "sin": sin, "cos_row": cos.stride(0), "sin_row": sin.stride(0)}
    return found | {"pairs": cos.shape[1], "positions": cos.shape[0]}


def in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
