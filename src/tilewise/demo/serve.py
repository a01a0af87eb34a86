"""A small server: continuous batching of the demo's GPT over a paged cache, with shared prefixes and speculative trees, all in one `decode` a layer.

Each round packs what every running request has to say next: a piece of its prompt, or its newest token and a tree of guesses, which are what followed
the same two bytes earlier in its text. The answers to right guesses come for free. Greedy, in fp32: the texts are those of plain generation.
"""

import copy
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import tilewise as tw
from tilewise.demo import data
from tilewise.demo.model import GPT, GPTConfig, build, tilewise_attention

SUFFIX = 2  # bytes that a guess is looked up by
PREFIX, MOST_OWN = 96, 40  # bytes that all prompts of the demo begin with, and at most as many of each one's own


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `tilewise demo --serve` runs."""

    requests: int = 8
    new: int = 48  # tokens to generate for each
    running: int = 4  # requests at once
    page_size: int = 16
    chunk: int = 48  # tokens of a prompt in one round
    branches: int = 2  # guesses of what follows, and how far they go; 0 branches for none
    depth: int = 4
    seed: int = 0
    device: torch.device | None = None


class Pages:
    """Which pages are free, how many requests read each, and which hold the beginning of a text that is known."""

    def __init__(self, number: int, page_size: int) -> None:
        self.page_size, self.free = page_size, list(range(number))
        self.readers: Counter[int] = Counter()
        self.known: dict[tuple[int, ...], int] = {}  # text up to the end of a full page -> the page
        self.text: dict[int, tuple[int, ...]] = {}  # the way back
        self.idle: OrderedDict[int, None] = OrderedDict()  # known pages that nobody reads, the longest unread first

    def take(self) -> int:
        """A page that nobody reads; what it held is forgotten."""
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.idle.popitem(last=False)
            del self.known[self.text.pop(page)]
        self.readers[page] = 1
        return page

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The known pages that `tokens` begin with, now read once more; at least one token is left to compute."""
        pages = []
        for end in range(self.page_size, len(tokens), self.page_size):
            page = self.known.get(tuple(tokens[:end]))
            if page is None:
                break
            self.idle.pop(page, None)
            self.readers[page] += 1
            pages.append(page)
        return pages

    def publish(self, tokens: Sequence[int], pages: list[int]) -> None:
        """The full pages of these tokens become known."""
        for n, page in enumerate(pages[: len(tokens) // self.page_size], 1):
            text = tuple(tokens[: n * self.page_size])
            if text not in self.known and page not in self.text:
                self.known[text], self.text[page] = page, text

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.readers[page] -= 1
            if self.readers[page] == 0 and page in self.text:
                self.idle[page] = None
            elif self.readers[page] == 0:
                self.free.append(page)


@dataclass
class Request:
    """A text that grows: its tokens, how many of them are in the cache, and on which pages."""

    tokens: list[int]
    wanted: int  # tokens, the prompt's included
    pages: list[int] = field(default_factory=list)
    length: int = 0
    reused: int = 0  # tokens that were found in the cache

    def nodes(self, options: ServeOptions) -> tuple[list[int], list[int], int]:
        """What it says in this round: tokens, the place of each one's parent among them, and how many are its own text, not guesses."""
        own = self.tokens[self.length : self.length + options.chunk]
        tokens, parents = list(own), list(range(-1, len(own) - 1))
        if self.length + len(own) == len(self.tokens):
            for guess in self._guesses(options):
                at = len(own) - 1
                for token in guess:
                    child = next((n for n in range(len(own), len(tokens)) if parents[n] == at and tokens[n] == token), None)
                    if child is None:
                        child = len(tokens)
                        tokens.append(token)
                        parents.append(at)
                    at = child
        return tokens, parents, len(own)

    def _guesses(self, options: ServeOptions) -> list[list[int]]:
        """What followed the newest bytes where they stood before, the latest first, no longer than what is wanted."""
        depth, found = min(options.depth, self.wanted - len(self.tokens) - 1), []
        for at in range(len(self.tokens) - 1, SUFFIX - 1, -1):
            if len(found) == options.branches or depth <= 0:
                break
            if self.tokens[at - SUFFIX : at] == self.tokens[-SUFFIX:]:
                guess = self.tokens[at : at + depth]
                found += [guess] if guess not in found else []
        return found


class Server:
    """Runs requests to their ends, as many at once as are allowed and have pages."""

    def __init__(self, model: GPT, config: GPTConfig, options: ServeOptions) -> None:
        self.model, self.options = copy.deepcopy(model), options
        for layer, block in enumerate(self.model.blocks):
            block.attention = partial(self._attend, layer)
        self.device = self.model.embedding.weight.device
        most = options.chunk + options.branches * options.depth
        pages_each = -(-(config.context + most) // options.page_size)
        self.pages = Pages(pages_each * options.running, options.page_size)
        shape = (config.layers, len(self.pages.free), options.page_size, config.heads_k, config.head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, dtype=torch.float32, device=self.device) for _ in range(2))
        self.places: dict = {}  # of the round that is computed, in the words of `decode`
        self.rounds = self.guessed = self.right = 0

    def run(self, requests: list[Request]) -> None:
        waiting, running = list(requests), []
        while waiting or running:
            while waiting and len(running) < self.options.running:  # there are pages for all of them
                request = waiting.pop(0)
                request.pages = self.pages.match(request.tokens)
                request.length = request.reused = len(request.pages) * self.options.page_size
                running.append(request)
            self._round(running)
            for request in [each for each in running if len(each.tokens) == each.wanted]:
                self.pages.give_back(request.pages)
                running.remove(request)

    @torch.no_grad()
    def _round(self, running: list[Request]) -> None:
        """One pass of the model over what all requests say, and what comes of it."""
        said = [request.nodes(self.options) for request in running]
        for request, (tokens, _, _) in zip(running, said, strict=True):
            while len(request.pages) * self.options.page_size < request.length + len(tokens):
                request.pages.append(self.pages.take())
        depths = [_depths(parents) for _, parents, _ in said]
        positions = [request.length + depth for request, each in zip(running, depths, strict=True) for depth in each]
        self._place(running, said)
        x = self.model.embedding(self._ints([token for tokens, _, _ in said for token in tokens]).long())[None]
        angles = self.model.angles[self._ints(positions)]
        for block in self.model.blocks:
            x = block(x, angles)
        answers = F.linear(self.model.norm(x[0]), self.model.embedding.weight).argmax(-1).tolist()
        moves, start = [], 0
        for request, (tokens, parents, own) in zip(running, said, strict=True):
            moves += self._accept(request, tokens, parents, own, answers[start : start + len(tokens)])
            start += len(tokens)
        self._move(moves)
        self.rounds += 1

    def _place(self, running: list[Request], said: list) -> None:
        """Where every token of the round lies, and which of them see which."""
        counts = [len(tokens) for tokens, _, _ in said]
        new, page_size = max(counts), self.options.page_size
        tree = torch.ones(len(said), new, new, dtype=torch.bool, device="cpu").tril()
        for shown, (_, parents, own) in zip(tree, said, strict=True):
            first = new - len(parents)
            for node in range(own, len(parents)):
                shown[first + node, first:] = shown[first + parents[node], first:]
                shown[first + node, first + node] = True
        pages = max(len(request.pages) for request in running)
        table = [request.pages + [0] * (pages - len(request.pages)) for request in running]
        same = next((n for n, column in enumerate(zip(*table, strict=True)) if len(set(column)) > 1), pages)
        whole = min(request.length for request in running) // page_size
        self.places = {
            "cu_seqlens_q": F.pad(self._ints(counts).cumsum(0, dtype=torch.int32), (1, 0)),
            "cache_seqlens": self._ints([request.length for request in running]),
            "page_table": self._ints(table),
            "tree": tree.to(self.device),
            "shared_prefix": min(same, whole) * page_size,
        }

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer, (1, tokens, heads, head_dim)."""
        return tw.decode(q[0], self.k_cache[layer], self.v_cache[layer], k=k[0], v=v[0], **self.places)[None]

    def _accept(
        self, request: Request, tokens: list[int], parents: list[int], own: int, answers: list[int]
    ) -> list[tuple[int, int, int, int]]:
        """Lengthen the text by the model's answers along the guesses that were right; which keys have to move, as (page, place) from and to."""
        prompt_left = request.length + own < len(request.tokens)
        path, at, page_size = [], own - 1, self.options.page_size
        while not prompt_left and len(request.tokens) < request.wanted:
            request.tokens.append(answers[at])
            child = next((n for n in range(own, len(tokens)) if parents[n] == at and tokens[n] == answers[at]), None)
            if child is None:
                break
            path.append(child)
            at = child
        self.guessed, self.right = self.guessed + len(tokens) - own, self.right + len(path)
        slots = [(request.pages[place // page_size], place % page_size) for place in range(request.length, request.length + len(tokens))]
        request.length = min(request.length + own + len(path), len(request.tokens) - 1) if not prompt_left else request.length + own
        self.pages.publish(request.tokens[: request.length], request.pages)
        return [(*slots[node], *slots[own + n]) for n, node in enumerate(path) if node != own + n]

    def _move(self, moves: list[tuple[int, int, int, int]]) -> None:
        """Keys and values of right guesses go where their sequence goes on; those of the others are overwritten in time."""
        if moves:
            page, place, to_page, to_place = self._ints(moves).long().unbind(1)
            for cache in (self.k_cache, self.v_cache):
                cache[:, to_page, to_place] = cache[:, page, place]

    def _ints(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cpu").to(self.device)


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@torch.no_grad()
def generate(model: GPT, prompt: list[int], new: int) -> list[int]:
    """Plain generation: the whole text through the model again for each token."""
    tokens, device = list(prompt), model.embedding.weight.device
    for _ in range(new):
        tokens.append(int(model(torch.tensor([tokens], dtype=torch.int64, device=device))[0, -1].argmax()))
    return tokens


def prompts(options: ServeOptions) -> list[list[int]]:
    """Texts that begin alike, each with bytes of its own behind that."""
    text = data.corpus().tolist()
    own = [8 + 7 * n % (MOST_OWN - 7) for n in range(options.requests)]
    return [text[:PREFIX] + text[1000 * (n + 1) : 1000 * (n + 1) + length] for n, length in enumerate(own)]


def run(options: ServeOptions, console: Console) -> bool:
    """Serve, generate the same plainly, and say how fast both were; whether all texts are the same."""
    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = GPTConfig(context=PREFIX + MOST_OWN + options.new)
    model = build(config, tilewise_attention, options.seed).to(device)
    given = prompts(options)
    started = time.perf_counter()
    server, requests = Server(model, config, options), [Request(list(prompt), len(prompt) + options.new) for prompt in given]
    server.run(requests)
    served = time.perf_counter()
    plain = [generate(model, prompt, options.new) for prompt in given]
    ended = time.perf_counter()
    new, prompt = options.requests * options.new, sum(map(len, given))
    same = [request.tokens for request in requests] == plain
    reused = sum(request.reused for request in requests)
    console.print(f"{options.requests} requests on {device}, at most {options.running} at once, pages of {options.page_size} tokens")
    console.print(f"served         {new / (served - started):8.0f} tokens/s   {new} tokens in {server.rounds} rounds")
    console.print(f"plain          {new / (ended - served):8.0f} tokens/s   one request after another, without a cache")
    console.print(f"shared prefix  {reused / prompt:8.0%} of the prompts' {prompt} tokens were in the cache already")
    console.print(f"guesses        {server.right / max(server.guessed, 1):8.0%} of {server.guessed} were right")
    console.print("every text is that of plain generation" if same else "[red]the texts differ from plain generation[/red]")
    return same
