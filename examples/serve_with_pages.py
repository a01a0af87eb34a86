"""Serve sequences of different lengths from one pool of pages; check each token against attention over its sequence.

`python examples/serve_with_pages.py`. One layer's keys and values stand for a model's; a server does so in each layer.
"""

import torch
from torch import Tensor

import tilewise as tw

PAGE, PAGES, HEADS, HEADS_K, HEAD_DIM = 16, 32, 8, 2, 64


class Pool:
    """Pages of keys and values, which of them are free, and which belong to each sequence, in order."""

    def __init__(self, sequences: int, most_pages: int) -> None:
        pool = PAGES, PAGE, HEADS_K, HEAD_DIM
        self.k, self.v = (torch.full(pool, torch.nan) for _ in range(2))  # never read before it is written
        self.free = list(range(PAGES))
        self.table = torch.full((sequences, most_pages), -1, dtype=torch.int32)
        self.lengths = torch.zeros(sequences, dtype=torch.int32)

    def reserve(self, sequence: int, tokens: int) -> None:
        """Give a sequence the pages that so many tokens more need."""
        have, need = (-(-n // PAGE) for n in (int(self.lengths[sequence]), int(self.lengths[sequence]) + tokens))
        for place in range(have, need):
            self.table[sequence, place] = self.free.pop()

    def release(self, sequence: int) -> None:
        """Take back all pages of a sequence that has ended."""
        self.free += [page for page in self.table[sequence].tolist() if page >= 0]
        self.table[sequence], self.lengths[sequence] = -1, 0


def tokens(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of n tokens, which a model would compute."""
    q, k, v = (torch.randn(1, n, heads, HEAD_DIM) for heads in (HEADS, HEADS_K, HEADS_K))
    return q, k, v


def main() -> None:
    torch.manual_seed(0)
    prompts = (37, 5, 90)
    pool, history = Pool(len(prompts), most_pages=8), []

    for sequence, length in enumerate(prompts):  # prefill: attention of the prompt, its keys into pages
        q, k, v = tokens(length)
        tw.attention(q, k, v, causal=True)
        pool.reserve(sequence, length)
        row = slice(sequence, sequence + 1)
        tw.append(pool.k, pool.v, k, v, cache_seqlens=0, page_table=pool.table[row])
        pool.lengths[sequence] = length
        history.append((k, v))

    for _ in range(20):  # decode: one call a step for all sequences
        for sequence in range(len(prompts)):
            pool.reserve(sequence, 1)
        new = [tokens(1) for _ in prompts]
        q, k, v = (torch.cat(each) for each in zip(*new, strict=True))  # (sequences, 1, heads, head_dim)
        o = tw.decode(q, pool.k, pool.v, k=k, v=v, cache_seqlens=pool.lengths, page_table=pool.table)
        pool.lengths += 1
        for sequence, (_, k_new, v_new) in enumerate(new):
            history[sequence] = tuple(
                torch.cat(pair, 1) for pair in zip(history[sequence], (k_new, v_new), strict=True)
            )
            expected = tw.attention(q[sequence : sequence + 1], *history[sequence])
            torch.testing.assert_close(o[sequence : sequence + 1], expected)

    print(f"20 steps of {len(prompts)} sequences agree with attention over all {int(pool.lengths.sum())} tokens")
    print(f"{PAGES - len(pool.free)} of {PAGES} pages are in use; sequence 2 ends")
    pool.release(2)
    print(f"{PAGES - len(pool.free)} of {PAGES} pages are in use")


if __name__ == "__main__":
    main()
