"""Train on documents of different lengths without padding: `attention_varlen`, with each document's loss and gradients.

`python examples/packed_training.py`
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw

HEADS, HEAD_DIM, VOCABULARY = 4, 32, 50


class Layer(nn.Module):
    """Tokens (total,) in documents -> logits (total, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.qkv = nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM)
        self.head = nn.Linear(HEADS * HEAD_DIM, VOCABULARY)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).view(-1, 3, HEADS, HEAD_DIM).unbind(1)  # each (total, heads, head_dim)
        o = tw.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)
        return self.head(x + o.flatten(1))


def loss_of(model: Layer, documents: list[Tensor]) -> Tensor:
    """The sum over all tokens but the first of each document, in nats; the documents lie end to end."""
    lengths = torch.tensor([len(document) - 1 for document in documents])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    inputs, targets = (
        torch.cat([document[cut] for document in documents]) for cut in (slice(None, -1), slice(1, None))
    )
    return F.cross_entropy(model(inputs, cu_seqlens), targets, reduction="sum")


def main() -> None:
    torch.manual_seed(0)
    model = Layer()
    documents = [torch.randint(VOCABULARY, (n,)) for n in (40, 3, 171, 2, 64)]

    packed = loss_of(model, documents)
    alone = torch.stack([loss_of(model, [document]) for document in documents]).sum()
    torch.testing.assert_close(packed, alone)
    parameters = list(model.parameters())
    for got, expected in zip(*(torch.autograd.grad(loss, parameters) for loss in (packed, alone)), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
    padded = len(documents) * max(map(len, documents))
    print(
        f"loss {packed:.3f} packed, {alone:.3f} one by one; "
        f"{sum(map(len, documents))} tokens where padding would have {padded}"
    )

    optimiser = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(30):
        optimiser.zero_grad()
        loss_of(model, documents).backward()
        optimiser.step()
    loss = loss_of(model, documents)
    print(f"loss {loss:.3f} after 30 steps")
    assert loss < packed / 2


if __name__ == "__main__":
    main()
