"""What ranks do around attention, each as a function of (rank, world) that a rank runs (ranks.py): it asserts, or returns what to look at."""

import os
import time

import torch
import torch.distributed as dist
from distributed_cases import documents
from torch.distributed.device_mesh import init_device_mesh

import tilewise as tw
from tilewise import distributed
from tilewise.masks import Part

N, HEADS, DIM = 768, (4, 2), 16


def tensors(seed: int = 0, n: int = N, n_k: int | None = None) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, n, HEADS[0], DIM), (1, n_k or n, HEADS[1], DIM), (1, n_k or n, HEADS[1], DIM), (1, n, HEADS[0], DIM)
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)


def everything(rank: int, world: int) -> list[str]:
    """Every behaviour below that all ranks go through; the names of those that were looked at."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))["cp"]
    looked = (
        tokens,
        cross_attention,
        hybrid_layers,
        checkpointed,
        compiled,
        dtensors,
        empty_batch,
        decoded,
        different_plans,
        as_in_torchtitan,
        in_parts,
    )
    for each in looked:
        each(rank, world, mesh)
    return [each.__name__ for each in looked]


def tokens(rank, world, mesh) -> None:
    """dispatch, undispatch, roll and positions are those of the whole sequence."""
    for layout in ("auto", "zigzag", "ulysses"):
        plan = distributed.plan(tw.Documents(documents(N), inner=tw.Causal()), N, mesh, heads=HEADS, head_dim=DIM, layout=layout)
        whole = torch.arange(3 * N).reshape(1, N, 3)
        mine = plan.dispatch(whole)
        assert torch.equal(mine[0, :, 0], 3 * plan.position_ids())
        assert torch.equal(plan.undispatch(mine), whole)
        for shift in (-1, 5, -N - 2):
            assert torch.equal(plan.undispatch(plan.roll(mine, shift)), whole.roll(shift, 1)), (layout, shift)
        x = plan.dispatch(torch.randn(2, N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).requires_grad_()
        weight = torch.randn(2, N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        (grad,) = torch.autograd.grad((plan.undispatch(x) * weight).sum(), x)
        assert torch.equal(grad, world * plan.dispatch(weight))
        (grad,) = torch.autograd.grad((plan.roll(x, 7) * plan.dispatch(weight)).sum(), x)
        assert torch.equal(grad, plan.dispatch(weight.roll(-7, 1)))


def cross_attention(rank, world, mesh) -> None:
    """Queries and keys are different tokens."""
    n, n_k = 500, 800
    q, k, v, d_o = tensors(1, n, n_k)
    for mask in (tw.Causal(), tw.SlidingWindow(100, 3), tw.Documents([0, 100, 500], [0, 700, 800])):
        for layout in ("auto", "ulysses"):
            plan = distributed.plan(mask, (n, n_k), mesh, heads=HEADS, head_dim=DIM, layout=layout)
            inputs = [plan.dispatch(q), *(plan.dispatch(x, keys=True) for x in (k, v))]
            inputs = [x.requires_grad_() for x in inputs]
            slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
            o = distributed.attention(*inputs, plan, alibi_slopes=slopes)
            grads = torch.autograd.grad(o, inputs, plan.dispatch(d_o))
            whole = [x.clone().requires_grad_() for x in (q, k, v)]
            want = tw.attention(*whole, mask=Part(mask, n, [(0, n)]), alibi_slopes=slopes)
            wanted = torch.autograd.grad(want, whole, d_o)
            assert torch.equal(o, plan.dispatch(want)) and torch.equal(grads[0], plan.dispatch(wanted[0]))
            for got, right in zip(grads[1:], wanted[1:], strict=True):
                torch.testing.assert_close(got, plan.dispatch(right, keys=True), rtol=1e-5, atol=1e-5)


def hybrid_layers(rank, world, mesh) -> None:
    """Layers with different masks over tokens that stay where they are."""
    q, k, v, _ = tensors(2)
    first = distributed.plan(tw.Causal(), N, mesh, heads=HEADS, head_dim=DIM)
    second = first.with_mask(tw.SlidingWindow(99, 0))
    assert first.digest != second.digest and torch.equal(first.position_ids(), second.position_ids())
    for plan, mask in ((first, tw.Causal()), (second, tw.SlidingWindow(99, 0))):
        o = distributed.attention(*(plan.dispatch(x) for x in (q, k, v)), plan)
        assert torch.equal(o, plan.dispatch(tw.attention(q, k, v, mask=mask)))


def checkpointed(rank, world, mesh) -> None:
    """Activation checkpointing computes the call again, with its exchanges."""
    from torch.utils.checkpoint import checkpoint

    plan = distributed.plan(tw.Causal(), N, mesh, heads=HEADS, head_dim=DIM)
    q, k, v, d_o = (plan.dispatch(x) for x in tensors(3))
    found = []
    for again in (False, True):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        call = (lambda *x: distributed.attention(*x, plan, dropout_p=0.2, dropout_seed=1)) if not again else None
        o = call(*inputs) if call else checkpoint(distributed.attention, *inputs, plan, use_reentrant=False, dropout_p=0.2, dropout_seed=1)
        found.append((o, *torch.autograd.grad(o, inputs, d_o)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def compiled(rank, world, mesh) -> None:
    """torch.compile leaves the call out of its graphs, with the same results."""
    plan = distributed.plan(tw.Causal(), N, mesh, heads=HEADS, head_dim=DIM)
    q, k, v, d_o = (plan.dispatch(x).requires_grad_() for x in tensors(4))

    def step(q, k, v):
        return distributed.attention(2 * q, k, v + 1, plan) * 3

    want, got = step(q, k, v), torch.compile(step, backend="aot_eager")(q, k, v)
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(o, (q, k, v), d_o.detach()) for o in (want, got)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def dtensors(rank, world, mesh) -> None:
    """Sharded along the sequence they are taken with a plan that holds the same tokens, and refused with any other."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    n = 96 * world
    q, k, v, _ = tensors(5, n)
    sharded = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    plan = distributed.plan(tw.Causal(), n, mesh, heads=HEADS, head_dim=DIM, layout="contiguous", tile=96)
    o = distributed.attention(*sharded, plan)
    assert tuple(o.placements) == (Shard(1),) and torch.equal(o.to_local(), plan.dispatch(tw.attention(q, k, v, causal=True)))
    zigzag = distributed.plan(tw.Causal(), n, mesh, heads=HEADS, head_dim=DIM, layout="zigzag", tile=8)
    refused(lambda: distributed.attention(*sharded, zigzag), tw.UnsupportedError, "make it with layout='contiguous'")
    whole = [distribute_tensor(x, mesh, [Replicate()]) for x in (q, k, v)]
    refused(lambda: distributed.attention(*whole, plan), tw.UnsupportedError, "takes Shard(1), the sequence")
    refused(lambda: distributed.attention(sharded[0], k, v, plan), tw.UnsupportedError, "k is a plain tensor beside DTensors")
    refused(lambda: tw.attention(*sharded), tw.UnsupportedError, "q is a DTensor")


def empty_batch(rank, world, mesh) -> None:
    plan = distributed.plan(tw.Causal(), N, mesh, heads=HEADS, head_dim=DIM)
    q, k, v, _ = (plan.dispatch(x)[:0] for x in tensors(6))
    assert distributed.attention(q, k, v, plan).shape == (0, plan.seqlen, HEADS[0], DIM)


def decoded(rank, world, mesh) -> None:
    """Decode from shares of each sequence, interleaved or not, is decode."""
    generator = torch.Generator().manual_seed(9)
    batch, capacity = 3, 96 * world
    lengths = torch.tensor([capacity, 50, 5], dtype=torch.int32)
    k, v = (torch.randn(batch, capacity, HEADS[1], DIM, generator=generator) for _ in range(2))
    sink = torch.randn(HEADS[0], generator=generator)
    for new in (1, 4):
        q = torch.randn(batch, new, HEADS[0], DIM, generator=generator)
        for step in (1, 16, 96):
            mine = torch.arange(capacity)[torch.arange(capacity) // step % world == rank]
            assert len(mine) == 96 and distributed.held(lengths, rank, world, step).tolist() == [(mine < n).sum().item() for n in lengths]
            for options in ({}, {"mask": tw.SlidingWindow(20, 0)}, {"sink": sink, "softcap": 2.0}, {"causal": False}):
                want, want_lse = tw.decode(q, k, v, cache_seqlens=lengths, return_lse=True, **options)
                got, lse = distributed.decode(
                    q, k[:, mine], v[:, mine], mesh, cache_seqlens=lengths, interleave=step, return_lse=True, **options
                )
                torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
                torch.testing.assert_close(lse, want_lse, rtol=2e-6, atol=2e-6)
            pages = mine.reshape(-1, 16)[torch.randperm(6, generator=torch.Generator().manual_seed(1))]
            table = torch.randperm(6, generator=torch.Generator().manual_seed(1)).argsort().int().expand(batch, -1)
            paged = [torch.cat([x[b][pages] for b in range(batch)]) for x in (k, v)]
            table = table + 6 * torch.arange(batch, dtype=torch.int32)[:, None]
            got = distributed.decode(q, *paged, mesh, cache_seqlens=lengths, interleave=step, page_table=table)
            torch.testing.assert_close(got, tw.decode(q, k, v, cache_seqlens=lengths), rtol=2e-6, atol=2e-6)
    decoded_in_all_ways(rank, world, mesh)
    refused(lambda: distributed.decode(q, k, v, mesh, cache_seqlens=None), tw.ShapeError, "cache_seqlens must be given with cp_world")
    refused(lambda: distributed.decode(q, k, v, mesh, cache_seqlens=7, interleave=0), ValueError, "interleave must be an integer")


def decoded_in_all_ways(rank, world, mesh) -> None:
    """Packed queries, new tokens to be written, rotary, ALiBi, padding, 16 bits, a rank that holds nothing: one process's results, the same bits on
    all ranks.
    """
    generator = torch.Generator().manual_seed(10)
    lengths, bounds = torch.tensor([41, 3, 17], dtype=torch.int32), torch.tensor([0, 4, 4, 6], dtype=torch.int32)
    q, slopes = torch.randn(7, HEADS[0], DIM, generator=generator), torch.rand(HEADS[0], generator=generator)
    caches = [torch.randn(3, 64, HEADS[1], DIM, generator=generator) for _ in "kv"]
    angles = torch.randn(64, 4, generator=generator)
    turn = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    for dtype, within in ((torch.float32, 3e-6), (torch.bfloat16, 2e-2)):
        new = [torch.randn(7, HEADS[1], DIM, generator=generator).to(dtype) for _ in "kv"]
        whole = [x.to(dtype) for x in caches]
        words = {"cu_seqlens_q": bounds, "k": new[0], "v": new[1], "alibi_slopes": slopes, "leftpad": lengths // 3, **turn}
        words |= {"cache_seqlens": lengths, "mask": tw.PrefixLM(3), "return_lse": True}
        for step in (1, 16):
            positions = torch.arange(64)
            mine = positions[positions // step % world == rank]
            shares = [x[:, mine].clone() for x in whole]
            got, lse = distributed.decode(q.to(dtype), *shares, mesh, interleave=step, **words)
            want, want_lse = tw.decode(q.to(dtype), *(grown := [x.clone() for x in whole]), **words)
            torch.testing.assert_close(got, want, rtol=within, atol=within)
            torch.testing.assert_close(lse, want_lse, rtol=within, atol=within)
            assert all(torch.equal(x, y[:, mine]) for x, y in zip(shares, grown, strict=True))
            every = [torch.empty_like(got) for _ in range(world)]
            torch.distributed.all_gather(every, got)
            assert all(torch.equal(got, each) for each in every)


def different_plans(rank, world, mesh) -> None:
    """An error on every rank, and no hanging; the group goes on afterwards."""
    mask = tw.Causal() if rank else tw.SlidingWindow(9, 0)
    plan = distributed.plan(mask, N, mesh, heads=HEADS, head_dim=DIM, layout="contiguous")
    refused(lambda: distributed.attention(*(plan.dispatch(x) for x in tensors(7)[:3]), plan), ValueError, "the ranks have different plans")
    same = distributed.plan(tw.Causal(), N, mesh, heads=HEADS, head_dim=DIM)
    distributed.attention(*(same.dispatch(x) for x in tensors(7)[:3]), same)


def refused(call, error: type[Exception], words: str) -> None:
    try:
        call()
    except error as caught:
        assert words in str(caught), str(caught)
        return
    raise AssertionError(f"nothing raised; expected {error.__name__}: {words}")


def in_parts(rank, world, mesh) -> None:
    """Within a bound on memory heads come one after another, with the same bits, and where that is not enough keys do."""
    generator = torch.Generator().manual_seed(5)
    n, shown = 700, torch.rand(700, 700, generator=generator) < 0.3
    every = {
        "documents": (tw.Documents([0, 300, 301, n], inner=tw.Causal()), {}),
        "window": (tw.SlidingWindow(90, 5), {"sink": torch.linspace(-1, 2, HEADS[0]), "softcap": 3.0}),
        "dense": (tw.Dense(shown), {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}),
        "heads": ({(0, 2): tw.Causal(), (2, 4): tw.FirstKeys(400)}, {}),
    }
    for dtype, within in ((torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        q, k, v, d_o = (x.to(dtype) for x in tensors(6, n))
        bias = torch.randn(1, HEADS[0], 1, n, generator=generator).to(dtype)
        for name, (mask, words) in every.items():
            for layout in ("auto", "ulysses") if dtype == torch.float64 else ("auto",) if name == "window" else ():
                plan = distributed.plan(mask, n, mesh, heads=HEADS, head_dim=DIM, layout=layout)
                most = 300 * 2 * DIM * q.itemsize  # of 300 keys of one head
                pieces = plan.report(q.itemsize, most).pieces
                assert pieces == (HEADS[1] // plan.sharing, 3), pieces
                words = words | ({} if name == "dense" else {"bias": bias})
                found = []
                for several in (False, True):
                    leaves = [(plan.dispatch(x) if several else x).detach().requires_grad_() for x in (q, k, v)]
                    more = {x: y.detach().to(dtype, copy=True).requires_grad_() if x in ("sink", "bias") else y for x, y in words.items()}
                    if several:
                        o, lse = distributed.attention(*leaves, plan, most_bytes=most, return_lse=True, **more)
                    else:
                        o, lse = tw.attention(*leaves, mask=mask, return_lse=True, **more)
                    o.backward(plan.dispatch(d_o) if several else d_o)
                    of_all = [y.grad for x, y in more.items() if x in ("sink", "bias")]
                    for each in of_all if several else ():
                        wide = each.double()
                        dist.all_reduce(wide)
                        each.copy_(wide)
                    at_hand = (lambda x, dim: x) if several else plan.dispatch
                    found.append([at_hand(x.detach(), 1) for x in (o, *(x.grad for x in leaves))] + [at_hand(lse.detach(), 2), *of_all])
                for got, want in zip(found[1], found[0], strict=True):
                    largest = want.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
                    torch.testing.assert_close(got, want, rtol=within, atol=within * max(1.0, largest))
    plan = distributed.plan(tw.Causal(), n, mesh, heads=HEADS, head_dim=DIM)
    given = [plan.dispatch(x.float()) for x in (q, k, v)]
    plain = distributed.attention(*given, plan)
    assert torch.equal(plain, distributed.attention(*given, plan, most_bytes=n * 2 * DIM * 4))  # a head at a time is enough
    refused(
        lambda: distributed.attention(*given, plan, most_bytes=1000, dropout_p=0.1, dropout_seed=1),
        tw.UnsupportedError,
        "in which dropout is not counted",
    )


class TitanBlock(torch.nn.Module):
    """A decoder's layer as torchtitan 0.3 has it: `attention.inner_attention` is called with (batch, seqlen, heads, head_dim) and says which mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = torch.nn.ModuleDict(
            {
                "qkv": torch.nn.Linear(width, (HEADS[0] + 2 * HEADS[1]) * DIM),
                "inner_attention": TitanAttention(),
                "wo": torch.nn.Linear(HEADS[0] * DIM, width),
            }
        )

    def forward(self, x, positions):
        q, k, v = self.attention["qkv"](x).unflatten(-1, (-1, DIM)).split([HEADS[0], HEADS[1], HEADS[1]], 2)
        turn = positions[..., None, None] / torch.logspace(0, 3, DIM // 2)
        q, k = (torch.cat((y[..., : DIM // 2] * turn.cos(), y[..., DIM // 2 :] * turn.sin()), -1) for y in (q, k))
        return x + self.attention["wo"](self.attention["inner_attention"](q, k, v, attention_masks=None, enable_gqa=True).flatten(2))


class TitanAttention(torch.nn.Module):
    def forward(self, q, k, v, *, attention_masks=None, scale=None, enable_gqa=False, is_causal=True):
        return tw.attention(q, k, v, causal=is_causal, scale=scale)


def as_in_torchtitan(rank, world, mesh) -> None:
    """The two places where torchtitan asks for context parallelism: inner attentions get another forward, batches their rank's tokens. (The package
    itself, which brings a dozen others, is not installed here.)
    """
    plan = distributed.plan(tw.Causal(), N, mesh, heads=HEADS, head_dim=DIM, layout="zigzag")
    torch.manual_seed(0)
    layers, width = [TitanBlock(32) for _ in range(2)], 32
    inputs, positions = torch.randn(2, N, width), torch.arange(N).expand(2, -1)
    want = inputs
    for layer in layers:
        want = layer(want, positions)
    want.square().sum().backward()
    grads = [p.grad.clone() for layer in layers for p in layer.parameters()]

    def apply_cp_to_forward(modules, plan):
        def forward(q, k, v, *, scale=None, **others):
            return distributed.attention(q, k, v, plan, scale=scale)

        for module in modules:
            module.forward = forward

    apply_cp_to_forward([layer.attention["inner_attention"] for layer in layers], plan)
    got, mine = (plan.dispatch(x) for x in (inputs, positions))
    for layer in layers:
        layer.zero_grad()
        got = layer(got, mine)
    got.square().sum().backward()
    torch.testing.assert_close(got, plan.dispatch(want), rtol=1e-5, atol=1e-5)
    for p, grad in zip((p for layer in layers for p in layer.parameters()), grads, strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(p.grad, grad, rtol=2e-4, atol=2e-3)


def in_transformers(rank: int, world: int) -> list[str]:
    """A transformers model, its weights sharded by FSDP2, on ranks that share each sequence: logits and gradients of one process."""
    import torch.nn.functional as F
    from torch.distributed.fsdp import fully_shard
    from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

    n, heads, config = 200, (4, 2), {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97}
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))["cp"]
    plan = distributed.plan(tw.Causal(), n, mesh, heads=heads, head_dim=16, tile=8)

    def context_parallel(module, query, key, value, attention_mask, **options):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return distributed.attention(q, k, v, plan, scale=options.get("scaling")), None

    AttentionInterface.register("tilewise_context_parallel", context_parallel)
    torch.manual_seed(0)
    tokens = torch.randint(97, (2, n + 1))
    found = []
    for several in (False, True):
        torch.manual_seed(1)
        llama = LlamaConfig(**config, num_attention_heads=heads[0], num_key_value_heads=heads[1])
        model = AutoModelForCausalLM.from_config(llama, attn_implementation="tilewise_context_parallel" if several else "sdpa")
        inputs, targets, places = tokens[:, :-1], tokens[:, 1:], torch.arange(n)[None]
        if several:
            fully_shard(model, mesh=mesh)
            inputs, targets, places = plan.dispatch(inputs), plan.dispatch(targets), plan.position_ids()[None]
        logits = model(input_ids=inputs, position_ids=places).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (2 * n)
        (loss * world if several else loss).backward()  # FSDP2 takes the mean of the ranks' gradients, and theirs are to be added
        grads = [p.grad.full_tensor() if several else p.grad for p in model.parameters()]
        found.append((logits.detach() if several else plan.dispatch(logits.detach()), grads))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    for got, want in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    return ["logits", "gradients"]


def one_is_killed(rank: int, world: int) -> str:
    """The last rank ends before its second call; what the others are told."""
    plan = distributed.plan(tw.Full(), N, dist.group.WORLD, heads=HEADS, head_dim=DIM)
    q, k, v, _ = (plan.dispatch(x) for x in tensors(8))
    distributed.attention(q, k, v, plan)
    if rank == world - 1:
        os._exit(1)
    start = time.monotonic()
    try:
        distributed.attention(q, k, v, plan)
    except RuntimeError as error:
        return f"{time.monotonic() - start:.1f} s: {error}"
    return "nothing was raised"
