"""Random legal problems against the C functions, in poisoned memory, for a bounded number of examples."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.backends.cpu import Cpu
from tilewise.backends.cpu.native import library
from tilewise.masks import Causal, ChunkedCausal, Documents, FirstKeys, Full, PerHead, SlidingWindow
from tilewise.testing.cases import Case, random_mask
from tilewise.testing.conformance import run_case, run_hidden

LENGTHS = st.one_of(st.integers(0, 5), st.integers(30, 60), st.integers(90, 110), st.sampled_from((191, 192, 193, 300)))
DIMS = st.one_of(st.integers(1, 20), st.sampled_from((31, 32, 33, 63, 64, 80, 128)))


@st.composite
def masks(draw, seqlen_q, seqlen_k, heads_q):
    window = st.one_of(st.none(), st.integers(0, 400))
    place = {"align": draw(st.sampled_from(("bottom_right", "top_left"))), "offset": draw(st.one_of(st.just(0), st.integers(-120, 120)))}
    cuts = lambda n: tuple(sorted(draw(st.lists(st.integers(0, n), min_size=3, max_size=3))))  # noqa: E731
    simple = st.one_of(
        st.just(Full()),
        st.just(Causal(**place)),
        st.builds(lambda a, b: SlidingWindow(a, b, **place), window, window),
        st.builds(ChunkedCausal, st.integers(1, 120)),
        st.builds(FirstKeys, st.integers(0, 20)),
    )
    a, b = draw(simple), draw(simple)
    made = [a, a | b, a & b, a - b, Documents((0, *cuts(seqlen_q)), (0, *cuts(seqlen_k)), inner=a)]
    if heads_q > 1:
        made.append(PerHead({(0, 1): a, (1, heads_q): b}))
    if seqlen_q and seqlen_k:
        made.append(random_mask(seqlen_q, seqlen_k) & a)
    return draw(st.sampled_from(made))


@st.composite
def cases(draw):
    heads_k, group = draw(st.sampled_from(((1, 1), (2, 1), (1, 3), (2, 2))))
    shape = {"seqlen_q": draw(LENGTHS), "seqlen_k": draw(LENGTHS), "heads_q": heads_k * group}
    return Case(
        batch=draw(st.integers(1, 2)),
        heads_k=heads_k,
        head_dim=draw(DIMS),
        head_dim_v=draw(DIMS),
        mask=draw(masks(**shape)),
        dtype=draw(st.sampled_from(("fp32", "bf16", "fp16"))),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0))),
        bias=draw(st.sampled_from((None, None, "bhq", "h", "q", ""))),
        alibi=draw(st.sampled_from((None, None, "h"))),
        sink=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.3))),
        layout=draw(st.sampled_from(("bshd", "bhsd", "sliced", "expanded"))),
        **shape,
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases(), st.data())
def test_random_problems(case, data):
    backend = Cpu(data.draw(st.sampled_from(library().isas)))
    before = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    try:
        run_case(backend, case)
        run_hidden(backend, case)
    finally:
        torch.set_num_threads(before)
