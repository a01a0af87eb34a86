"""The server's texts are those of plain generation, whatever is shared, guessed or evicted; and pages are counted right."""

import pytest
import torch
from rich.console import Console

from tilewise.demo import serve
from tilewise.demo.model import GPTConfig, build, tilewise_attention
from tilewise.demo.serve import Pages, Request, ServeOptions, Server, generate

CONFIG = GPTConfig(layers=2, heads_q=4, heads_k=2, head_dim=16, context=64)
WAYS = {
    "one at a time": {"running": 1, "branches": 0},
    "batched": {"running": 3, "branches": 0},
    "guessing": {"running": 3, "branches": 3, "depth": 3},
    "small chunks": {"running": 4, "branches": 1, "depth": 6, "chunk": 5},
}


def texts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(256, (21,), generator=generator).tolist()
    return [shared[: 21 - 4 * (n == 3)] + torch.randint(256, (n,), generator=generator).tolist() for n in (1, 9, 2, 3, 1)]


@pytest.mark.parametrize("way", WAYS)
def test_texts_equal_plain_generation(way):
    options = ServeOptions(page_size=4, **WAYS[way])
    model, given = build(CONFIG, tilewise_attention, 1), texts()
    requests = [Request(list(prompt), len(prompt) + 24) for prompt in given]
    server = Server(model, CONFIG, options)
    server.run(requests)
    assert [request.tokens for request in requests] == [generate(model, prompt, 24) for prompt in given]
    assert requests[-1].reused >= 20
    if options.branches:
        assert server.guessed > server.right > 10 and server.rounds < 24 * 2  # two waves of requests
    assert len(server.pages.free) + len(server.pages.idle) == server.k_cache.shape[1] and not +server.pages.readers


def test_pages_are_shared_kept_and_evicted():
    pages = Pages(3, 2)
    first = [pages.take(), pages.take()]
    pages.publish([7, 8, 9], first)
    assert pages.match([7, 8, 9]) == first[:1] and pages.match([7, 8]) == [] and pages.match([7, 9, 9]) == []
    pages.give_back(first)
    assert pages.free == [0, first[1]] and not pages.idle  # the first is still read
    pages.give_back(first[:1])
    assert list(pages.idle) == first[:1]
    assert pages.match([7, 8, 1]) == first[:1]
    pages.give_back(first[:1])
    assert sorted(pages.take() for _ in range(3)) == [0, 1, 2] and not pages.known and pages.match([7, 8, 1]) == []


def test_it_says_what_it_did(capsys):
    options = ServeOptions(requests=2, new=6, running=2, device=torch.device("cpu"))
    assert serve.run(options, Console(width=120))
    said = capsys.readouterr().out
    assert "2 requests on cpu, at most 2 at once" in said and "tokens/s   12 tokens in" in said
    assert "every text is that of plain generation" in said


def test_a_text_that_differs_is_told(monkeypatch, capsys):
    monkeypatch.setattr(serve, "generate", lambda model, prompt, new: list(prompt))
    assert not serve.run(ServeOptions(requests=1, new=2, device=torch.device("cpu")), Console(width=120))
    assert "the texts differ from plain generation" in capsys.readouterr().out
