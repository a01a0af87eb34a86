"""Masks as text: round trips with their hash, pickle and cache, refusals, and tracing."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.masks import (
    Causal,
    ChunkedCausal,
    Chunks,
    Dense,
    Documents,
    FirstKeys,
    Full,
    PerHead,
    PrefixLM,
    PrefixTree,
    Slices,
    SlidingWindow,
    parse,
)

leaves = st.sampled_from(
    [
        Full(),
        Causal(),
        Causal(align="top_left"),
        SlidingWindow(3, 0),
        SlidingWindow(None, 2, align="top_left"),
        Causal(offset=-2),
        SlidingWindow(3, None, align="top_left", offset=4),
        PrefixLM(3),
        FirstKeys(2),
        ChunkedCausal(4),
        PrefixTree([-1, 0, 1, 0, -1], [2, 1, 0, 3, 1], window=2),
        Chunks(4),
        Slices([[0, 5], [2, 8]], [[0, 4], [1, 7]], [1, 2]),
        Documents([0, 3, 7], [0, 5, 6], SlidingWindow(1, 1) | FirstKeys(1)),
        Dense(torch.eye(8, dtype=torch.bool)),
        Dense(torch.ones(1, 3, 8, 8, dtype=torch.bool)),
        PerHead({(0, 2): Causal(), (2, 3): Full()}),
    ]
)
expressions = st.recursive(
    leaves,
    lambda masks: st.one_of(
        st.tuples(st.sampled_from("&|-"), masks, masks).map(lambda e: {"&": e[1] & e[2], "|": e[1] | e[2], "-": e[1] - e[2]}[e[0]]),
        masks.map(lambda mask: ~mask),
        masks.map(lambda mask: mask.transpose()),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(expressions)
def test_text_pickle_hash_and_cache(mask):
    tensors = []
    text = mask.text(tensors)
    again = parse(text, tensors)
    assert again == mask and hash(again) == hash(mask) and (again.kind, again.extent, again.source) == (mask.kind, mask.extent, mask.source)
    assert (mask.source is None) == bool(tensors)
    assert pickle.loads(pickle.dumps(mask)) == mask
    planes = mask.planes(8, 8, *mask.extent)
    assert again.planes(8, 8, *mask.extent) is planes
    assert torch.equal(again.dense(8, 8), mask.dense(8, 8))
    assert not torch.equal((~mask).dense(8, 8), mask.dense(8, 8))


def test_text_takes_tensors_for_lists_and_refuses_anything_else():
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    mask = parse("Documents(#0,#1,inner=Causal(align='bottom_right'))&SlidingWindow(1023,0)", [cu, cu])
    assert mask.text([]) == "Documents([0,3,8],inner=Causal())&SlidingWindow(1023,0)"
    assert parse("~Causal()") == ~Causal()
    assert parse("PerHead({(0,2):Causal(),(2,3):Full()})") is parse("PerHead({(0,2):Causal(),(2,3):Full()})")
    held = [cu]
    assert Dense(torch.ones(1, 1, dtype=torch.bool)).text(held) == "Dense(#1)" and len(held) == 2
    for text in [
        "__import__('os')",
        "Causal",
        "Causal().kind",
        "[x for x in (1,)]",
        "Causal(**{})",
        "Causal(*[])",
        "1 if 1 else 2",
        "lambda: 1",
        "1.5",
    ]:
        with pytest.raises(ValueError, match="is not understood"):
            parse(text)
    for text in ["7", "'Causal()'", "[Causal()]", "~1"]:
        with pytest.raises(ValueError, match="is not a mask but"):
            parse(text)
    for text in ["Causal(1,2,3)", "1&Causal()", "~'a'", "{[]:1}", "Causal(aligned=1)"]:
        with pytest.raises(ValueError, match=r"^mask text"):
            parse(text)
    for text in ["", "Causal(", "Causal();Full()"]:
        with pytest.raises(ValueError, match="is not an expression"):
            parse(text)
    with pytest.raises(ValueError, match=r"tensor #2, but only 1 were given"):
        parse("Dense(#2)", [cu])


def test_masks_are_built_and_written_inside_a_traced_graph():
    """torch.compile traces constructors, `& | -` and text without a break; what reaches the graph is a string and tensors."""
    held = torch.eye(4, dtype=torch.bool)
    texts = []

    def traced(x, held):
        tensors = []
        band = Causal() & SlidingWindow(3, 0)
        texts.append(band.source)
        texts.append((Full() - FirstKeys(2) | PrefixLM(3) | ChunkedCausal(4) | Slices([[0, 1]], [[0, 1]], [0])).text(tensors))
        texts.append(Documents([0, 3, 8], inner=Causal()).text(tensors))
        texts.append((PerHead({(0, 1): Causal()}) & Dense(held)).text(tensors))
        return x + tensors[0].sum()

    assert torch.compile(traced, fullgraph=True, backend="eager")(torch.zeros(1), held) == 4
    compiled, texts = texts, []
    traced(torch.zeros(1), held)
    assert compiled == texts and len(texts) == 4


def test_the_default_of_documents_is_traced():
    def traced(x):
        return x, Documents([0, 12]).source

    assert torch.compile(traced, fullgraph=True, backend="aot_eager")(torch.zeros(1))[1] == "Documents([0,12])"


@pytest.mark.parametrize(
    "make",
    [
        lambda n: SlidingWindow(n, 0),
        lambda n: SlidingWindow(0, n, align="top_left"),
        lambda n: FirstKeys(n),
        lambda n: PrefixLM(n),
        lambda n: ChunkedCausal(n),
        lambda n: Documents([0, n]),
        lambda n: Slices([[0, n]], [[1, n]], [0]),
        lambda n: PerHead({(0, n): Causal()}),
        lambda n: SlidingWindow(n, 0) | FirstKeys(n + 1),
    ],
)
def test_integers_that_change_from_call_to_call_are_traced(make):
    """torch.compile traces an integer argument as a symbol from its second value on."""
    torch._dynamo.reset()
    traced = torch.compile(lambda x, n: (x + 1, make(n).source), fullgraph=True, backend="aot_eager")
    for n in (3, 4, 7):
        assert traced(torch.zeros(1), n)[1] == make(n).source


def test_text_that_nests_too_deep_is_named():
    with pytest.raises(ValueError, match=r"^mask text"):
        parse("~" * 5000 + "Causal()")
    with pytest.raises(ValueError, match=r"^mask text"):
        parse("(" * 500 + "Causal()" + ")" * 500)


LONG = {
    "a chain": ("&".join(["Causal()"] * 11_200), "joins too many masks"),
    "complements": ("~" * 100_000 + "Causal()", "nests too deep"),
    "signs": ("Causal(offset=" + "-" * 100_000 + "1)", "nests too deep"),
    "brackets": ("(" * 50_000 + "Causal()" + ")" * 50_000, "is not an expression"),
    "documents in documents": ("Documents([0,3],inner=" * 4_500 + "Causal()" + ")" * 4_500, "is not an expression"),
    "a name": ("x" * 100_000, "is not understood"),
    "calls": ("Causal()" + "()" * 50_000, "nests too deep"),
}


@pytest.mark.parametrize("what", LONG)
def test_100_000_signs_that_are_no_mask_are_refused_in_a_sentence(what):
    text, words = LONG[what]
    with pytest.raises(ValueError, match=words) as caught:
        parse(text)
    assert len(str(caught.value)) < 1000


def test_100_000_signs_that_are_a_mask():
    ends = list(range(17_000))
    assert len(text := f"Documents({ends})".replace(" ", "")) > 90_000
    assert parse(text) == Documents(ends)
