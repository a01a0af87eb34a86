"""`tilewise demo` on a GPU: the Hopper kernels train the model, forward and backward."""

import pytest
import torch

from tilewise.cli.grammar import main
from tilewise.sm90.jit import why_not_here

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not_here()), reason="; ".join(why_not_here()))]


def test_demo_runs_on_the_gpu_and_the_trainings_agree(tmp_path, capsys, monkeypatch):
    import tilewise

    devices = set()
    whole = tilewise.attention

    def watched(q, *rest, **options):
        devices.add((q.device.type, q.dtype))
        return whole(q, *rest, **options)

    monkeypatch.setattr(tilewise, "attention", watched)
    page = tmp_path / "page.html"
    assert main(["demo", "--steps", "10", "--batch", "2", "--context", "512", "--seqlens", "512,1024", "--out", str(page)]) == 0
    assert devices == {("cuda", torch.bfloat16)}
    assert "backend: hopper" in page.read_text(encoding="utf-8")
    assert "The two trainings agree" in capsys.readouterr().out
