"""The set `decode`: its cells, rotating caches, the gate, rows, tables and charts; on a CPU with small caches."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

from tilewise.bench import runner, tables
from tilewise.bench.gate import DecodeGate
from tilewise.bench.peers import FlashAttentionDecode, FlashInfer, SdpaDecode, TilewiseDecode, find_for_decode, known_for_decode
from tilewise.bench.plots import decode_svg, save_decoding
from tilewise.bench.runner import Timing, run_decode
from tilewise.bench.sets.decode import COLD_BYTES, DECODE, MOST_COPIES, Cell, Pool, latent_cells, prefix_cell, ragged_cells, title_of
from tilewise.bench.sets.decode import decode_cells as cells_of_set
from tilewise.bench.store import append, load
from tilewise.bench.tables.best_peer import WHY, _us_of, cells_of_decode, decode_tables, fnmatchcase, rungs_table
from tilewise.cli import grammar

CPU = torch.device("cpu")
SMALL = {"heads_q": 4, "heads_k": 2, "head_dim": 16, "dtype": torch.float32}
CELLS = [
    Cell(lengths=(20, 20), **SMALL),
    Cell(lengths=(20, 20), page=8, **SMALL),
    Cell(lengths=(5, 40, 17), page=8, new=4, **SMALL),
    Cell(lengths=(24, 24, 24), page=8, prefix=16, **SMALL),
]
QUICK = Timing(budget_s=0.0)


@pytest.fixture(scope="module")
def rows():
    return run_decode(CELLS, [TilewiseDecode(), SdpaDecode("math"), SdpaDecode("cudnn"), FlashInfer()], device=CPU, timing=QUICK)


def test_the_set_is_what_it_says():
    cells = cells_of_set()
    assert len({cell.title for cell in cells}) == len(cells) == 2 * 4 * 4 * 20 + 7 + 20
    assert {(cell.heads_q, cell.heads_k) for cell in cells if not cell.latent} == {(32, 8), (64, 8), (32, 32), (32, 1)}
    assert {(cell.heads_q, cell.page, cell.head_dim, cell.head_dim_v) for cell in cells if cell.latent} == {
        (heads, 64, 576, 512) for heads in (16, 128)
    }
    assert {cell.new for cell in cells} == {1, 4} and {cell.page for cell in cells} == {0, 16, 64, 256}
    most = 1 << 30
    assert [cell for cell in cells if cell.copy_bytes <= most] == cells_of_set(most)
    assert all(cell.copy_bytes <= most for cell in cells_of_set(most)) and 0 < len(cells_of_set(most)) < len(cells)


def test_ragged_batches_and_the_prefix():
    lengths = {(cell.batch, cell.page): cell.lengths for cell in ragged_cells()}
    assert {batch: max(lengths[batch, 16]) // 1000 for batch in (64, 16, 256)} == {64: 65, 16: 50, 256: 14}
    assert all(lengths[batch, 16] == lengths[batch, 64] for batch in (64, 16, 256))
    cell = prefix_cell()
    assert (cell.tokens, cell.kind) == (8192 + 64 * 1024, "prefix") and cell.pages == 128 + 64 * 16


def test_a_latent_cache_is_one_cache():
    cell = Cell(lengths=(20, 20), heads_q=4, heads_k=1, head_dim=24, head_dim_v=16, page=8, dtype=torch.float32)
    assert (cell.title, cell.case["head_dim_v"]) == ("b2 latent-20 4:1 p8 q1", 16)
    assert cell.bytes == 2 * 20 * 24 * 4 and cell.copy_bytes == 6 * 8 * 24 * 4 and cell.flops == 2 * 2 * 20 * 4 * (24 + 16)
    caches = Pool(CPU).caches(cell)
    k, v = caches.copies[0]
    assert k.data_ptr() == v.data_ptr() and (k.shape[-1], v.shape[-1]) == (24, 16)
    assert caches.keys(0, 1, slice(0, 1))[1].shape == (20, 1, 16)
    DecodeGate(caches).verify(TilewiseDecode().prepare(caches))
    with pytest.raises(AssertionError, match="O is"):
        DecodeGate(caches).verify(lambda copy: caches.q)
    with pytest.raises(ValueError, match="a latent cache has one key head, not 2"):
        replace(cell, heads_k=2)


def test_titles_cases_and_bytes():
    cell = Cell(lengths=(8192,) * 16, heads_q=32, heads_k=8, page=64)
    assert cell.title == "b16 8k 32:8 p64 q1"
    assert cell.bytes == cell.copy_bytes == 16 * 8192 * 8 * 128 * 2 * 2
    assert cell.flops == 4 * 16 * 8192 * 32 * 128
    assert replace(cell, new=2).flops == 4 * 16 * (2 * 8192 - 1) * 32 * 128
    assert cell.case["page"] == 64 and cell.case["direction"] == DECODE and cell.case["tokens"] == 16 * 8192
    assert CELLS[2].copy_bytes == 2 * 4 * (1 + 5 + 3) * 8 * 2 * 16


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"lengths": (3,), "new": 4}, "needs at least its 4 new tokens"),
        ({"lengths": (3, 5)}, "the batch is ragged; such a batch has pages"),
        ({"lengths": (30, 30), "prefix": 12, "page": 8}, "whole pages of 8"),
        ({"lengths": ()}, "lengths are"),
    ],
)
def test_cells_that_cannot_be_are_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        Cell(**SMALL | fields)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.title)
def test_caches_hold_each_sequence_in_every_copy(cell):
    caches = Pool(CPU, cold_bytes=3 * cell.bytes).caches(cell)
    assert len(caches.copies) == 3 and len({k.data_ptr() for pair in caches.copies for k in pair}) == 6
    if caches.table is not None:
        used = [set(caches.table[b, : -(-n // cell.page)].tolist()) for b, n in enumerate(cell.lengths)]
        assert all(len(pages) == -(-n // cell.page) for pages, n in zip(used, cell.lengths, strict=True))
        assert len(used[0] & used[1]) == cell.prefix // cell.page
        assert set().union(*used) == set(range(cell.pages))
    for copy in range(3):
        k, v = caches.keys(copy, cell.batch - 1, slice(1, 2))
        assert k.shape == v.shape == (cell.lengths[-1], 1, 16) and not torch.equal(k, v)
    assert not torch.equal(caches.keys(0, 0, slice(0, 1))[0], caches.keys(1, 0, slice(0, 1))[0])


def test_a_pool_grows_and_is_used_again():
    pool = Pool(CPU, cold_bytes=0)
    pool.caches(CELLS[0])
    first = pool.numbers[0]
    pool.caches(CELLS[0])
    assert pool.numbers[0] is first
    pool.caches(CELLS[2])
    assert pool.numbers[0].numel() > first.numel()


def test_rows_are_complete(rows):
    assert len(rows) == 16
    for row in rows:
        assert row.name == DECODE and row.bytes > 0 and row.flops > 0 and row.environment["torch"] == torch.__version__
        if row.impl == "tilewise":
            assert row.passed and row.clock == "wall" and row.samples >= 3 and row.error < 1e-5 and row.ceiling_share > 0
    reasons = {row.case["page"]: row.reason for row in rows if row.impl == "sdpa:math"}
    assert reasons[0] is None and "contiguous caches only" in reasons[8]
    assert all("torch has no cudnn kernel on a CPU" in row.reason for row in rows if row.impl == "sdpa:cudnn")
    assert all("flashinfer runs on CUDA devices only" in row.reason for row in rows if row.impl == "flashinfer")


def test_results_that_are_wrong_are_not_timed():
    class Wrong(TilewiseDecode):
        name = "wrong"

        def prepare(self, caches):
            right = super().prepare(caches)
            return lambda copy: right(copy) * 1.01

    class Blind(Wrong):
        """It reads what lies beyond a sequence's length."""

        name = "blind"

        def prepare(self, caches):
            return TilewiseDecode.prepare(self, replace(caches, seqlens=torch.full_like(caches.seqlens, 40)))

    class Failing(Wrong):
        name = "failing"

        def prepare(self, caches):
            raise RuntimeError("no kernel\nat all")

    wrong, blind, failing, right = run_decode(CELLS[2:3], [Wrong(), Blind(), Failing(), TilewiseDecode()], device=CPU, timing=QUICK)
    assert wrong.passed is False and wrong.median_s is None and wrong.reason.startswith("missed the tolerance")
    assert blind.passed is False
    assert failing.passed is None and failing.reason == "cannot run this: RuntimeError: no kernel"
    assert right.passed and right.median_s > 0


def test_the_gate_looks_at_the_longest_the_shortest_and_the_last():
    caches = Pool(CPU).caches(Cell(lengths=(9, 40, 5, 8, 17), page=8, **SMALL))
    gate, right = DecodeGate(caches), TilewiseDecode().prepare(caches)
    assert gate.sequences == [1, 2, 4]
    for b in gate.sequences:

        def bad(copy, b=b):
            o = right(copy).clone()
            o[b, 0, -1, 3] += 1.0
            return o

        with pytest.raises(AssertionError):
            gate.verify(bad)
    with pytest.raises(AssertionError, match="O is"):
        gate.verify(lambda copy: right(copy)[:1])


def test_a_cell_without_the_memory_says_so(monkeypatch):
    monkeypatch.setattr(Pool, "_numbers", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("too much")))
    (row,) = run_decode(CELLS[:1], [TilewiseDecode()], device=CPU, timing=QUICK)
    assert row.median_s is None and row.reason == "this workload cannot be measured: OutOfMemoryError: too much"


def test_calls_take_turns_with_the_copies():
    seen = []
    run = runner._next(seen.append, 3)
    for _ in range(7):
        run()
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    seen.clear()
    runner._all(seen.append, 3)()
    assert seen == [0, 1, 2]


def test_limit_keep_and_progress():
    kept, told = [], []
    rows = run_decode(CELLS[:2], [TilewiseDecode()], timing=QUICK, keep=kept.append, progress=lambda *each: told.append(each))
    assert [row for each in kept for row in each] == rows and told[-1] == (2, 2, "done")
    assert run_decode(CELLS, [TilewiseDecode()], timing=QUICK, limit_s=-1.0) == []


def test_contenders_by_name():
    assert [impl.name for impl in find_for_decode()] == list(dict.fromkeys(impl.name for impl in find_for_decode())) and {
        impl.name for impl in find_for_decode()
    } <= known_for_decode().keys()
    with pytest.raises(ValueError, match="impl is 'naive'; for the set decode it must be among tilewise"):
        find_for_decode("tilewise,naive")
    cuda = torch.device("cuda")
    assert "it takes pages of multiples of 256 tokens" in FlashAttentionDecode("fa2", "no_such", 256).why_not(CELLS[1], cuda)
    assert FlashAttentionDecode("fa2", "no_such", 256).why_not(CELLS[0], cuda) == ["no_such is not installed"]
    assert "it takes pages only" in FlashInfer().why_not(CELLS[0], cuda)
    for name in ("fa2", "fa4", "flashinfer", "flashinfer:xqa"):
        assert "it is not called with latent caches here" in known_for_decode()[name].why_not(latent_cells()[0], cuda)
    for name in ("fa3", "fa3:vllm"):
        assert "latent" not in str(known_for_decode()[name].why_not(latent_cells()[0], cuda))
    assert "it is called with one new token only" in known_for_decode()["flashinfer:xqa"].why_not(CELLS[2], cuda)
    d2 = known_for_decode()["d2"]
    assert (
        len(d2.why_not(CELLS[2], cuda)) == 2 and "d2 runs on a Hopper GPU" in d2.why_not(CELLS[0], CPU) and not d2.why_not(CELLS[0], cuda)
    )
    assert SdpaDecode("cudnn").why_not(CELLS[0], cuda) == [] and len(SdpaDecode("cudnn").why_not(CELLS[2], cuda)) == 2


def timed(rows, **more):
    """As on a GPU: each peer twice as fast as ours for one key head, else half as fast; TB/s are 2."""
    found = []
    for row in rows:
        seconds = row.bytes / 2e12
        found.append(replace(row, clock="graph", passed=True, reason=None, median_s=seconds, p10_s=seconds, p90_s=seconds, **more))
        slower = 0.5 if row.case["heads_k"] == 1 else 2.0
        found.append(replace(found[-1], impl="fa3", median_s=seconds * slower))
    return found


@pytest.fixture(scope="module")
def of_a_gpu():
    cells = [cell for cell in cells_of_set() if cell.longest in (1024, 8192) and cell.batch in (1, 16)]
    cells += [*ragged_cells()[:2], prefix_cell(), *latent_cells()[:2]]
    blank = [
        replace(runner._blank_of_cell(TilewiseDecode(), cell), environment={"device": "NVIDIA H100", "torch": "2", "date": "2026-01-01"})
        for cell in cells
    ]
    return timed(blank)


def test_tables(of_a_gpu):
    text = decode_tables(of_a_gpu)
    assert "32 query and 8 key heads of 128, 1 new token:" in text and "64 query and 8 key heads of 128, 4 new tokens:" in text
    us = 16 * 8192 * 8 * 128 * 4 / 2e6
    assert f"| 16 x 8k | {us:,.1f} (2.00) | {2 * us:,.1f} fa3 | 2.00 |" in text
    assert "A latent cache (MLA, 576 columns of which 512 are the values), 16 heads, 1 new token:" in text
    us = 16 * 4096 * 576 * 2 / 2e6
    assert f"| 16 x 4k | {us:,.1f} (2.00) | {16 * 16 * 4096 * 2 * 1088 / us / 1e6:,.0f} | {us / 2:,.1f} fa3 | 0.50 |" in text
    assert "Ragged batches" in text and "| b64 prefix-9k 32:8 p64 q1 | 73,728 |" in text
    assert "- adding up the pieces of one key head takes longer than reading its keys (0.50 to 0.50): b1 1k 32:1 p0 q1" in text
    assert "Ahead of the fastest peer in" in text and "Measured on NVIDIA H100" in text and "UNEXPLAINED" not in text
    assert decode_tables([]) == "Not measured yet."


def test_the_ladders_rungs_beside_others(of_a_gpu):
    assert rungs_table(of_a_gpu) == "Not measured yet."
    first = [row for row in of_a_gpu if row.case["page"] == 0 and row.case["seqlen_q"] == 1][:2]
    rungs = [replace(first[0], impl=name, median_s=first[0].median_s * times) for name, times in (("d1", 4.0), ("d2", 3.0))]
    us = first[0].median_s * 1e6
    text = rungs_table([*first, *rungs])
    assert f"| 1 x 1k, heads 32:8 | {4 * us:,.1f} (0.50) | {3 * us:,.1f} (0.67) | {us:,.1f} (2.00) | {2 * us:,.1f} (1.00) fa3 |" in text
    (cell,) = cells_of_decode([*first, *rungs])
    assert cell.best.impl == "fa3"


def test_every_pattern_of_why_is_of_a_cell():
    titles = [cell.title for cell in cells_of_set()]
    for pattern in WHY:
        assert any(fnmatchcase(title, pattern) for title in titles), pattern


def test_titles_of_rows_are_those_of_cells():
    for cell in [*CELLS, prefix_cell(), *ragged_cells()]:
        assert title_of(cell.case) == cell.title


def test_later_rows_replace_earlier_ones(of_a_gpu):
    mine = of_a_gpu[0]
    faster, wrong = replace(mine, median_s=mine.median_s / 2), replace(mine, clock="none", median_s=None, passed=False, reason="missed")
    (cell,) = cells_of_decode([mine, faster])
    assert cell.mine is faster
    (cell,) = cells_of_decode([mine, wrong])
    assert cell.mine is None and "wrong" in _us_of(cell)
    (cell,) = cells_of_decode([wrong, mine])
    assert cell.mine is mine


def test_the_table_between_markers(of_a_gpu, rows):
    text = "<!-- tilewise:begin decode:decode::h100 -->\n<!-- tilewise:end decode:decode::h100 -->\n"
    assert "| 16 x 8k |" in tables.fill(text, [*rows, *of_a_gpu])
    assert "Not measured yet." in tables.fill(text, rows)


def test_the_chart(of_a_gpu, rows, tmp_path):
    root = ET.fromstring(decode_svg(of_a_gpu))
    words = " ".join(root.itertext())
    assert "heads 32:8, contiguous" in words and "TB/s of K and V" in words and "16 sequences" in words and "fastest peer" in words
    assert [path.name for path in save_decoding(of_a_gpu, tmp_path)] == ["decode-nvidia-h100.svg"]
    with pytest.raises(ValueError, match="no row of decoding"):
        decode_svg([])


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tilewise.cli.decoding.decode_cells", lambda most: CELLS)
    out = tmp_path / "rows.jsonl"
    command = ["bench", "--set", "decode", "--device", "cpu", "--impl", "tilewise,sdpa:math", "--budget", "0.001", "--out", str(out)]
    assert grammar.main([*command, "--only", "b2 20 *"]) == 0
    assert {row.case["page"] for row in load(out)} == {0, 8} and "2 x 20" in capsys.readouterr().out
    assert grammar.main([*command, "--check", "--part", "1/2"]) == 0
    assert "passed" in capsys.readouterr().out
    assert grammar.main([*command, "--only", "b3 nothing"]) == grammar.USAGE
    assert "only is 'b3 nothing'" in capsys.readouterr().err
    assert grammar.main([*command, "--seqlen", "5"]) == grammar.USAGE
    assert "the set decode fixes its cells, so seqlen cannot be given" in capsys.readouterr().err


def test_contenders_that_take_none_of_the_cells_have_no_rows_but_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise.cli.decoding.decode_cells", lambda most: CELLS)
    monkeypatch.setattr("tilewise.cli.decoding.FOR_DECODE", "tilewise,fa2,flashinfer")  # of which GPUs alone have the last two
    command = ["bench", "--set", "decode", "--device", "cpu", "--check", "--only", "b2 20 *", "--out"]
    assert grammar.main([*command, str(tmp_path / "usual")]) == 0
    assert {row.impl for row in load(tmp_path / "usual")} == {"tilewise"}
    assert grammar.main([*command, str(tmp_path / "asked"), "--impl", "tilewise,fa2"]) == 0
    assert {row.impl for row in load(tmp_path / "asked")} == {"tilewise", "fa2"}
    monkeypatch.setattr("tilewise.cli.decoding.FOR_DECODE", "fa2,flashinfer")
    grammar.main([*command, str(tmp_path / "none")])
    assert {row.impl for row in load(tmp_path / "none")} == {"fa2", "flashinfer"} and all(row.reason for row in load(tmp_path / "none"))


def test_reports_draw_and_leave_out_what_charts_cannot_show(of_a_gpu, tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, of_a_gpu)
    page = tmp_path / "page.md"
    page.write_text("<!-- tilewise:begin decode:decode -->\n<!-- tilewise:end decode:decode -->\n")
    assert grammar.main(["report", str(path), "--docs", str(page), "--plots", str(tmp_path / "plots")]) == 0
    assert "| 16 x 8k |" in page.read_text()
    assert [each.name for each in (tmp_path / "plots").rglob("*.svg")] == ["decode-nvidia-h100.svg"]


def test_copies_are_cold(monkeypatch):
    cell = Cell(lengths=(1024,), heads_q=32, heads_k=8)
    assert COLD_BYTES < 160e6 + 1
    assert len(Pool(CPU, cold_bytes=10 * cell.bytes).caches(cell).copies) == 10
    assert MOST_COPIES * cell.bytes > 160e6
