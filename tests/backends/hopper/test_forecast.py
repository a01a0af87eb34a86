"""What a configuration takes, and the ceiling of a call: arithmetic that can be done by hand."""

import math
from importlib import import_module

import pytest
import torch

from tilewise.backends.hopper import Hopper, forecast
from tilewise.backends.hopper.forward.config import TILES, Config, configure
from tilewise.backends.hopper.forward.plan import config_of
from tilewise.machine.sheets import H100
from tilewise.masks import Causal, Full, SlidingWindow
from tilewise.problem import Call
from tilewise.runtime.dispatch import choose

BF16 = torch.bfloat16


def plain(head_dim, head_dim_v, tile_m, tile_n, **fields):
    return Config(dtype=BF16, head_dim=head_dim, head_dim_v=head_dim_v, mask_kind="full", tile_m=tile_m, tile_n=tile_n, **fields)


def call(seqlen_q, seqlen_k=None, heads=16, head_dim=128, mask=None, batch=1):
    seqlen_k = seqlen_k or seqlen_q
    q, k = (torch.empty(batch, n, heads, head_dim, dtype=BF16, device="meta") for n in (seqlen_q, seqlen_k))
    return Call(q=q, k=k, v=k, mask=mask or Full(), scale=1.0)


@pytest.mark.parametrize(
    ("config", "products", "numbers", "shared"),
    [
        (plain(64, 64, 192, 128), 1536, 1536, 1216),
        (plain(128, 128, 128, 128), 2048, 1024, 1792),
        (plain(192, 128, 128, 128), 2560, 1024, 2304),
        (plain(192, 192, 128, 112), 2688, 896, 2400),
        (plain(256, 256, 128, 80), 2560, 640, 2432),
    ],
)
def test_clocks(config, products, numbers, shared):
    """By hand: 2 * tile_m * tile_n * (both head dims) / 4096; one exponential a number, and one a row for each of its threads; bytes / 128."""
    found = forecast.clocks(config)
    assert (found.products, found.shared_memory) == (products, shared)
    assert found.exponentials == numbers + config.tile_m * 4 / 16


def test_the_longest_limit_has_a_name():
    assert forecast.clocks(plain(64, 64, 192, 128)).longest == "exponentials"
    assert forecast.clocks(plain(128, 128, 128, 128)).longest == "products"
    assert forecast.clocks(plain(64, 256, 64, 128)).longest == "shared_memory"


@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("mask_kind", ["full", "causal", "band"])
def test_what_ships_fits(dims, mask_kind):
    config = configure(BF16, *dims, mask_kind)
    assert forecast.smem_bytes(config) <= config.shared_bytes
    producer, consumer = config.registers
    assert 128 * (producer + config.consumers * consumer) <= H100.registers


def test_whole_waves_reach_the_limit_of_a_multiprocessor():
    config = plain(128, 128, 128, 128)
    found = forecast.forecast(config, call(128 * 132, heads=1))
    assert found.units == 132 and found.waves == 1.0 and found.visited == 132 * 132 and found.limit == "products"
    assert math.isclose(found.flops_per_s, H100.peak[BF16])
    one_more = forecast.forecast(config, call(128 * 132 + 1, 128 * 132, heads=1))
    assert one_more.units == 133 and one_more.limit == "multiprocessors without work"
    assert math.isclose(one_more.flops_per_s, H100.peak[BF16] * (128 * 132 + 1) / (2 * 128 * 132))


def test_what_is_padded_or_masked_within_tiles_is_no_useful_work():
    config = configure(BF16, 72, 72, "full")  # as 96
    assert math.isclose(forecast.forecast(config, call(128 * 132, heads=1, head_dim=72)).flops_per_s, 0.75 * H100.peak[BF16])
    diagonal = forecast.forecast(configure(BF16, 128, 128, "band"), call(128 * 132, heads=1, mask=SlidingWindow(0, 0)))
    assert math.isclose(diagonal.flops_per_s, H100.peak[BF16] / 128)


def test_one_short_unit_leaves_the_rest_idle():
    found = forecast.forecast(configure(BF16, 128, 128, "causal"), call(1, 4096, heads=1, mask=Causal()))
    assert found.limit == "multiprocessors without work" and found.flops_per_s < H100.peak[BF16] / 132 / 100


def test_sentences():
    backend = Hopper()
    said = "\n".join(backend.details(call(4096, head_dim=72, mask=Causal())))
    config = config_of(call(4096, head_dim=72, mask=Causal()))
    assert f"{config.kv_stages} stages of {config.tile_n} keys, {config.consumers} warpgroups" in said
    assert f"{config.registers[1]} a computing thread" in said
    assert "head_dim 72, head_dim_v 72 are computed as 96, 96 (75% is useful work)" in said
    tiles = call(4096, head_dim=72).heads_q * -(-4096 // config.tile_m)
    assert f"{tiles} tiles of queries for 132 thread blocks, {tiles / 132:.2f} each" in said and "predicted ceiling: " in said
    assert "padding: none" in "\n".join(backend.details(call(4096)))


def test_heads_that_share_a_tile():
    q, k = (torch.empty(2, n, heads, 128, dtype=BF16, device="meta") for n, heads in ((1, 32), (4096, 4)))
    said = "\n".join(Hopper().details(Call(q=q, k=k, v=k, mask=Causal(), scale=1.0)))
    assert "packing: the query heads of a group are rows of one tile" in said and "waves: 8 tiles of queries" in said


def test_explain_prints_them(monkeypatch):
    explaining = import_module("tilewise.runtime.explain")  # the package has a function of this name

    class Here(Hopper):
        name = "here"

        def why_not(self, problem):
            return []

    monkeypatch.setattr(explaining, "choose", lambda problem, name: Here())
    q, k, v = (torch.zeros(1, 256, 2, 64, dtype=BF16) for _ in range(3))
    given = Call(q=q, k=k, v=v, mask=Causal(), scale=1.0)
    said = str(explaining.describe(given, None, []))
    assert "waves: 8 tiles of queries" in said and said.index("tiles: ") < said.index("registers: ") < said.index("visible pairs: ")
    monkeypatch.undo()
    assert explaining.describe(given, "reference", []).details == () and choose(given.problem, "reference").name == "reference"
