"""What attention is worth in training: steps of a GPT with each contender, as in FlashAttention-2's table: `tilewise bench train`.

A step is forward, backward and a fused AdamW on TOKENS tokens. All contenders of a cell train one model in turns: the same weights and tokens, but
another attention function, which is checked by the gate beforehand (gate.py). Where a step does not fit into memory its
sequences are taken in parts, gradients added up; where one sequence does not fit the model has fewer layers, for all contenders of the cell
but those that keep score matrices; the rows of these then say that memory ran out.

FLOPs of a step are tokens (6 N + 12 layers hidden seqlen), as FlashAttention-2 (Dao 2023), section 4.3, counts them: N is the number of weights,
positions left out and the embedding, which is the head as well, counted once; no FLOP is left out for the causal mask. MFU is their rate over the
data sheet's.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tilewise.bench.gate import verify
from tilewise.bench.peers import Impl
from tilewise.bench.runner import Course, first_line, give_back_memory, named
from tilewise.bench.sets import Attend, Workload
from tilewise.bench.store import Row
from tilewise.bench.timing import interleave
from tilewise.machine.sheets import machine_for
from tilewise.masks import Causal

NAME = "training"  # of its rows
TOKENS = 16384  # a step, or one sequence where that is longer
SEQLENS = (2048, 8192, 16384)
CONTENDERS = "tilewise,fa4,sdpa:cudnn,sdpa:flash,sdpa:math"
QUADRATIC = ("sdpa:math", "naive", "tilewise:reference")  # memory that grows with seqlen^2 asks nobody else for fewer layers
AT_A_TIME = 65536  # tokens whose logits are in memory; of longer steps all logits are computed once more for the gradients
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Size:
    """A GPT; head_dim is hidden / heads."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50304  # GPT-2's, a multiple of 128

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SIZES = {
    size.name: size
    for size in (
        Size(name="1.3B", layers=24, hidden=2048, heads=16),
        Size(name="2.7B", layers=32, hidden=2560, heads=20),
        Size(name="tiny", layers=2, hidden=32, heads=2, vocabulary=64),
    )
}
MODELS = "1.3B,2.7B"


class Block(nn.Module):
    """Attention, then a perceptron with GELU, each behind a LayerNorm and added to what came in. What lies around attention may be compiled."""

    def __init__(self, size: Size, compiled: bool, **new) -> None:
        super().__init__()
        hidden = size.hidden
        self.head_dim = size.head_dim
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden, **new), nn.LayerNorm(hidden, **new)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, **new), nn.Linear(hidden, hidden, **new)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, **new), nn.Linear(4 * hidden, hidden, **new)
        if compiled:
            self.before, self.after = torch.compile(self.before), torch.compile(self.after)

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v (batch, seqlen, heads, head_dim)."""
        return self.qkv(self.norm_attention(x)).unflatten(-1, (3, -1, self.head_dim)).unbind(2)

    def after(self, x: Tensor, o: Tensor) -> Tensor:
        x = x + self.out(o.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        return self.after(x, attend(*self.before(x)))


class GPT(nn.Module):
    """Learnt positions, `layers` blocks, a LayerNorm, and the embedding as the head."""

    def __init__(self, size: Size, layers: int, seqlen: int, *, dtype: torch.dtype, device: torch.device, compiled: bool = False) -> None:
        super().__init__()
        new = {"dtype": dtype, "device": device}
        self.embedding = nn.Embedding(size.vocabulary, size.hidden, **new)
        self.positions = nn.Embedding(seqlen, size.hidden, **new)
        self.blocks = nn.ModuleList(Block(size, compiled, **new) for _ in range(layers))
        self.norm = nn.LayerNorm(size.hidden, **new)
        generator = torch.Generator(device).manual_seed(SEED)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)

    @property
    def weights(self) -> int:
        """N: without the positions, which no product reads."""
        return sum(x.numel() for x in self.parameters()) - self.positions.weight.numel()

    def loss(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Mean cross-entropy in nats of (batch, seqlen + 1) tokens, each predicted from those before it."""
        x = self.embedding(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x, attend)
        pieces = [*zip(self.norm(x).flatten(0, 1).split(AT_A_TIME), tokens[:, 1:].flatten().split(AT_A_TIME), strict=True)]
        if len(pieces) == 1:
            total = self.summed_loss(*pieces[0])
        else:
            total = torch.stack([checkpoint(self.summed_loss, *piece, use_reentrant=False) for piece in pieces]).sum()
        return total / tokens[:, 1:].numel()

    def summed_loss(self, rows: Tensor, following: Tensor) -> Tensor:
        """Over tokens, of rows (tokens, hidden)."""
        return F.cross_entropy(F.linear(rows, self.embedding.weight).float(), following, reduction="sum")


def flops_of_step(weights: int, layers: int, hidden: int, seqlen: int, tokens: int) -> int:
    """tokens (6 N + 12 layers hidden seqlen)."""
    return tokens * (6 * weights + 12 * layers * hidden * seqlen)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How trainings are measured. `layers`: in place of the model's own."""

    budget_s: float = 1.0  # for each contender and cell, besides two steps
    limit_s: float = 240.0  # after which no cell is begun
    tokens: int = TOKENS
    layers: int | None = None
    autocast: bool = False  # weights in fp32, products in bf16; else all is bf16
    compiled: bool = False  # torch.compile of what lies around attention


def attention_of(size: Size, seqlen: int, batch: int) -> Workload:
    """That of one layer, for `batch` sequences at a time."""
    return Workload(
        name=NAME,
        batch=batch,
        seqlen_q=seqlen,
        heads_q=size.heads,
        head_dim=size.head_dim,
        mask=Causal(),
        dtype=torch.bfloat16,
        direction="fwd+bwd",
    )


def case_of(size: Size, layers: int, seqlen: int, plan: Plan) -> dict[str, int | float | str]:
    """What is trained, for its rows: the attention's case and the model."""
    how = {name: 1 for name in ("autocast", "compiled") if getattr(plan, name)}
    attention = attention_of(size, seqlen, max(1, plan.tokens // seqlen)).case
    return {**attention, "direction": "step", "model": size.name, "layers": layers, "layers_of_model": size.layers, **how}


@dataclass
class Training:
    """One model with its optimiser and tokens, which contenders train in turns."""

    size: Size
    layers: int
    seqlen: int
    plan: Plan
    device: torch.device
    model: GPT = field(init=False)

    def __post_init__(self) -> None:
        dtype = torch.float32 if self.plan.autocast else torch.bfloat16
        self.model = GPT(self.size, self.layers, self.seqlen, dtype=dtype, device=self.device, compiled=self.plan.compiled)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        generator = torch.Generator(self.device).manual_seed(SEED)
        shape = (self.batch, self.seqlen + 1)
        self.tokens = torch.randint(self.size.vocabulary, shape, generator=generator, dtype=torch.int64, device=self.device)

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return max(1, self.plan.tokens // self.seqlen)

    @property
    def flops(self) -> int:
        return flops_of_step(self.model.weights, self.layers, self.size.hidden, self.seqlen, self.batch * self.seqlen)

    def loss(self, tokens: Tensor, attend: Attend) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.autocast):
            return self.model.loss(tokens, attend)

    def step(self, attend: Attend, part: int) -> None:
        """One optimiser step, the gradients of `part` sequences at a time added up."""
        self.optimiser.zero_grad(set_to_none=True)
        parts = self.tokens.split(part)
        for tokens in parts:
            (self.loss(tokens, attend) / len(parts)).backward()
        self.optimiser.step()


@dataclass
class Ready:
    """A contender that trains, `part` sequences at a time."""

    attend: Attend
    part: int
    peak_bytes: int | None  # of all memory


def train(
    sizes: Iterable[Size],
    seqlens: Iterable[int],
    impls: Iterable[Impl],
    *,
    device: torch.device | str,
    plan: Plan | None = None,
    keep: Callable[[list[Row]], object] | None = None,
    progress: Callable[[str], object] | None = None,
) -> list[Row]:
    """Measure steps of every size at every length with every contender: a row each, also of those that cannot, with the reason.

    `keep(rows)` after each cell with its rows; `progress(text)` before each. A cell that fails stops nothing.
    """
    plan, device, impls = plan or Plan(), torch.device(device), list(impls)
    tell = (lambda done, total, text: progress(text) if done < total else None) if progress else None
    return Course(device=device, limit_s=plan.limit_s, keep=keep, progress=tell).rows(
        itertools.product(sizes, seqlens),
        title=lambda cell: f"GPT {cell[0].name}, {cell[1]} tokens",
        measure=lambda cell: _cell(*cell, impls, plan, device),
        blank=lambda cell: [_blank(impl.name, case_of(cell[0], plan.layers or cell[0].layers, cell[1], plan)) for impl in impls],
    )


def _blank(name: str, case: dict[str, int | float | str], flops: int = 0) -> Row:
    return Row(impl=name, name=NAME, case=case, clock="none", flops=flops)


def _cell(size: Size, seqlen: int, impls: list[Impl], plan: Plan, device: torch.device) -> list[Row]:
    """With as many layers as fit for all contenders but those that keep score matrices."""
    for layers in fewer(plan.layers or size.layers):
        give_back_memory(device)
        try:
            training = Training(size, layers, seqlen, plan, device)
            wrong = _wrong(training, impls)
            found = {impl.name: wrong.get(impl.name) or _ready(training, impl, may_ask=layers > 1) for impl in impls}
        except torch.OutOfMemoryError:
            training = None
            if layers == 1:
                raise
            continue
        return _timed(training, found)
    raise ValueError(f"layers is {plan.layers}; it must be at least 1")


def fewer(layers: int) -> Iterator[int]:
    """Numbers of layers to try, each about an eighth less than the one before it, down to one."""
    while layers >= 1:
        yield layers
        layers -= max(1, layers // 8)


def _wrong(training: Training, impls: list[Impl]) -> dict[str, str]:
    """By contender, why it cannot compute one layer's attention on one sequence, by the gate, from views of one tensor as the model has them."""
    wrong, workload = {}, attention_of(training.size, training.seqlen, 1)
    for impl in impls:
        if reasons := impl.why_not(workload, training.device):
            wrong[impl.name] = "; ".join(reasons)
            continue
        try:
            attend = impl.prepare(workload, training.device)
            verify(partial(_of_one_tensor, attend), workload, SEED, training.device)
        except AssertionError as failure:
            wrong[impl.name] = f"missed the tolerance: {first_line(failure)}"
        except Exception as refusal:  # each peer refuses in its own way
            said = f"cannot run this: {named(refusal)}"
            wrong[impl.name] = f"{OUT_OF_MEMORY}, with one layer's attention of one sequence" if _no_memory(refusal) else said
    return wrong


def _of_one_tensor(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(*torch.stack((q, k, v), 2).unbind(2))


OUT_OF_MEMORY = "out of memory"


def _no_memory(error: Exception) -> bool:
    """Whether memory ran out, of torch's own or, by the words, of a library's."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error).lower() for words in (OUT_OF_MEMORY, "alloc_failed"))


def _ready(training: Training, impl: Impl, may_ask: bool) -> Ready | str:
    """The contender with as many sequences at a time as fit; or why it cannot train.

    Raises OutOfMemoryError where one sequence does not fit and fewer layers would help it (`may_ask`).
    """
    reason, asks = "", may_ask and impl.name not in QUADRATIC
    for part in parts_of(training.batch):
        workload = attention_of(training.size, training.seqlen, part)
        if reasons := impl.why_not(workload, training.device):  # more score matrices than there is memory for
            reason = "; ".join(reasons)
            continue
        try:
            return _trial(training, impl, workload)
        except Exception as refusal:
            if not _no_memory(refusal):
                return f"cannot run this: {named(refusal)}"
            reason = f"{OUT_OF_MEMORY}, with {part} sequence{'s' if part > 1 else ''} at a time"
            if asks and part == 1:
                raise torch.OutOfMemoryError(reason) from None
        training.optimiser.zero_grad(set_to_none=True)
        give_back_memory(training.device)
    return reason


def parts_of(batch: int) -> list[int]:
    """Sequences at a time to try: all, then halves, as long as a batch is a whole number of them."""
    return [batch // 2**halvings for halvings in range(batch.bit_length()) if batch % 2**halvings == 0]


def _trial(training: Training, impl: Impl, workload: Workload) -> Ready:
    """Step twice: once for what is made once, such as the optimiser's moments, and once for the peak of memory."""
    attend = impl.prepare(workload, training.device)
    training.step(attend, workload.batch)
    if training.device.type != "cuda":
        return Ready(attend, workload.batch, None)
    torch.cuda.synchronize(training.device)
    torch.cuda.reset_peak_memory_stats(training.device)
    training.step(attend, workload.batch)
    torch.cuda.synchronize(training.device)
    return Ready(attend, workload.batch, torch.cuda.max_memory_allocated(training.device))


def _timed(training: Training, found: dict[str, Ready | str]) -> list[Row]:
    """Time those that are ready in turns; a row each, and one of each reason."""
    ready = {name: one for name, one in found.items() if isinstance(one, Ready)}
    steps = {name: partial(training.step, one.attend, one.part) for name, one in ready.items()}
    stats = interleave(steps, budget_s=training.plan.budget_s, device=training.device, clock="wall")
    sheet, flops = machine_for(training.device), training.flops
    case, rows = case_of(training.size, training.layers, training.seqlen, training.plan), []
    for name, one in found.items():
        row = _blank(name, case, flops)
        if isinstance(one, str):
            rows.append(replace(row, reason=one, passed=False if one.startswith("missed") else None))
            continue
        taken, whole = stats[name], one.part == training.batch
        rate = flops / taken.median
        times = {"median_s": taken.median, "p10_s": taken.p10, "p90_s": taken.p90, "samples": taken.samples, "flops_per_s": rate}
        of_training = {
            "tokens_per_s": training.batch * training.seqlen / taken.median,
            "mfu": None if sheet is None else rate / sheet.peak[torch.bfloat16],
            "peak_bytes": one.peak_bytes,
            "reason": None if whole else f"{one.part} of {training.batch} sequences at a time, as memory asks",
        }
        rows.append(replace(row, clock="wall", passed=True, **times, **of_training))
    return rows
