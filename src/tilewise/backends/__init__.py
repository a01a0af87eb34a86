"""The Backend protocol: what a backend offers, and the sentences it gives when it cannot."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tilewise.masks import Mask
from tilewise.problem import AppendCall, Call, DecodeCall, Gradients, Problem

OfInputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # dQ, dK, dV, dBias and dSink


class Bound(Protocol):
    """A call with its kernel and arguments found, as a function of tensors of the same shapes, strides and dtypes: `Backend.bind`."""

    @property
    def kept(self) -> bool:
        """Whether it may serve more calls: it depends on nothing that a tensor holds, and takes little memory."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor | None, ...], with_lse: bool, heads_first: bool = False
    ) -> tuple[Tensor, Tensor]:
        """O and LSE, which may be looked at only where it is wanted. extras: the tensors of `problem.Extras`, alibi_slopes as in `Call`, and rng None
        for the call's own; q, k and v have a batch of 1 where there are cu_seqlens. heads_first: O should lie in memory as (batch, heads, seqlen,
        head_dim_v), but need not.
        """
        ...

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
        """dQ, dK, dV, dBias (None unless `bias_grad`) and dSink, from what `forward` returned, dO and dLSE. LSE is contiguous. The first three lie in
        memory as q, k and v do (`problem.gradient_like`) where the backend can have them so. They are the caller's, who turns them in place.
        """
        ...


class BoundDecode(Protocol):
    """A call of decode with its kernel and arguments found once, for all calls that differ only in what tensors hold and where they lie.

    It holds none of the call's tensors.
    """

    def __call__(self, given: tuple, seqlens: Tensor, out: Tensor | None = None, with_lse: bool = True) -> tuple[Tensor, Tensor]:
        """O and LSE as of `Backend.decode`, contiguous. LSE may be looked at only with `with_lse`.

        given: as DecodeTensors; seqlens: (batch,), lengths with new tokens; out: None, or a tensor apart from all others, shaped as O, that may be
        written and returned as O.
        """
        ...


class Backend(Protocol):
    """One way to compute attention. Backends never import each other.

    A backend derives from this class and writes the first five; the others have an answer that is always right.
    """

    name: str
    eight_bits: bool = False  # whether `forward` serves calls of `Problem.eight_bits`; those without are passed over (runtime/dispatch.py)
    by_name: str = ""  # a sentence that says why it runs only when asked for by name; empty where it need not be asked for
    keeps_row_max: bool = False  # whether `forward` serves calls with `row_max`; those without are passed over (runtime/dispatch.py)

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences that say why this backend cannot run `problem`; empty when it can."""
        raise NotImplementedError

    def reads(self, problem: Problem) -> bool:
        """Whether it reads values of tensors on a GPU on the host for a problem that it runs, so that no CUDA graph can hold the call. Of masks that
        hold tensors it is asked about packed documents alone (`masks.DeviceDocuments`).
        """
        return True

    def reads_decode(self, problem: Problem, mask: Mask, page_size: int | None, in_keys: bool) -> bool:
        """As `reads`, for `decode`; `problem` has the caches' dtypes. page_size: tokens, None where there is no page table. in_keys: v_cache has the
        strides of k_cache[..., :head_dim_v], as if it were that.
        """
        return True

    def missing(self, problem: Problem) -> str:
        """A sentence with the way out where this backend would run `problem` on this machine, if only what it needs were installed, or what was asked
        for were here; else empty. For a problem that `why_not` refuses: what computes instead is many times slower, so that it is said.
        """
        return ""

    def tile(self, call: Call) -> tuple[int, int] | None:
        """(tile_m, tile_n) that this backend would use for `call`; None where it does not tile."""
        raise NotImplementedError

    def forward(self, call: Call) -> tuple[Tensor, ...]:
        """O (batch, seqlen_q, heads_q, head_dim_v) in q's dtype and LSE (batch, heads_q, seqlen_q), fp32 (fp64 for fp64 inputs).

        With `call.row_max` a third, shaped and typed as LSE: the largest score of each row that the softmax sees before the sink, which is after
        scale, softcap, bias and ALiBi; -inf for a row that sees no key, NaN where a visible score is NaN or +inf, and the row has no softmax.
        """
        raise NotImplementedError

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """Gradients given the forward's outputs and the gradients that reach them; the bias's only where `bias_grad` asks for it.

        `call.precision` is None: what `forward` computed by one has the gradients of the inputs' own dtype (runtime/operator.py). With
        `call.wide_keys` dK and dV may be fp32.
        """
        raise NotImplementedError

    def bind_decode(self, call: DecodeCall) -> BoundDecode | None:
        """What computes `call`, and calls like it, by reading the cache in place; None where each sequence has to be a call of its own, or queries
        that are yet to be rotated have to be so first.

        A pair is visible where the mask, leftpad and the tree all show it; the last query of a sequence is its last token. With a share they speak of
        positions in the whole sequence, of which the caches hold some. O may be in `call.out_dtype`. Nothing in the call is
        read on the host, unless it is there, and nothing that is found depends on it.
        """
        return None

    def decode(self, call: DecodeCall) -> tuple[Tensor, Tensor] | None:
        """O and LSE of the newest tokens against a cache; None where `bind_decode` has none.

        O is like q with head_dim_v; LSE (batch, heads_q, seqlen_q), or (heads_q, total_q). Rows of q behind the last sequence get O = 0, LSE = -inf.
        """
        bound = self.bind_decode(call)
        return None if bound is None else bound(call.tensors, call.seqlens)

    def merge(self, outputs: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """O (..., rows, heads, dim) in dtype and LSE (..., heads, rows), from parts over disjoint sets of keys, (parts, ..., rows, heads, dim) and
        (parts, ..., rows, heads), which may be apart in memory; without gradients. None where it has no kernel for that.
        """
        return None

    def check_decode(self, call: DecodeCall) -> None:
        """Raise what `decode` would for where the caches lie. It is asked before new tokens are written, of which nothing is left then."""

    def why_not_decode(self, problem: Problem) -> list[str]:
        """As `why_not`, for `decode`, of which a backend may cover more."""
        return self.why_not(problem)

    def bind_append(self, call: AppendCall) -> Callable[[tuple, Tensor | None], Tensor | None] | None:
        """What writes new keys and values into a cache, for `call` and those that differ from it in nothing but what tensors hold and where they lie;
        None where torch has to do it.

        It takes `AppendCall.tensors`, of which it ignores cu_seqlens where the call has none, and rotary_first. It writes nothing where a token has
        no place, and returns (batch,) int32, overwritten by the next call on the stream: the tokens that each sequence then has, `cache_seqlens` and
        its new ones, whether they had a place or not. It may find that it cannot serve tensors for where they lie, and then writes nothing and
        returns None. With a share tokens that other ranks hold have no place.
        """
        return None

    def append(self, call: AppendCall) -> Tensor | None:
        """What `bind_append` gives, for one call; None, and nothing written, where torch has to do it."""
        bound = self.bind_append(call)
        return None if bound is None else bound(call.tensors, call.rotary_first)

    def bind(self, call: Call) -> Bound | None:
        """The call's kernel and arguments, found once (see runtime/call_cache.py); None where `forward` and `backward` find them each time."""
        return None

    def describe(self) -> str:
        """What it runs on here, in a few words, such as an instruction set; empty where there is nothing to say."""
        return ""

    def details(self, call: Call) -> Sequence[str]:
        """Its kernel for that call, in sentences, for `explain`."""
        return ()

    def kernels(self, call: Call) -> Sequence[tuple]:
        """What is to be compiled before the call can run, for `warmup`: (launch, arguments, config) each; empty where nothing is."""
        return ()
