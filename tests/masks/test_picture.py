"""Pictures of masks: the text exactly, the images by what they paint."""

import sys
import xml.etree.ElementTree

import pytest
import torch

from tilewise import explain
from tilewise.masks import Causal, Dense, Documents, Full, Padding, Part, PerHead, PrefixTree, SlidingWindow, notebook
from tilewise.masks.picture import COLOURS, FILLED, HIDDEN, PARTIAL, SKIPPED


def test_text_shows_a_character_a_tile():
    drawn = Documents([0, 4, 16], inner=Causal()).show(16, 16, tile_m=4, tile_n=4)
    assert drawn.splitlines() == [
        "+...",
        ".+..",
        ".#+.",
        ".##+",
        "tiles of 4 x 4: . 9 skipped, + 4 partial, # 3 full; 88 of 256 pairs visible (34.4%)",
    ]
    assert Causal().show(4, 4).splitlines()[:4] == ["#...", "##..", "###.", "####"]
    assert Full().show(0, 3) == "tiles of 1 x 1: . 0 skipped, + 0 partial, # 0 full; 0 of 0 pairs visible"
    assert len(Causal().show(1000, 1000).splitlines()[0]) == 32


def test_text_of_one_head_and_batch_entry():
    mask = PerHead({(0, 1): Causal(), (1, 2): Full()})
    assert mask.show(2, 2, head=0).startswith("#.\n##")
    assert mask.show(2, 2, head=1).startswith("##\n##")
    batched = Dense(torch.tensor([[[[True]]], [[[False]]]]))
    assert batched.show(1, 1, batch=1, head=5).startswith(".")
    with pytest.raises(ValueError, match=r"batch 0, head 2 is not there: the mask has 1 batch entries and 2 heads"):
        mask.show(2, 2, head=2)


def test_svg_is_a_document_with_text_and_an_image(tmp_path):
    path = tmp_path / "mask.svg"
    drawn = SlidingWindow(15, 0).show(64, 64, tile_m=8, tile_n=8, format="svg", path=path)
    assert path.read_text() == drawn
    words = [element.text for element in xml.etree.ElementTree.fromstring(drawn).iter() if element.tag.endswith("}text")]
    assert {"43 skipped", "14 partial", "7 full", "key", "query"} <= set(words)
    assert "tiles of 8 x 8; 904 of 4,096 pairs visible (22.1%)" in words
    assert "<image" in drawn
    assert drawn == SlidingWindow(15, 0).show(64, 64, tile_m=8, tile_n=8, format="svg")


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(64, 64), (16, 64), (64, 16), (0, 5), (4096, 4096)])
def test_png_of_any_shape(seqlen_q, seqlen_k):
    assert Causal().show(seqlen_q, seqlen_k, format="png").startswith(b"\x89PNG")


def test_the_image_paints_tiles_and_pairs():
    image = pytest.importorskip("matplotlib.image")
    import io

    drawn = Documents([0, 32, 128], inner=Causal()).show(128, 128, tile_m=32, tile_n=32, format="png")
    pixels = image.imread(io.BytesIO(drawn))[..., :3].reshape(-1, 3)
    paper = COLOURS[:, :3] * COLOURS[:, 3:] + (1 - COLOURS[:, 3:])
    share = [(abs(pixels - colour).max(axis=1) < 0.02).sum() for colour in paper]
    total = sum(share)
    # Of 16 tiles 3 are full and 4 partial, half of whose pairs are visible; lines and legend take a little away.
    for kind, tiles in ((SKIPPED, 9), (PARTIAL, 2), (FILLED, 3), (HIDDEN, 2)):
        assert abs(share[kind] / total - tiles / 16) < 0.02, (kind, share)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="format must be 'text', 'svg' or 'png', got 'gif'"):
        Causal().show(8, 8, format="gif")
    with pytest.raises(ValueError, match=r"tiles of 1 x 1 are too small for a picture of 4096 x 4096: at most 2048 a side"):
        Causal().show(4096, 4096, tile_m=1, tile_n=1)
    with pytest.raises(ValueError, match="tile_m and tile_n must be 1 or more, got -1 and 4"):
        Causal().show(8, 8, tile_m=-1, tile_n=4)


@pytest.mark.parametrize(
    "mask, lengths",
    [
        (Causal(), (32, 32)),
        (SlidingWindow(127, 0), (254, 254)),
        (Documents([0, 30, 100]) & SlidingWindow(7, 0), (100, 100)),
        (Documents([0, 30], [0, 50]), (30, 50)),
        (PrefixTree.group(48, [16, 20]), (84, 84)),
        (Dense(torch.ones(17, 40, dtype=torch.bool)), (17, 40)),
        (Dense(torch.ones(1, 40, dtype=torch.bool)), (32, 40)),
        (Padding(torch.tensor([5, 9])), (9, 9)),
        (Part(Causal(), 64, [(0, 32)]), (32, 64)),
        (PerHead({(0, 2): Causal(), (2, 4): Full()}), (32, 32)),
    ],
    ids=repr,
)
def test_a_notebook_shows_lengths_that_fit(mask, lengths):
    assert notebook.fitting(mask) == lengths
    shown = xml.etree.ElementTree.fromstring(mask._repr_html_().replace("xlink:href", "href"))
    caption = "".join(shown.find("figcaption").itertext())
    assert caption == f"{mask!r} at {lengths[0]:,} queries x {lengths[1]:,} keys"


def test_a_notebook_without_matplotlib_shows_characters(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.patches"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "<pre>" + Causal().show(32, 32) + "</pre>" in Causal()._repr_html_()


def test_a_notebook_shows_what_explain_gives():
    q = torch.randn(1, 200, 2, 16)
    given = explain(q, q, q, mask=Causal() & SlidingWindow(50, 0))
    shown = given._repr_html_()
    assert "<svg" in shown and f"tiles of {given.tiles.tile_m} x {given.tiles.tile_n}" in shown
    assert "SlidingWindow(50,0)" in shown and "at 200 queries x 200 keys" in shown
    assert all(f"<th style='text-align:left'>{name}</th>" in shown for name in ("backend", "passed over", "tiles", "visible pairs"))
    long = torch.zeros(1, 1, 1, 16).expand(1, 300_000, 1, 16)
    assert "16384 x 16384" in explain(long, long, long, causal=True)._repr_html_()  # its own tiles would be too many to draw
