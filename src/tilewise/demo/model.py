"""A byte-level GPT, small enough to read at one go, that takes its attention function as an argument."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEMPERATURE = 0.7  # of text that is generated
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q (batch, seqlen, heads_q, head_dim) over k and v (batch, seqlen, heads_k, head_dim); returns q's shape."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The model's size; the defaults are what `tilewise demo` trains (1.4 million parameters)."""

    layers: int = 2
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 64
    context: int = 1024
    vocabulary: int = 256

    @property
    def width(self) -> int:
        return self.heads_q * self.head_dim


def tilewise_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The call that a user writes."""
    import tilewise

    return tilewise.attention(q, k, v, causal=True)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same call to torch's scaled_dot_product_attention, which wants heads before positions."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def rotary_angles(config: GPTConfig) -> Tensor:
    """Angle of each pair of channels at each position, (context, 1, head_dim / 2), as in RoFormer (Su et al. 2021), Eq. 15."""
    new = {"dtype": torch.float32, "device": "cpu"}
    frequency = 10_000.0 ** -torch.arange(0, 1, 2 / config.head_dim, **new)
    return torch.outer(torch.arange(config.context, **new), frequency)[:, None, :]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair of channels of x (batch, seqlen, heads, head_dim) by its position's angle, in fp32; returns x's dtype."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.head_dim = config.head_dim
        self.kv_width = config.heads_k * config.head_dim
        width = config.width
        self.norm_attention = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * self.kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.after_attention(x, self.attention(*self.before_attention(x, angles)))

    def before_attention(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, rotated."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (-1, self.head_dim))  # (batch, seqlen, heads_q + 2 heads_k, head_dim)
        heads_k = self.kv_width // self.head_dim
        q, k, v = qkv.split((qkv.shape[2] - 2 * heads_k, heads_k, heads_k), dim=2)
        return rotate(q, angles), rotate(k, angles), v

    def after_attention(self, x: Tensor, o: Tensor) -> Tensor:
        x = x + self.out(o.flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Predicts the next byte at every position: (batch, seqlen) int64 -> logits (batch, seqlen, vocabulary)."""

    blocks: Sequence[Block]
    angles: Tensor  # (context, 1, head_dim / 2), a buffer

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.blocks = blocks  # pyright: ignore[reportAttributeAccessIssue]  (torch's ModuleList does not say of what it is)
        self.norm = nn.RMSNorm(config.width)
        self.register_buffer("angles", rotary_angles(config), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles[: tokens.shape[1]])
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte; inputs and targets (batch, seqlen) int64."""
        return F.cross_entropy(self(inputs).float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: GPT, prompt: Tensor, new: int, seed: int = 0) -> str:
    """`new` bytes that the model puts after prompt (length,), drawn at TEMPERATURE, as text; of what it wrote it sees the last `context` bytes.

    Draws are made on the CPU in fp64, so that two models with the same probabilities write the same.
    """
    generator = torch.Generator().manual_seed(seed)
    context, tokens = len(model.angles), prompt.to(model.embedding.weight.device, torch.int64)
    for _ in range(new):
        logits = model(tokens[None, -context:])[0, -1].double().cpu()
        tokens = torch.cat((tokens, torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator).to(tokens.device)))
    return as_text(tokens[len(prompt) :])


def as_text(tokens: Tensor) -> str:
    """Bytes as text; what cannot be shown has a mark in its place."""
    text = bytes(tokens.tolist()).decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def build(config: GPTConfig, attention: Attention, seed: int) -> GPT:
    """A freshly initialised model: the same seed gives the same weights, whatever the attention function."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config, attention)
