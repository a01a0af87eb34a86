"""Every rung and every configuration that ships compiles for Hopper without a GPU, and the compiled code is what it says it is.

What is asserted is measured on compiled objects; of kernels whose sources have not changed it is read from the table kernels.json (kernel_facts.py),
and a few kernels, other ones at every change, are compiled anew and have to agree with it.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import kernel_facts
import pytest
import torch
from kernel_facts import Facts, inspector
from kernel_inventory import (
    APART,
    APART_TOO,
    APPEND,
    BACKWARD_CHANGED,
    BACKWARD_CHANGED_TOO,
    BIAS_GRADIENTS,
    BIAS_GRADIENTS_TOO,
    BIASES,
    CHANGED,
    CHANGED_TOO,
    DECODE,
    DECODE_TOO,
    DTYPES,
    EIGHT_BITS,
    EIGHT_BITS_TOO,
    EVERY,
    FEW,
    LONG,
    MOST_WITH_TABLES,
    OF_FEW_KEYS_TOO,
    OF_SMALLER_HEADS,
    OF_SMALLER_HEADS_TOO,
    QUANTISERS,
    REPAIRS,
    REPAIRS_TOO,
    RUNS,
    SEES,
    SHIPPED,
    TOKENS,
    TOKENS_TOO,
    TRANSPOSERS,
    WIDE_KEYS,
    WIDE_KEYS_TOO,
    WIDE_VALUES,
    WIDE_VALUES_TOO,
    Kernel,
    block_per_q_head,
    changed_forward,
    fast,
    few_keys,
    many_keys,
    of_append,
    of_backward,
    of_backward_rung,
    of_bias,
    of_decode,
    of_decode_rung,
    of_eight_bits,
    of_forward,
    of_intervals,
    of_length,
    of_quantiser,
    of_rung,
    of_sinks,
    of_tokens,
    of_transposer,
    of_wide_values,
)

from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.decode.config import LAUNCHED
from tilewise.backends.hopper.forward import hidden
from tilewise.ladder import BACKWARD_RUNGS, DECODE_RUNGS, RUNGS
from tilewise.sm90.jit import why_no_compiler

MOST_MOVED = 6  # numbers moved to uniform registers ahead of a group of products: stages; each product's descriptor would be many
WARPGROUP, MOST_REGISTERS, FILE = 128, 255, 65536  # threads; 32-bit registers of a thread, and of a multiprocessor
COMPILED_ANEW = 3
THREADS_OF_REPAIR = 256
NOTHING_SPILLED = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"

pytestmark = [
    pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler())),
    pytest.mark.skipif(inspector() is None, reason="cuobjdump is not installed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"),
]


@pytest.fixture(scope="module")
def table() -> dict[str, dict]:
    return kernel_facts.rows()


@pytest.fixture
def anew(capfd):
    """Facts of a kernel that is compiled here and now."""
    return lambda kernel: kernel_facts.measured(kernel, lambda: "".join(capfd.readouterr()))


@pytest.fixture
def inspect(table, anew):
    """Facts of a kernel: the table's if nothing that it is made from has changed, or those of one compiled here."""

    def run(kernel: Kernel) -> Facts:
        if found := kernel_facts.known(kernel, table):
            return found
        warnings.warn(
            "kernels.json lacks kernels as they are now, which takes seconds each; tools/gpu/kernel_table.py renews it", stacklevel=1
        )
        return anew(kernel)

    return run


def slow(cases: list) -> list:
    """Seconds each where the table has no row, and there are hundreds."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def short(x) -> str:
    return str(x).replace(" ", "")


def products(name: str, config) -> tuple[int, int]:
    """How often S = Q K^T and O += P V stand in the code: masked and unmasked tiles are loops of their own, each compiled once."""
    if name.startswith("k4_1"):
        return 1, 0
    if name.startswith(("k4_2", "k5", "k6_1")):
        return 2, 2
    loops = 2 if config.causal else 1  # without causal mask only the first tile is masked, and it is ahead of the loop
    return 1 + loops, loops + 1


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", EVERY)
def test_compiled_code(name, head_dim, causal, inspect):
    kernel = of_rung(name, head_dim, causal)
    check_rung(name, kernel.config, inspect(kernel))


def check_rung(name: str, config, found: Facts):
    level, counts = name.partition(":")[0], found.counts
    assert len(found.usage) == (3 if level == "k1" else 1)
    check_nothing_spills(found)
    assert (counts["UTMALDG"] > 0) == (level >= "k3")
    if level < "k4":
        assert counts["HGMMA"] == counts["WARPGROUP"] == 0
    else:
        assert found.spills == [NOTHING_SPILLED]
        qk, pv = products(name, config)
        (kind, other), depth = (("QGMMA", "HGMMA"), 32) if EVERY[name].in_eight_bits else (("HGMMA", "QGMMA"), 16)
        assert counts[kind] == qk * (config.head_dim // depth) + pv * (config.tile_n // depth) and counts[other] == counts["IGMMA"] == 0
        if EVERY[
            name
        ].in_eight_bits:  # a word of P is two conversions of two numbers each, which half of the words take one more instruction to join
            assert counts["E4M3"] == pv * config.tile_n // 4 and counts["PRMT"] <= pv * (config.tile_n // 8 + 4)
        # One group of products ends with gsb0 on its last instruction; a serialised one has it on every instruction.
        assert counts["gsb0"] == counts["ARRIVE"] == counts["DEPBAR"] == qk + pv
    if level < "k5" or level == "k5_1":  # whose producer keeps its registers
        assert found.registers == []
    else:
        check_registers(found, config)


@pytest.mark.parametrize("name", DECODE_RUNGS)
def test_decode_rungs(name, inspect):
    """As K5.1: both products twice, in the loop of masked tiles and in the other. D1 has two kernels."""
    kernel = of_decode_rung(name)
    found, config = inspect(kernel), kernel.config
    assert len(found.usage) == (2 if name == "d1" else 1)
    check_nothing_spills(found)
    assert found.counts["UTMALDG"] == 3 * config.head_dim // 64  # boxes of 128 bytes
    assert found.counts["HGMMA"] == 2 * (config.head_dim // 16 + config.tile_n // 16)
    assert found.counts["gsb0"] == found.counts["ARRIVE"] == found.counts["DEPBAR"] == 4


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", BACKWARD_RUNGS)
def test_backward_rungs(name, head_dim, causal, inspect):
    """Five products, each once; and `prepare`, the kernel beside."""
    kernel = of_backward_rung(name, head_dim, causal)
    found, config = inspect(kernel), kernel.config
    assert len(found.usage) == 2
    check_nothing_spills(found)
    assert found.spills == [NOTHING_SPILLED]
    narrow = head_dim * config.tile_m // config.tile_n == 32  # columns of dQ a warpgroup, and so K's boxes
    assert (
        found.counts["UTMALDG"] == (6 if name == "b1" else 4 + narrow) * head_dim // 64
    )  # B1 loads at two places, ahead of the loop and in it
    assert found.counts["HGMMA"] == 2 * head_dim // 16 + 2 * config.tile_m // 16 + config.tile_n // 16
    assert found.counts["gsb0"] == found.counts["ARRIVE"] == 5
    if name == "b1":
        assert found.registers == []
    else:
        check_registers(replace(found, usage=found.usage[:1]), config)


@pytest.mark.parametrize("shipped", SHIPPED, ids=str)
def test_shipped_configuration(shipped, inspect):
    """The forward pass of backends/hopper: as a rung, with a loop for the masked tiles at each end of what its rows see, or for masked runs."""
    check_shipped(of_forward(shipped), inspect)


@pytest.mark.parametrize(("dims", "mask_kind", "changes"), CHANGED + slow([case for case in CHANGED_TOO if case not in CHANGED]))
def test_changed_scores(dims, mask_kind, changes, inspect):
    """With what scores/logits.py does between the product and the softmax."""
    check_shipped(changed_forward(dims, mask_kind, changes), inspect)


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "mask_kind", "changes"), RUNS)
def test_changed_scores_under_masks_beyond_one_band(dims, mask_kind, changes, inspect):
    check_shipped(changed_forward(dims, mask_kind, changes), inspect)


def test_intervals_of_documents(inspect):
    """The small kernels ahead of "varlen"."""
    for kernel in of_intervals():
        check_nothing_spills(inspect(kernel))


def test_gradients_of_sinks(inspect):
    for kernel in of_sinks():
        check_nothing_spills(inspect(kernel))


@pytest.mark.parametrize(("dims", "page_size", "changes"), DECODE + slow(DECODE_TOO), ids=str)
def test_decode(dims, page_size, changes, inspect):
    """Both products once, in one loop, of a latent cache the second once for each half of O; where the softmax lies under the tile before, in three
    loops, and the first of them before and the second behind these. Small pages are loaded by threads.
    """
    kernel = of_decode(dims, page_size, changes)
    config, found = kernel.config, inspect(kernel)
    check_nothing_spills(found)
    check_descriptors(found)
    halves = 2 if config.latent else 1  # of O; and Q K^T of a latent tile is issued in two parts
    times = 4 if config.overlap else 1
    assert found.counts["gsb0"] == found.counts["ARRIVE"] == times * 2 * halves
    assert found.counts["DEPBAR 0"] == (times + 1 if config.overlap else 1 + halves)
    assert found.counts["HGMMA"] == times * (config.head_dim // 16 + halves * config.tile_n // 16)
    assert (found.counts["UTMALDG"] == 0) == config.gathers
    if config.latent or config.three:  # or a warpgroup waits for ever for registers that there are not
        asked = found.registers if len(found.registers) == 3 else [*found.registers, found.registers[-1]]
        assert sum(asked) <= 3 * found.usage[0]["REG"] == LAUNCHED


@pytest.mark.parametrize("changes", APPEND, ids=str)
def test_append(changes, inspect):
    found = inspect(of_append(changes))
    check_nothing_spills(found)
    assert found.counts["HGMMA"] == 0


@pytest.mark.parametrize(("dtype", "head_dim", "mask_kind", "centred", "fields"), EIGHT_BITS + slow(EIGHT_BITS_TOO), ids=str)
def test_forward_in_eight_bits(dtype, head_dim, mask_kind, centred, fields, inspect):
    """As the forward pass; Q K^T in the dtype, P V in e4m3, 32 numbers an instruction. P is rounded by two conversions a word, of which half take one
    more instruction to join.
    """
    check_eight_bits(of_eight_bits(dtype, head_dim, mask_kind, centred, fields), inspect)


@pytest.mark.parametrize(("dtype", "dims", "mask_kind", "tokens"), TOKENS + slow(TOKENS_TOO), ids=str)
def test_forward_in_eight_bits_with_scales_of_tokens(dtype, dims, mask_kind, tokens, inspect):
    check_eight_bits(of_tokens(dtype, dims, mask_kind, tokens), inspect)


def check_eight_bits(kernel: Kernel, inspect):
    config, found = kernel.config, inspect(kernel)
    check_nothing_spills(found)
    check_registers(found, config)
    check_descriptors(found)
    loops, counts = {"full": 1, "causal": 2, "tiles": 2}.get(config.mask_kind, 2 + (not config.pingpong)), found.counts
    groups = 1 + loops if config.pieces == 1 else max(loops, 2)  # in pieces, the first tile has no code of its own
    scores, values = groups * config.head_dim // 32, groups * config.pieces * config.tile_n // 32
    integers = config.dtype == torch.int8
    assert counts["IGMMA"] == integers * scores and counts["QGMMA"] == values + (not integers) * scores and counts["HGMMA"] == 0
    assert counts["gsb0"] == counts["ARRIVE"] == counts["DEPBAR"] == (1 + config.pieces) * groups
    bytes_of_hidden = hidden.WIDE * config.hides  # numbers of V that a lane takes out of words, where some rows do not see them
    joined = config.tile_n // (4 if config.tokens_k or config.tiles_of_values else 8)  # words, at most
    assert counts["E4M3"] == groups * config.tile_n // 4 and counts["PRMT"] <= groups * (joined + 8) + bytes_of_hidden
    assert counts["UTMALDG"] > 0


@pytest.mark.parametrize(("dims", "mask_kind", "long", "changes"), WIDE_VALUES + slow(WIDE_VALUES_TOO), ids=str)
def test_forward_in_eight_and_sixteen_bits(dims, mask_kind, long, changes, inspect):
    """Q K^T in int8, 32 numbers an instruction; P V as in 16 bits, 16 an instruction; nothing is rounded to 8 bits."""
    kernel = of_wide_values(dims, mask_kind, long, changes)
    config, found = kernel.config, inspect(kernel)
    check_nothing_spills(found)
    check_registers(found, config)
    check_descriptors(found)
    loops = {"full": 1, "causal": 2, "tiles": 2}.get(mask_kind, 2 + (not config.pingpong))
    groups, counts = 1 + loops, found.counts
    assert counts["IGMMA"] == groups * config.head_dim // 32 and counts["HGMMA"] == groups * config.tile_n // 16
    assert counts["gsb0"] == counts["ARRIVE"] == counts["DEPBAR"] == 2 * groups
    assert counts["QGMMA"] == counts["E4M3"] == 0 and counts["UTMALDG"] > 0


@pytest.mark.parametrize(("dtype", "head_dim", "values"), [*QUANTISERS[:1], *slow(QUANTISERS[1:])], ids=str)
def test_quantiser(dtype, head_dim, values, inspect):
    found = inspect(of_quantiser(dtype, head_dim, values))
    assert len(found.usage) == 2
    check_nothing_spills(found)


@pytest.mark.parametrize(("head_dim", "tokens"), TRANSPOSERS, ids=str)
def test_transposer(head_dim, tokens, inspect):
    check_nothing_spills(inspect(of_transposer(head_dim, tokens)))


def check_shipped(kernel: Kernel, inspect):
    shipped, found = kernel.config, inspect(kernel)
    check_nothing_spills(found)
    check_registers(found, shipped)
    check_descriptors(found)
    at_both_ends = shipped.mask_kind in ("band", "varlen") and not shipped.pingpong
    loops = 1 + shipped.from_zero if shipped.mask_kind == "full" else 2 + at_both_ends
    counts = found.counts
    assert counts["gsb0"] == counts["ARRIVE"] == counts["DEPBAR"] == 2 * (1 + loops)
    assert counts["HGMMA"] == (1 + loops) * (shipped.head_dim // 16 + shipped.tile_n // 16) and counts["UTMALDG"] > 0


def test_the_series_of_tanh():
    """In fp32, as the kernel evaluates it, against fp64."""
    from tilewise.backends.hopper.scores.logits import SMALL, TANH

    y = torch.linspace(1e-6, SMALL, 100_000)
    z = y * y
    series = y + y * (z * (TANH[0] + z * (TANH[1] + z * (TANH[2] + z * TANH[3]))))
    exact = y.double().tanh()
    assert ((series.double() - exact) / exact).abs().max() < 2.0**-22


@pytest.mark.parametrize("mask_kind", SEES)
@pytest.mark.parametrize("dims", backward_config.TILES, ids=short)
def test_backward(dims, mask_kind, inspect):
    check_backward(many_keys(dims, mask_kind, {}), inspect)


def check_backward(shipped, inspect):
    """Its kernels, the last launched first; the products of a step stand in the code once for each role."""
    found = inspect(of_backward(shipped))
    alone = shipped.one_block and not shipped.repairs
    assert len(found.usage) == 3 - alone
    check_nothing_spills(found)
    check_registers(replace(found, usage=[found.usage[-2]]), shipped, kernels=1 + shipped.separate_dq_kernel)
    groups, instructions = backward_products(shipped)
    assert found.counts["HGMMA"] == instructions and found.counts["UTMALDG"] > 0
    assert found.counts["gsb0"] == found.counts["ARRIVE"] == groups


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims, mask_kind", FEW, ids=short)
def test_backward_of_one_block_of_keys(dims, mask_kind, dtype, inspect):
    check_backward(few_keys(dims, mask_kind, {}, dtype), inspect)


@pytest.mark.parametrize("dims, mask_kind, least, dtype", LONG, ids=short)
def test_backward_of_long_sequences(dims, mask_kind, least, dtype, inspect):
    check_backward(of_length(dims, mask_kind, least, dtype), inspect)


@pytest.mark.parametrize("case", [*APART, *(pytest.param(case, marks=pytest.mark.slow) for case in APART_TOO)], ids=str)
def test_backward_of_heads_apart(case, inspect):
    """Each query head of a group by thread blocks of its own: sums of dK and dV are handed on at the end of a block of keys."""
    check_backward(block_per_q_head(*case), inspect)


@pytest.mark.parametrize(
    "config",
    [*WIDE_KEYS, *(pytest.param(each, marks=pytest.mark.slow) for each in WIDE_KEYS_TOO)],
    ids=lambda x: kernel_facts.key(of_backward(x)),
)
def test_backward_with_wide_keys(config, inspect):
    """dK and dV leave in fp32, from registers."""
    (check_changed if config.modified or config.dropout else check_backward)(config, inspect)


@pytest.mark.parametrize(("dims", "mask_kind", "least"), OF_SMALLER_HEADS + slow(OF_SMALLER_HEADS_TOO), ids=short)
def test_backward_of_smaller_heads(dims, mask_kind, least, inspect):
    """Whose sums leave out what tiles have beyond them."""
    check_backward(of_length(dims, mask_kind, least), inspect)


@pytest.mark.parametrize(("dims", "mask_kind", "changes"), BACKWARD_CHANGED + slow(BACKWARD_CHANGED_TOO))
def test_backward_of_changed_scores(dims, mask_kind, changes, inspect):
    """With what scores/again.py does between the products."""
    check_changed(many_keys(dims, mask_kind, changes), inspect)


@pytest.mark.parametrize(("dims", "mask_kind", "changes"), [MOST_WITH_TABLES, *slow(OF_FEW_KEYS_TOO)])
def test_backward_of_changed_scores_and_one_block_of_keys(dims, mask_kind, changes, inspect):
    check_changed(few_keys(dims, mask_kind, changes), inspect)


def check_changed(shipped, inspect):
    found = inspect(of_backward(shipped))
    check_nothing_spills(found)
    assert found.counts["gsb0"] == found.counts["ARRIVE"] > 0
    producer, consumer = shipped.registers
    assert producer + shipped.consumers * consumer <= max(usage["REG"] for usage in found.usage) * (1 + shipped.consumers)


@pytest.mark.parametrize("kernel", [*REPAIRS, *(pytest.param(each, marks=pytest.mark.slow) for each in REPAIRS_TOO)], ids=kernel_facts.key)
def test_repair(kernel, inspect):
    found = inspect(kernel)
    (usage,) = found.usage
    check_nothing_spills(found)
    assert usage["REG"] * THREADS_OF_REPAIR <= FILE


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize(("sums", "mask_kind", "everything"), BIAS_GRADIENTS + slow(BIAS_GRADIENTS_TOO), ids=str)
def test_gradient_of_a_bias(sums, mask_kind, everything, bias, inspect):
    """Its kernel has S and dP once each, by four instructions for the columns of a stage, and P under dP's."""
    kernel = of_bias(sums, mask_kind, everything, bias)
    found = inspect(kernel)
    check_nothing_spills(found)
    check_registers(found, kernel.config)
    check_descriptors(found)
    groups = kernel.config.chunks + kernel.config.chunks_v
    assert found.counts["HGMMA"] == 4 * groups and found.counts["gsb0"] == found.counts["ARRIVE"] == groups
    assert found.counts["DEPBAR 0"] == 2 and found.exponentials_first


def backward_products(shipped) -> tuple[int, int]:
    """Groups and instructions of S, dP, dV, dK and dQ. Where columns are split, each of two roles has S or dP ahead of the loop and in it, and a
    last step after it without; where dQ has a kernel of its own, each role has a score, dV and dK, and that kernel S, dP and dQ.
    """
    over_m, over_n = shipped.tile_m // 16, shipped.tile_n // 16
    ahead = shipped.head_dim // 16, shipped.head_dim_v // 16
    if shipped.separate_dq_kernel:
        from tilewise.backends.hopper.backward.by_queries import KEYS

        return 2 * 3 + 3, 2 * sum(ahead) + 4 * over_m + KEYS // 16
    if not shipped.by_keys:
        behind = 2 * over_m + shipped.dq_pieces * over_n
        return 2 * (2 + 2 * (2 + shipped.dq_pieces)), 2 * (sum(ahead) + 2 * behind)
    roles = 1 if shipped.dq_consumers == shipped.consumers else 2
    return 4 * roles + 1, roles * (sum(ahead) + 2 * over_m) + over_n


def check_nothing_spills(found: Facts):
    for usage in found.usage:
        assert usage["STACK"] == usage["LOCAL"] == 0 and usage["REG"] <= MOST_REGISTERS
    assert found.counts["LDL, STL"] == 0
    assert not found.serialised, "the compiler had to serialise, or to order, warpgroup products"


def check_descriptors(found: Facts):
    """Operands in shared memory are named by uniform registers that are ready before a group of products begins.

    One branch on a number that ptxas takes for a thread's own, anywhere in the loop over units, puts the stages of the rings into vector registers,
    and then each product waits for its descriptor to be moved over (R2UR): a tenth more instructions.
    """
    assert found.moved <= MOST_MOVED


def check_registers(found: Facts, config, kernels: int = 1):
    """What setmaxnreg hands out is what Config says, and no more than the block was launched with, or it would wait for ever."""
    (usage,), (producer, consumer) = found.usage, config.registers
    launched = usage["REG"] * (1 + config.consumers)
    assert producer + config.consumers * consumer <= launched and launched * WARPGROUP * getattr(config, "blocks", 1) <= FILE
    assert Counter(found.registers) == Counter([producer, consumer] * kernels)


def touched(gemm):
    """Touches the sums between two products of a group, which makes the compiler serialise them."""

    def wrong(atom, acc, *operands):
        gemm(atom, acc, *operands)
        acc[0] = acc[0] + 1.0

    return wrong


def test_a_wrong_kernel_is_seen(anew, monkeypatch):
    from tilewise.sm90.dsl import cute

    monkeypatch.setattr(cute, "gemm", touched(cute.gemm))
    kernel = of_rung("k4_2", 64, True)
    found = anew(kernel)
    assert found.serialised and found.counts["gsb0"] > sum(products("k4_2", kernel.config))
    with pytest.raises(AssertionError, match="serialise"):
        check_rung("k4_2", kernel.config, found)


@pytest.mark.parametrize("nth", range(COMPILED_ANEW))
def test_the_table_says_what_is_compiled(nth, anew, table):
    """Of a few kernels, other ones at every change of the table or of device code."""
    current = (kernel for kernel in kernel_facts.shuffled(fast()) if kernel_facts.known(kernel, table))
    kernel = next(itertools.islice(current, nth, None), None)
    if kernel is None:
        pytest.skip("the table has too few kernels as they are now: tools/gpu/kernel_table.py renews it")
    assert anew(kernel) == kernel_facts.known(kernel, table), f"{kernel_facts.key(kernel)} is not what kernels.json says"


@pytest.fixture
def source_of():
    """The digest of a kernel's sources, if a module of ours had another text."""

    def run(kernel: Kernel, module: str = "", change: Callable[[str], str] = str) -> str:
        read = kernel_facts.text_of
        forget()
        with mock.patch.object(kernel_facts, "text_of", lambda name: change(read(name)) if name == module else read(name)):
            return kernel_facts.source(kernel)

    def forget() -> None:
        for cached in (kernel_facts.parsed, kernel_facts.code_of, kernel_facts.imported, kernel_facts.reached):
            cached.cache_clear()

    yield run
    forget()


def test_what_a_kernel_is_made_from(source_of, monkeypatch):
    """Other code anywhere that its module leads to makes it another kernel, and so do another configuration, other arguments, another compiler; other
    comments do not, nor does code that leads nowhere near it.
    """
    kernel, wgmma = of_forward(SHIPPED[0]), "tilewise.sm90.wgmma"
    before = source_of(kernel)
    assert source_of(kernel, wgmma, lambda text: f"# Said.\n{text}  # said") == before
    assert source_of(kernel, wgmma, lambda text: text.replace('"""', '"""Said. ', 1)) == before
    assert source_of(kernel, "tilewise.ladder.k2_fused", lambda text: f"{text}x = 1\n") == before
    others = [
        source_of(kernel, wgmma, lambda text: text.replace("return ", "return 1 + ", 1)),
        source_of(kernel, "tilewise.backends.hopper.forward.config", lambda text: text.replace("// 64", "// 32", 1)),
        source_of(kernel._replace(config=replace(kernel.config, kv_stages=kernel.config.kv_stages + 1))),
        source_of(kernel._replace(arguments=lambda config: [*kernel.arguments(config), None])),
    ]
    monkeypatch.setattr(kernel_facts, "version", lambda name: "0")
    assert len({before, source_of(kernel), *others}) == 2 + len(others)


def test_a_stale_row_is_not_taken(table):
    kernel = of_forward(SHIPPED[0])
    facts = Facts("", [{"REG": 168, "STACK": 0, "LOCAL": 0}], {}, 0, [], [], [], True)
    row = kernel_facts.row(kernel, facts)
    assert kernel_facts.known(kernel, {kernel_facts.key(kernel): row}) == facts
    assert kernel_facts.known(kernel, {kernel_facts.key(kernel): row | {"source": "another"}}) is None


def test_what_changes_from_call_to_call_is_no_part_of_the_key():
    """One object for every length and batch: the key is the rung's configuration, which has no field for either."""
    rung = RUNGS["k5"]
    assert rung.compiled(64, False) is rung.compiled(64, False)
    for each in EVERY.values():
        fields = set(vars(each.code.configure(64, False, **each.choice)))
        assert fields <= {"head_dim", "causal", "tile_m", "tile_n", "kv_stages", "pingpong"}, each.name
