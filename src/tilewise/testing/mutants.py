"""Mutants: a small online-softmax backend that is right, and as many wrong ones as it has faults. The gate must fail every one of them.

`Mutant()` is healthy and takes every problem; `Mutant("skipped_rescale")` has one of FAULTS. It loops over tiles of keys as real kernels
do, for all queries at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Backend, philox
from tilewise.backends.reference import INF, alibi, lse_dtype, pair_products, visibility, weigh
from tilewise.errors import UnsupportedError
from tilewise.problem import Call, Gradients, Problem
from tilewise.testing import conformance
from tilewise.testing.cases import Case

TILE = 16

FAULTS = {
    "skipped_rescale": "the running sum and output keep their old scale when the row maximum grows",
    "one_skipped_rescale": "as skipped_rescale, for the output only and at the second tile only",
    "wider_mask": "every query sees one key more on the right (causal off by one)",
    "narrower_mask": "no query sees the last key it should see",
    "unmasked_tail": "the padding of the last tile counts as keys of score 0",
    "stale_stage": "P is multiplied with the V of the tile before",
    "dropped_last_tile": "the last tile of keys is left out",
    "scale_twice": "the scale is applied to Q and again to the scores",
    "gqa_modulo": "query head h reads key head h % heads_k",
    "lse_without_max": "LSE lacks the row maximum",
    "lse_base_two": "LSE is a logarithm to the base 2",
    "lse_without_sink": "the sink is in the denominator, not in LSE",
    "empty_row_nan": "a row that sees no key is 0 / 0",
    "one_bad_row": "one row of O is 10 % too large",
    "one_bad_head": "the last head of O is 10 % too large",
    "nan_times_zero": "what the mask hides is multiplied by zero instead of left out",
    "nan_as_zero": "a value that is NaN or infinite counts as 0 for those who see it, too",
    "uninitialised": "the accumulator of O starts from whatever is in memory",
    "alibi_top_left": "ALiBi counts distances from the top left corner",
    "bias_of_first_head": "every head uses the bias of head 0",
    "dropout_unscaled": "what dropout keeps is not multiplied by 1 / (1 - p)",
    "dropout_before_sum": "dropout also thins out the denominator",
    "dropout_other_bits": "the backward pass draws another dropout mask",
    "ds_without_delta": "dS = P dP",
    "delta_without_dlse": "the gradient that reaches LSE is ignored",
    "dk_without_scale": "dK lacks the scale",
    "dq_last_tile": "dQ holds what the last tile added instead of the sum",
    "gqa_last_head": "dK and dV come from the last query head of each group",
    "softcap_without_chain": "the gradient of tanh is left out",
    "dsink_without_lse": "dsink is the plain sum of delta",
    "dbias_times_scale": "dbias is multiplied by the scale",
}


class Operands(NamedTuple):
    """The call in the precision of its statistics, heads first and one key head a query head; each (batch, heads_q, ., .)."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor  # (batch, heads_q, seqlen_q, seqlen_k)
    extra: Tensor | float  # bias and ALiBi
    kept: Tensor | float  # what dropout multiplies P by


@dataclass(frozen=True)
class Mutant:
    """The backend with one of FAULTS, or with none."""

    fault: str | None = None

    def __post_init__(self) -> None:
        if self.fault is not None and self.fault not in FAULTS:
            raise ValueError(f"fault must be one of {', '.join(FAULTS)} or None, got {self.fault!r}")

    @property
    def name(self) -> str:
        return f"mutant:{self.fault or 'healthy'}"

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def tile(self, call: Call) -> None:
        return None

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        x = self.operands(call)
        seqlen_k = x.k.shape[2]
        fresh = torch.empty if self.fault == "uninitialised" else torch.zeros
        acc_o = fresh(*x.q.shape[:3], call.head_dim_v, dtype=x.q.dtype, device=x.q.device)
        m, l = x.q.new_full((*x.q.shape[:3], 1), -INF), x.q.new_zeros(*x.q.shape[:3], 1)
        last = seqlen_k - TILE if self.fault == "dropped_last_tile" and seqlen_k > TILE else seqlen_k
        for n0 in range(0, last, TILE):
            keys = slice(n0, min(n0 + TILE, seqlen_k))
            visible, kept = x.visible[..., keys], _columns(x.kept, keys)
            s, _ = self.scores(call, x, keys)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            base = m_new.masked_fill(m_new == -INF, 0.0)
            p, rescale = (s - base).exp(), (m - base).exp()
            dropped = p * kept
            skipped = torch.ones_like(rescale)
            l = l * (skipped if self.fault == "skipped_rescale" else rescale)
            l = l + (dropped if self.fault == "dropout_before_sum" else p).sum(-1, keepdim=True)
            stuck = self.fault == "skipped_rescale" or (self.fault == "one_skipped_rescale" and n0 == TILE)
            acc_o = acc_o * (skipped if stuck else rescale)
            stale = self.fault == "stale_stage" and n0 > 0 and keys.stop - n0 == TILE
            rows = x.v[:, :, n0 - TILE : n0] if stale else x.v[:, :, keys]
            rows = rows.nan_to_num(0.0, 0.0, 0.0) if self.fault == "nan_as_zero" else rows
            acc_o = acc_o + (dropped @ rows if self.fault == "nan_times_zero" else weigh(dropped, rows, visible))
            m = m_new
        return self.finish(call, acc_o, m, l)

    def finish(self, call: Call, acc_o: Tensor, m: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
        """O = acc_O / l and LSE = m + log(l), with the sink as one more term of l."""
        m_keys, l_keys = m, l
        if call.sink is not None:
            sink = call.sink.to(m.dtype)[:, None, None]
            m = torch.maximum(m, sink)
            rescale = (m_keys - m).exp().masked_fill(m == -INF, 0.0)
            l = l * rescale + (sink - m).exp().masked_fill(m == -INF, 0.0)
            acc_o = acc_o * rescale
        if self.fault == "lse_without_sink":
            m_lse, l_lse = m_keys, l_keys
        else:
            m_lse, l_lse = m, l
        o = acc_o / (l if self.fault == "empty_row_nan" else l.masked_fill(l == 0.0, 1.0))
        lse = l_lse.log() + (0.0 if self.fault == "lse_without_max" else m_lse)
        lse = lse / 0.6931471805599453 if self.fault == "lse_base_two" else lse
        o = o.transpose(1, 2).to(call.q.dtype)
        if self.fault == "one_bad_row":
            o[-1:, -1:, -1:] *= 1.1
        if self.fault == "one_bad_head":
            o[:, :, -1:] *= 1.1
        return o, lse.squeeze(-1).to(lse_dtype(call.q.dtype))

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        x = self.operands(call, backward=True)
        d_o, o, lse = (t.to(x.q.dtype) for t in (d_o.transpose(1, 2), o.transpose(1, 2), lse[..., None]))
        blind = ~x.visible.any(-1, keepdim=True)
        d_o = d_o.masked_fill(lse == -INF, 0.0)  # a bias may leave a row nothing to see
        delta = (d_o * o).sum(-1, keepdim=True).masked_fill(blind, 0.0)
        if d_lse is not None and self.fault != "delta_without_dlse":
            delta = delta - d_lse[..., None].to(delta.dtype).masked_fill(lse == -INF, 0.0)
        d_q, d_k, d_v, d_s_all = (
            torch.zeros_like(x.q),
            torch.zeros_like(x.k),
            torch.zeros_like(x.v),
            torch.zeros_like(x.visible, dtype=x.q.dtype),
        )
        for n0 in range(0, call.seqlen_k, TILE):
            keys = slice(n0, min(n0 + TILE, call.seqlen_k))
            k, v, visible, kept = x.k[:, :, keys], x.v[:, :, keys], x.visible[..., keys], _columns(x.kept, keys)
            s, chain = self.scores(call, x, keys)
            p = (s - lse.masked_fill(lse == -INF, 0.0)).clamp(max=0.0).exp().masked_fill(~visible, 0.0)
            d_v[:, :, keys] = weigh((p * kept).mT, d_o, visible.mT)
            d_p = pair_products(d_o, v, visible) * kept
            d_s = (p * (d_p if self.fault == "ds_without_delta" else d_p - delta)).masked_fill(~visible, 0.0)
            d_s_all[..., keys] = d_s
            d_qk = d_s if self.fault == "softcap_without_chain" else d_s * chain
            added = weigh(d_qk, k, visible) * call.scale
            d_q = added if self.fault == "dq_last_tile" else d_q + added
            d_k[:, :, keys] = weigh(d_qk.mT, x.q, visible.mT) * (1.0 if self.fault == "dk_without_scale" else call.scale)
        d_bias = d_sink = None
        if call.bias is not None and bias_grad:
            factor = call.scale if self.fault == "dbias_times_scale" else 1.0
            d_bias = (d_s_all * factor).sum_to_size(call.bias.shape).to(call.bias.dtype)
        if call.sink is not None:
            weight = (call.sink.to(lse.dtype)[:, None, None] - lse).exp().masked_fill(lse == -INF, 0.0)
            weight = torch.ones_like(weight) if self.fault == "dsink_without_lse" else weight
            d_sink = -(weight * delta).sum((0, 2, 3)).to(call.sink.dtype)
        d_k, d_v = self.sum_group(call, d_k), self.sum_group(call, d_v)
        return Gradients(d_q.transpose(1, 2).to(call.q.dtype), d_k, d_v, d_bias, d_sink)

    def operands(self, call: Call, backward: bool = False) -> Operands:
        dtype, heads = lse_dtype(call.q.dtype), torch.arange(call.heads_q, dtype=torch.int64, device=call.q.device)
        owner = heads % call.heads_k if self.fault == "gqa_modulo" else heads // call.group
        q, k, v = (t.transpose(1, 2).to(dtype) for t in (call.q, call.k[:, :, owner], call.v[:, :, owner]))
        visible = visibility(call).reshape(call.batch, call.heads_q, call.seqlen_q, call.seqlen_k)
        if self.fault == "wider_mask":
            visible = torch.cat([visible[..., :1], visible[..., 1:] | visible[..., :-1]], dim=-1)
        if self.fault == "narrower_mask":
            visible = torch.cat([visible[..., :-1] & visible[..., 1:], visible[..., -1:]], dim=-1)
        extra: Tensor | float = 0.0
        if call.bias is not None:
            bias = call.bias[:, :1] if self.fault == "bias_of_first_head" else call.bias
            extra = bias.to(dtype).expand(visible.shape).masked_fill(~visible, 0.0)
        if call.alibi_slopes is not None:
            extra = extra + alibi(_top_left(call) if self.fault == "alibi_top_left" else call).to(dtype).expand(visible.shape)
        kept: Tensor | float = 1.0
        if call.dropout is not None:
            dropout = call.dropout._replace(seed=call.dropout.seed + 1) if backward and self.fault == "dropout_other_bits" else call.dropout
            batch, heads_range = range(call.batch), range(call.heads_q)
            bits = philox.keep(dropout, batch, heads_range, 0, call.seqlen_q, 0, call.seqlen_k, call.heads_q, q.device)
            kept = bits.to(dtype) * (1.0 if self.fault == "dropout_unscaled" else philox.keep_scale(dropout.p))
        x = Operands(q, k, v, visible, extra, kept)
        return _pad_tail(x) if self.fault == "unmasked_tail" and not backward else x

    def scores(self, call: Call, x: Operands, keys: slice) -> tuple[Tensor, Tensor | float]:
        """Scores of one tile of keys, -inf where hidden, and d s / d (scale q.k)."""
        visible, chain = x.visible[..., keys], 1.0
        s = pair_products(x.q, x.k[:, :, keys], visible) * (call.scale**2 if self.fault == "scale_twice" else call.scale)
        if call.softcap > 0.0:
            bounded = torch.tanh(s / call.softcap)
            s, chain = call.softcap * bounded, 1.0 - bounded**2
        return (s + _columns(x.extra, keys)).masked_fill(~visible, -INF), chain

    def sum_group(self, call: Call, grad: Tensor) -> Tensor:
        """Gradients a query head (batch, heads_q, seqlen_k, d) as gradients a key head (batch, seqlen_k, heads_k, d)."""
        groups = grad.reshape(call.batch, call.heads_k, call.group, *grad.shape[2:])
        summed = groups[:, :, -1] if self.fault == "gqa_last_head" else groups.sum(2)
        return summed.transpose(1, 2).to(call.k.dtype)


def first_failure(backend: Backend, cases: Iterable[Case]) -> str | None:
    """The first sentence with which the gate (`run_case`, `run_hidden`, `run_scattered`) fails the backend on these cases; None where it passes."""
    for case in cases:
        for run in (conformance.run_case, conformance.run_hidden, conformance.run_scattered):
            try:
                run(backend, case)
            except UnsupportedError:
                break
            except AssertionError as failure:
                return f"{case.id}: {failure}"
    return None


def _columns(x: Tensor | float, keys: slice) -> Tensor | float:
    return x[..., keys] if isinstance(x, Tensor) else x


def _top_left(call: Call) -> Call:
    return replace(call, diagonal=torch.zeros(call.seqlen_q, dtype=torch.int64, device=call.q.device))


def _pad_tail(x: Operands) -> Operands:
    """Zeros for the keys that the last tile lacks, and every query sees them."""
    pad = -x.k.shape[2] % TILE
    extra, kept = (torch.nn.functional.pad(t, (0, pad)) if isinstance(t, Tensor) else t for t in (x.extra, x.kept))
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, pad)) for t in (x.k, x.v))
    return Operands(x.q, k, v, torch.nn.functional.pad(x.visible, (0, pad), value=True), extra, kept)
