"""Pictures of masks: the text exactly, the images by what they paint."""

import xml.etree.ElementTree

import pytest
import torch

from tilewise.masks import Causal, Dense, Documents, Full, PerHead, SlidingWindow
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
