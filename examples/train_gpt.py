"""Train a small GPT on the bytes of this file: `python examples/train_gpt.py`, a few seconds on a CPU."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw

CONTEXT, WIDTH, HEADS, HEADS_K, LAYERS = 128, 64, 4, 2, 2


class Block(nn.Module):
    """Attention with grouped heads, then a perceptron, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        head_dim = WIDTH // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * head_dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (HEADS + 2 * HEADS_K, -1))  # (batch, seqlen, heads, head_dim)
        q, k, v = heads.split((HEADS, HEADS_K, HEADS_K), dim=2)
        x = x + self.out(tw.attention(q, k, v, causal=True).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """(batch, seqlen) bytes -> (batch, seqlen, 256) logits of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]))


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = GPT()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(40):
        starts = torch.randint(len(text) - CONTEXT, (4, 1))
        window = text[starts + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == 39:
            print(f"step {step:2d}: {losses[-1]:.2f} nats a byte")
    assert losses[-1] < 0.6 * losses[0]


if __name__ == "__main__":
    main()
