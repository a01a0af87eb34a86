"""A rung of the ladder's branch for gradients: dQ, dK and dV from what a forward pass left."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError, check_like, check_size, check_tensor
from tilewise.ladder import stamps
from tilewise.ladder.rung import MOST_HEADS, Rung
from tilewise.masks import Causal
from tilewise.problem import Call, Gradients, Problem
from tilewise.sm90 import jit

FORWARD = Rung("k5", "k5_warp_specialised", "where the checks and the bench have O and its log-sum-exp from")


@dataclass(frozen=True)
class BackwardRung:
    """One kernel: `rung(q, k, v, o, lse, d_o, causal=False)`, or a backend for the checks, with FORWARD's forward pass.

    `module` is the file under tilewise.ladder; `choice` what this rung fixes of its Config.
    """

    name: str
    module: str
    title: str
    choice: dict = field(default_factory=dict, hash=False)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor, causal: bool = False, scale: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of O = softmax(scale Q K^T) V of one head a row, with `scale` 1 / sqrt(head_dim) by default.

        Args:
            q, k, v: (batch * heads, seqlen, head_dim) bf16 on a Hopper GPU, head_dim 64 or 128; any seqlen, and the same for all.
            o, lse: what the forward pass returned: as q, and (batch * heads, seqlen) fp32, the natural logarithm.
            d_o: the gradient that reaches O, as q.
            causal: query i sees keys 0..i.

        Returns:
            dQ, dK, dV, each (batch * heads, seqlen, head_dim) bf16.

        Raises:
            ShapeError: the tensors do not fit each other.
            ValueError: scale is not positive and finite.
            UnsupportedError: this rung, or this machine, cannot run it; says what to install or do.
        """
        self._require(q, k, v, o, lse, d_o)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {scale}")
        return self.run(q, k, v, o, lse, d_o, causal=causal, scale=scale)

    @cached_property
    def code(self) -> ModuleType:
        """The rung's module; imports the DSL, which reads there and then for which GPU it compiles."""
        os.environ.setdefault("CUTE_DSL_ARCH", jit.ARCH)
        return import_module(f"tilewise.ladder.{self.module}")

    def configure(self, head_dim: int, causal: bool):
        return self.code.configure(head_dim, causal, **self.choice)

    def trace(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor, causal: bool = False):
        """The phases of a few blocks' warps, as tracing.Trace; the arguments and errors of a call."""
        from tilewise.ladder.tracing import record_gradients

        self._require(q, k, v, o, lse, d_o)
        return record_gradients(self, q, k, v, o, lse, d_o, causal)[0]

    def _require(self, *tensors: Tensor) -> None:
        """Raise for tensors that do not fit each other, and where this rung cannot run on such."""
        _check(*tensors)
        q = tensors[0]
        if reasons := FORWARD.reasons(q.dtype, q.shape[-1], q.device.type):
            raise UnsupportedError(f"{self.name} cannot run this: {'; '.join(reasons)}")

    def compiled(self, head_dim: int, causal: bool, options: str = "", stamped: bool = False):
        """The kernels for a Hopper GPU, with time stamps if `stamped` (stamps.py); needs the DSL, but no GPU."""
        if missing := jit.why_no_compiler():
            raise UnsupportedError(f"{self.name} cannot be compiled: {'; '.join(missing)}")
        code, arguments = (stamps.stamped(self.module), self.stamped_arguments) if stamped else (self.code, self.arguments)
        return jit.compiled(code.launch, arguments, code.configure(head_dim, causal, **self.choice), options)

    def run(self, *tensors: Tensor, causal: bool, scale: float, events: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of checked tensors: q, k, v, o, lse and d_o. In three launches and a fill: zeros for dQ's sum, delta
        (`gradients.prepare`), the kernel, dQ rounded. With stamps where there is room for them, `events` (tracing.py).
        """
        q, k, v, o, lse, d_o = tensors
        heads, seqlen, head_dim = q.shape
        dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
        if q.numel() == 0:
            return dq, dk, dv
        if heads > MOST_HEADS:
            raise UnsupportedError(
                f"{self.name} takes at most {MOST_HEADS} heads in all (batch * heads), and this is {heads}; cut the batch"
            )
        config = self.configure(head_dim, causal)
        m_blocks = -(-seqlen // config.tile_m)
        rows = tuple(q.new_empty((heads, m_blocks * config.tile_m), dtype=torch.float32) for _ in range(2))
        turns = [torch.zeros((heads, m_blocks, config.consumers), dtype=torch.int32, device=q.device)] if self.ordered else []
        sum_dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        with torch.cuda.device(q.device):
            given = (*map(jit.aligned, (q, k, v, o, d_o)), lse.contiguous())
            kernel = self.compiled(head_dim, causal, stamped=events is not None)
            results, noted = (sum_dq, dk, dv, *turns), [] if events is None else [events]
            kernel(given, rows, results, scale, scale / math.log(2), *noted)
        torch.mul(sum_dq, scale, out=dq)
        return dq, dk, dv

    @property
    def ordered(self) -> bool:
        """Whether the blocks of keys add to dQ in one order, so that every run gives the same bits."""
        return getattr(self.code, "ORDERED", False)

    def arguments(self, config, code: ModuleType | None = None) -> list:
        """Stand-ins for those of `launch`; code: of another module than the rung's."""
        from tilewise.ladder.gradients import Given, Rows
        from tilewise.sm90.dsl import BFloat16, Float32, Int32, cute, make_fake_tensor

        heads, seqlen, padded, m_blocks = (jit.size() for _ in range(4))
        q, k, v, o, d_o, dk, dv = (jit.tensor(BFloat16, heads, seqlen, config.head_dim) for _ in range(7))
        lse, rows = jit.tensor(Float32, heads, seqlen, aligned=False), Rows(*(jit.tensor(Float32, heads, padded) for _ in range(2)))
        dense = cute.sym_int64(divisibility=4), config.head_dim, 1  # a stride that is known takes no register
        sum_dq = make_fake_tensor(Float32, (heads, seqlen, config.head_dim), dense, assumed_align=jit.BYTES)
        turns = [jit.tensor(Int32, heads, m_blocks, config.consumers, aligned=False)] if self.ordered else []
        return [Given(q, k, v, o, d_o, lse), rows, (code or self.code).Results(sum_dq, dk, dv, *turns), Float32(1.0), Float32(1.0)]

    def stamped_arguments(self, config) -> list:
        """Of a `launch` with stamps: the events, too."""
        return [*self.arguments(config, stamps.stamped(self.module)), stamps.stand_in()]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """O and LSE of checked tensors, by FORWARD."""
        return FORWARD.run(q, k, v, causal, scale)

    # The same as a backend (tilewise.backends.Backend), for the checks.

    def why_not(self, problem: Problem) -> list[str]:
        return FORWARD.why_not(replace(problem, grad=False))

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """O (batch, seqlen, heads, head_dim) and LSE (batch, heads, seqlen)."""
        return FORWARD.forward(replace(call, grad=False))

    def backward(self, call: Call, o: Tensor, lse: Tensor, d_o: Tensor, d_lse: Tensor | None, bias_grad: bool = False) -> Gradients:
        """The gradients of a call that `forward` took."""
        if d_lse is not None:
            raise UnsupportedError(f"{self.name} cannot run this: it takes no gradient that reaches the log-sum-exp")
        heads = (x.transpose(1, 2).flatten(0, 1) for x in (call.q, call.k, call.v, o))
        given = *heads, lse.flatten(0, 1), d_o.transpose(1, 2).flatten(0, 1)
        found = self.run(*given, causal=call.mask == Causal(), scale=call.scale)
        return Gradients(*(x.unflatten(0, (call.batch, call.heads_q)).transpose(1, 2) for x in found), None, None)


def _check(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, d_o: Tensor) -> None:
    check_tensor("q", q, ("batch * heads", "seqlen", "head_dim"))
    for name, x in (("k", k), ("v", v), ("o", o), ("d_o", d_o)):
        check_tensor(name, x, ("batch * heads", "seqlen", "head_dim"))
        check_like(name, x, q)
        check_size(name, "shape", tuple(x.shape), tuple(q.shape), "q")
    check_tensor("lse", lse, ("batch * heads", "seqlen"), (torch.float32,))
    check_like("lse", lse, q, same_dtype=False)
    check_size("lse", "shape", tuple(lse.shape), tuple(q.shape[:2]), "q")
