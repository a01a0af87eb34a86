"""What the decode kernel covers, its configurations, and the workspace of launches."""

import itertools
from dataclasses import replace

import pytest
import torch
from decode_problems import BEHIND, DecodeCase, made, with_eight_bits

from tilewise.backends.hopper.decode import bound, config, extents, prefix
from tilewise.backends.hopper.decode import call as decoding
from tilewise.backends.hopper.decode.config import FEW_KEYS, IN_FLIGHT, RAW_STAGES, TILES, configure
from tilewise.masks import Causal, Full, PrefixLM, SlidingWindow
from tilewise.problem import Rotary
from tilewise.sm90 import jit, prebuilt

CALL = made(DecodeCase(lengths=(5, 9)))


def rotary(positions: int, half: int, interleaved: bool = False, dtype: torch.dtype = torch.float32) -> Rotary:
    return Rotary(*torch.zeros(2, positions, half, dtype=dtype), interleaved)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"q": CALL.q.float()},
            "it computes bf16 and fp16, and takes caches of q's dtype or of 8 bits, not torch.float32, torch.bfloat16 and torch.bfloat16",
        ),
        ({"v_cache": CALL.v_cache.half()}, "not torch.bfloat16, torch.bfloat16 and torch.float16"),
        ({"k_cache": CALL.k_cache.to(torch.int8)}, "not torch.bfloat16, torch.int8 and torch.bfloat16"),
        (
            {"q": CALL.q[..., :40], "k_cache": CALL.k_cache[..., :40].to(torch.int8), "v_cache": CALL.v_cache.to(torch.float8_e4m3fn)},
            "multiples of 16, not 40 and 64",
        ),
        ({"q": CALL.q[..., :60], "k_cache": CALL.k_cache[..., :60]}, "multiples of 8, not 60 and 64"),
        ({"v_cache": CALL.v_cache.repeat(1, 1, 1, 5)}, "up to 256 that are multiples of 8, not 64 and 320"),
        ({"mask": PrefixLM(3)}, "it takes masks of one band on the bottom right diagonal, not PrefixLM(3)"),
        ({"scale": -1.0}, "it takes a positive scale, not -1.0"),
        ({"split": 0}, "it takes a split of at least 1 key, not 0"),
        ({"q": CALL.q[:, :0]}, "there is nothing to read"),
        ({"rotary": rotary(9, 12)}, "it rotates pairs in multiples of 8, not 12, at 1 position or more, not 9"),
        ({"rotary": rotary(0, 12, True)}, "it rotates pairs in multiples of 4, not 12, at 1 position or more, not 0"),
        ({"rotary": rotary(9, 16, dtype=torch.float64)}, "of one dtype, bf16, fp16 or fp32, not torch.float64 and torch.float64"),
        ({"rotary": rotary(9, 16), "shared_prefix": 1 << 20}, "it rotates no queries with a common prefix"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_what_it_does_not_cover(changes, sentence):
    (broadcast,) = decoding.why_not(replace(CALL, **changes))
    assert broadcast.endswith(sentence)
    assert decoding.bind(replace(CALL, **changes)) is None


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_stages_are_what_memory_wants(dims):
    for page_size, few in ((None, False), (16, True), (5, False)):
        config = configure(torch.bfloat16, *dims, page_size, few)
        stage = 2 * config.tile_n * sum(dims)
        assert (config.kv_stages + 1) * stage > IN_FLIGHT and (config.kv_stages == 2 or config.kv_stages * stage <= IN_FLIGHT)


@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("page_size", [None, 4, 16])
def test_stages_of_eight_bits(dims, page_size):
    """No more bytes are asked for than of 16 bits; all fits into a multiprocessor's shared memory."""
    config = configure(torch.bfloat16, *dims, page_size, cached=(torch.float8_e4m3fn, torch.int8))
    tile = config.tile_n * sum(dims)
    assert config.kv_stages == 2 and config.load_stages == RAW_STAGES and RAW_STAGES * tile <= IN_FLIGHT
    assert (2 * config.kv_stages + config.load_stages) * tile + 4096 <= 227 * 1024
    assert sum(config.registers) == 3 * 168 and all(x % 8 == 0 for x in config.registers)


def test_scales_are_spread_over_sequences_and_heads():
    eight = CALL.k_cache.to(torch.float8_e4m3fn)
    for scale, kind, shape in (
        (None, "", None),
        (torch.ones(()), "head", (2, 2)),
        (torch.ones(2), "head", (2, 2)),
        (torch.ones(2, 2), "head", (2, 2)),
        (torch.ones(eight.shape[:3]), "token", eight.shape[:3]),
    ):
        call = replace(CALL, k_cache=eight, v_cache=eight, k_scale=scale)
        assert decoding.config_of(call).scales == (kind, "")
        found, none = bound.scales_of(call)
        assert none is None and (found is None if shape is None else found.shape == shape)
    by_sequence = replace(made(DecodeCase(lengths=(200, 200, 200), prefix=128)), k_scale=torch.ones(3, 2))
    assert not prefix.pays(by_sequence)


def test_tiles_are_small_where_keys_are_few():
    small, large = (
        made(DecodeCase(lengths=(FEW_KEYS // 2,), dims=(64, 64))),
        made(DecodeCase(lengths=(FEW_KEYS // 2 + 1,), dims=(64, 64))),
    )
    assert [decoding.config_of(call).tile_n for call in (small, large, replace(small, split=64))] == [64, 128, 128]
    assert decoding._key(small) != decoding._key(large) == decoding._key(replace(large, seqlens=large.seqlens - 1))


@pytest.mark.parametrize(
    ("page_size", "box"), [(None, 0), (1, 1), (4, 1), (5, 1), (12, 1), (8, 8), (24, 8), (16, 16), (48, 16), (64, 64), (256, 64)]
)
def test_boxes_of_pages(page_size, box):
    config = configure(torch.bfloat16, 128, 128, page_size)
    assert config.box == box and config.gathers == (box == 1)


def test_without_a_compiler_only_prebuilt_kernels_do(monkeypatch):
    monkeypatch.setattr(jit, "why_no_compiler", lambda: ["cutlass is not installed"])
    monkeypatch.setattr(prebuilt, "entry", lambda launch, config, arch: config.box == 0)
    assert not decoding.why_not(CALL)
    (broadcast,) = decoding.why_not(made(DecodeCase(lengths=(5, 9), page=16)))
    assert broadcast.startswith("there is no kernel at hand for hopper.decode.kernel") and "box=16" in broadcast


def test_a_prefix_pays_where_it_saves_a_launch_its_time(monkeypatch):
    call = made(DecodeCase(lengths=(200, 200, 200), prefix=128))
    assert not prefix.pays(call)
    monkeypatch.setattr(prefix, "LEAST_SAVED", 2 * 128 * 2 * (64 + 64) * 2)
    assert prefix.pays(call)
    assert not prefix.pays(replace(call, shared_prefix=127))
    eight = {name: getattr(call, name).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    assert not prefix.pays(replace(call, **eight))  # half as many bytes
    for changes in (
        {"alibi_slopes": torch.ones(1, 4)},
        {"leftpad": torch.zeros(3, dtype=torch.int32)},
        {"mask": SlidingWindow(9, 0) & Causal()},
    ):
        assert not prefix.pays(replace(call, **changes))


@pytest.mark.parametrize(
    ("heads_k", "columns"), [(1, 1), (3, 3), (8, 8), (7, 7), (32, 32), (40, 10), (48, 16), (131, 131), (264, 132), (134, 2)]
)
def test_columns_leave_few_multiprocessors_idle(heads_k, columns):
    assert decoding.columns(heads_k, 132) == columns


FITTED = [(1, 132, 132), (4, 132, 132), (5, 132, 130), (7, 132, 126), (9, 132, 126), (10, 132, 130), (64, 132, 128), (100, 132, 132)]
FITTED += [(132, 132, 132), (140, 132, 132), (256, 132, 128), (1000, 132, 132), (3, 16, 16), (5, 16, 16), (16, 16, 16), (31, 16, 16)]


@pytest.mark.parametrize(("units", "blocks", "expected"), FITTED)
def test_shares_end_with_units_where_few_multiprocessors_are_idle_then(units, blocks, expected):
    assert decoding.fitted(units, blocks) == expected


@pytest.mark.parametrize(
    ("case", "grid"),
    [
        (DecodeCase(lengths=(70,) * 64, heads=(4, 1)), (1, 128)),
        (DecodeCase(lengths=(70,) * 32, heads=(4, 2)), (2, 64)),
        (DecodeCase(lengths=(70,) * 64, heads=(4, 1), queries=(1,) * 64), (1, 128)),
        (DecodeCase(lengths=(300,) * 64, heads=(4, 1), queries=40), (1, 132)),  # later rows see more keys
        (DecodeCase(lengths=(300,) * 64, heads=(4, 1), queries=(40, *(1,) * 63)), (1, 132)),  # the host does not know how many units
        (DecodeCase(lengths=(70,) * 64, heads=(4, 1), split=64), (1, 132)),
    ],
    ids=str,
)
def test_thread_blocks_of_a_launch(case, grid, monkeypatch):
    monkeypatch.setattr(decoding.plan, "num_sms", lambda device: 132)
    call = made(case)
    assert decoding._need(call, decoding.config_of(call))[:2] == grid
    if case.split is None:
        assert decoding._need(call, decoding.config_of(call), decoding.Cut(fitted=False)).blocks == 132 // grid[0]


@pytest.mark.parametrize(
    ("heads", "queries", "dims", "least"),
    [
        ((4, 4), 1, (64, 64), 1),
        ((32, 1), 1, (128, 128), 1),
        ((64, 1), 1, (128, 128), 2),
        ((64, 1), 1, (128, 64), 1),
        ((32, 8), 16, (128, 128), 2),
        ((40, 1), 9, (256, 256), 4),
    ],
)
def test_pieces_of_many_numbers_are_few(heads, queries, dims, least, monkeypatch):
    """So many tiles each block has that has any; with a fixed split it makes no difference to pieces."""
    monkeypatch.setattr(decoding.plan, "num_sms", lambda device: 132)
    call = made(DecodeCase(lengths=(300,), heads=heads, queries=queries, dims=dims))
    config = decoding.config_of(call)
    cut = decoding.Cut(rows=config.tile_m)
    assert decoding._need(call, config, cut).least == least
    assert decoding._need(call, config, cut._replace(elements_per_extra_tile=1 << 20)).least == 1
    assert decoding._need(replace(call, split=64), config).least == 1


def test_shares_are_fitted_but_with_a_fixed_split(monkeypatch):
    monkeypatch.setattr(decoding.plan, "num_sms", lambda device: 132)
    call = made(DecodeCase(lengths=(300, 20), heads=(16, 1), dims=(128, 128)))
    split = replace(call, split=64)
    usual = decoding.config_of(call)
    assert [decoding._need(call, usual, decoding.Cut(solo_speedup_x4=alone)).solo_speedup_x4 for alone in (None, 0, 5)] == [
        usual.solo_speedup_x4,
        0,
        5,
    ]
    assert decoding._need(split, decoding.config_of(split)).solo_speedup_x4 == 0


OF_UNIT = [(1, 1024, 64), (1, 65_536, 64), (64, 1024, 64), (1, 65_537, 128), (256, 1024, 128)]  # sequences, tokens, rows of a unit at most


@pytest.mark.parametrize(("batch", "tokens", "expected"), OF_UNIT)
def test_rows_of_a_unit(batch, tokens, expected):
    assert config.rows_of_unit(batch * tokens) == expected


def test_calls_of_other_batches_are_no_repeats_of_each_other():
    """Whose units have other rows, or their launches other thread blocks."""
    one, more, larger = (made(DecodeCase(lengths=lengths, heads=(32, 1), dims=(16, 16))) for lengths in ((64,), (64,) * 4, (70_000,)))
    assert [extents.rows_of_unit(call) for call in (one, more, larger)] == [64, 64, 128]
    assert len({decoding._key(call) for call in (one, more, larger)}) == 3


def test_units_of_many_rows_have_those_of_two_products(monkeypatch):
    """However few keys there are."""
    monkeypatch.setattr(decoding.plan, "num_sms", lambda device: 132)
    for queries, rows in ((32, 64), (33, 128)):
        call = made(DecodeCase(lengths=(70,), queries=queries, heads=(8, 2)))
        assert extents.rows_of_unit(call) == rows and decoding._need(call, decoding.config_of(call)).rows == rows


def test_a_prefix_has_more_on_its_way_where_products_decide(monkeypatch):
    monkeypatch.setattr(prefix, "LEAST_SAVED", 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for batch, heads, stages in ((64, 8, 4), (32, 8, 2)):  # 256 and 128 rows
        call = made(DecodeCase(lengths=(20,) * batch, heads=(heads, 2), dims=(128, 128), page=16, prefix=16))
        (_, _, first), (_, _, rest) = decoding.kernels(call)
        assert (first.kv_stages, first.out, first.onto) == (stages, torch.float32, False)
        assert (rest.kv_stages, rest.out, rest.onto) == (decoding.config_of(call).kv_stages, None, True)


def test_a_fixed_split_has_whole_tiles_of_rows(monkeypatch):
    monkeypatch.setattr(decoding.plan, "num_sms", lambda device: 132)
    call = made(DecodeCase(lengths=(300,), queries=4, heads=(32, 1)))
    assert decoding._need(call, decoding.config_of(call)).rows == 64
    assert decoding._need(replace(call, split=64), decoding.config_of(replace(call, split=64))).rows == 128


CHUNK = {"consumers": 2, "causal_tiles": True} | config.CHUNK
ROWS = [
    (DecodeCase(lengths=(70,), heads=(8, 2)), {}),
    (DecodeCase(lengths=(70,), queries=16, heads=(8, 2)), {}),
    (DecodeCase(lengths=(70,), queries=17, heads=(8, 2)), {"consumers": 2}),  # one unit still
    (DecodeCase(lengths=(70,), queries=40, heads=(8, 2)), CHUNK),
    (DecodeCase(lengths=(70,), queries=40, heads=(8, 2), mask=Full()), {"consumers": 2} | config.CHUNK),
    (DecodeCase(lengths=(70,), queries=40, heads=(8, 2), page=4), {"causal_tiles": True}),  # threads gather
    (DecodeCase(lengths=(70,), queries=40, heads=(8, 2), dims=(256, 256)), {"causal_tiles": True}),
    (DecodeCase(lengths=(70,) * 30, queries=(1,) * 30, heads=(8, 2)), {}),  # of which one sequence might have all
    (DecodeCase(lengths=(70,) * 30, queries=(1,) * 10 + (0,) * 20, heads=(8, 2)), {}),
    (DecodeCase(lengths=(300,) * 30, queries=(1,) * 29 + (290,), heads=(8, 2)), CHUNK),
    (DecodeCase(lengths=(300,) * 30, queries=(1,) * 29 + (290,), heads=(8, 2), dims=(128, 128)), CHUNK | {"tile_n": 64}),
    (DecodeCase(lengths=(300,) * 30, queries=(1,) * 29 + (290,), heads=(8, 2), dims=(128, 128), split=64), CHUNK),
    (DecodeCase(lengths=(300,), queries=255, heads=(8, 2), dims=(128, 128)), CHUNK | {"tile_n": 64}),
    (DecodeCase(lengths=(300,), queries=256, heads=(8, 2), dims=(128, 128)), CHUNK),
    (DecodeCase(lengths=(70,), queries=80, heads=(16, 1), dims=(576, 512), latent=True), {}),
]


@pytest.mark.parametrize(("case", "expected"), ROWS, ids=str)
def test_how_many_rows_a_tile_of_keys_serves(case, expected):
    call = made(case)
    if call.cu_seqlens_q is not None:
        call = replace(call, q=call.q[:-BEHIND], max_seqlen_q=call.q.shape[0] - BEHIND)
    assert extents.rows_of(call) == expected
    if case.dims[0] == 64 and case.page != 4:
        assert extents.rows_of(with_eight_bits(call, (torch.float8_e4m3fn,) * 2, (None, None))[0]).get("consumers") is None
    assert {name: value for name, value in vars(decoding.config_of(call)).items() if name in expected} == expected


@pytest.mark.parametrize(("group", "rows", "tile_n"), list(itertools.product((1, 2, 3, 4, 7, 8, 16, 64), (8, 64, 128), (32, 64, 128))))
def test_steps_of_tiles_of_rows(group, rows, tile_n):
    """As few as have a number of tokens that is one of whole tiles."""
    step, rise = decoding.stairs_of(group, tile_n, rows)
    assert step * rows == (group * tile_n << rise)
    assert not any(n * rows % (group * tile_n) == 0 for n in range(1, step))
