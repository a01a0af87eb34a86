"""Every rung and every configuration that ships compiles for Hopper without a GPU, and the compiled code is what it says it is."""

import itertools
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward import tables as backward_tables
from tilewise.backends.hopper.backward.bias import call as bias_gradient
from tilewise.backends.hopper.forward import call as forward_call
from tilewise.backends.hopper.forward import config, rows
from tilewise.ladder import RUNGS, VARIANTS
from tilewise.sm90.jit import build, compiled, why_no_compiler

EVERY = {**RUNGS, **VARIANTS}
REMARKS = "remarks{ptx}"  # the compiler's notes, where it has something to say about warpgroup products; they take time
MOST_MOVED = 6  # numbers moved to uniform registers ahead of a group of products: stages; each product's descriptor would be many
WARPGROUP, MOST_REGISTERS, FILE = 128, 255, 65536  # threads; 32-bit registers of a thread, and of a multiprocessor


@cache
def inspector() -> Path | None:
    """NVIDIA's cuobjdump of the package nvidia-cuda-cuobjdump, or of a toolkit on the path."""
    try:
        files = distribution("nvidia-cuda-cuobjdump").files or []
    except PackageNotFoundError:
        files = []
    packaged = [Path(file.locate()) for file in files if file.name == "cuobjdump"]
    found = packaged[0] if packaged else shutil.which("cuobjdump")
    return Path(found) if found else None


pytestmark = [
    pytest.mark.skipif(bool(why_no_compiler()), reason="; ".join(why_no_compiler())),
    pytest.mark.skipif(inspector() is None, reason="cuobjdump is not installed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"),
]


@dataclass(frozen=True)
class Compiled:
    """One kernel: its configuration, what the compiler remarked, what the object needs, and its instructions."""

    config: object
    remarks: str
    usage: list[dict[str, int]]  # a kernel each
    code: list[str]  # instructions with their modifiers and operands

    def count(self, pattern: str) -> int:
        return sum(re.match(pattern, instruction) is not None for instruction in self.code)


@pytest.fixture(scope="module")
def compile_and_inspect(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    tool = folder / "cuobjdump"
    for name in ("cuobjdump", "nvdisasm"):  # the wheel may leave them without the right to execute
        if (source := inspector().with_name(name)).exists():
            shutil.copyfile(source, folder / name)
            (folder / name).chmod(0o755)

    def run(compile_it, config, capture) -> Compiled:
        capture.readouterr()
        kernel = compile_it()
        remarks = "".join(capture.readouterr())
        path = folder / "kernel.cubin"
        path.write_bytes(kernel.__cubin__)
        command, environment = [tool, "--dump-resource-usage", "-sass", path], {"PATH": str(folder)}
        dump = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        lines = (line for line in dump.splitlines() if "REG:" in line)
        usage = [{name: int(number) for name, number in re.findall(r"(\w+):(\d+)", line)} for line in lines]
        code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][^;]*);", dump, re.MULTILINE)
        return Compiled(config, remarks, usage, code)

    from cutlass.base_dsl import dsl

    # Asked for remarks, the DSL looks for the line of Python that each operation comes from: a third of the time. ptxas's name none.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsl, "_set_enable_frame_filtering", lambda enable: None)
        yield run


def inspect_rung(inspect, rung, head_dim: int, causal: bool, capture) -> Compiled:
    options = REMARKS if rung.name >= "k4" else ""
    config = rung.code.configure(head_dim, causal, **rung.choice)
    return inspect(lambda: rung.compiled(head_dim, causal, options), config, capture)


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
def test_compiled_code(name, head_dim, causal, compile_and_inspect, capfd):
    found = inspect_rung(compile_and_inspect, EVERY[name], head_dim, causal, capfd)
    level = name.partition(":")[0]

    assert len(found.usage) == (3 if level == "k1" else 1)
    check_nothing_spills(found)
    assert (found.count("UTMALDG") > 0) == (level >= "k3")
    if level < "k4":
        assert found.count("HGMMA|WARPGROUP") == 0
    else:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in found.remarks
        qk, pv = products(name, found.config)
        assert found.count("HGMMA") == qk * (head_dim // 16) + pv * (found.config.tile_n // 16)
        # One group of products ends with gsb0 on its last instruction; a serialised one has it on every instruction.
        assert found.count("HGMMA.*gsb0") == found.count("WARPGROUP.ARRIVE") == found.count("WARPGROUP.DEPBAR") == qk + pv
    if level < "k5" or level == "k5_1":  # whose producer keeps its registers
        assert found.count("USETMAXREG") == 0
    else:
        check_registers(found, found.config)


@pytest.mark.parametrize("shipped", config.shipped(torch.bfloat16), ids=str)
def test_shipped_configuration(shipped, compile_and_inspect, capfd):
    """The forward pass of backends/hopper: as a rung, with a loop for the masked tiles at each end of what its rows see, or for masked runs."""
    check_shipped(shipped, compile_and_inspect, capfd)


EVERY_CHANGE = {"softcap": True, "bias": torch.float32, "alibi": True, "diagonal": True, "sink": True}
CHANGED = [
    ((128, 128), "until", {"softcap": True}),
    ((128, 128), "all", {"bias": torch.bfloat16, "bias_pairs": True, "sink": True}),
    ((64, 64), "interval", {"alibi": True}),
    *((dims, ("all", "interval")[i % 2], EVERY_CHANGE) for i, dims in enumerate(config.TILES)),
]
CHANGED_TOO = [
    *((dims, sees, EVERY_CHANGE) for dims in config.TILES for sees in ("all", "interval")),
    *((dims, "until", {"softcap": True}) for dims in config.TILES),
    *((dims, "interval", {"bias": torch.bfloat16, "sink": True}) for dims in config.TILES),
]


@pytest.mark.parametrize(
    ("dims", "sees", "changes"), CHANGED + [pytest.param(*case, marks=pytest.mark.slow) for case in CHANGED_TOO if case not in CHANGED]
)
def test_changed_scores(dims, sees, changes, compile_and_inspect, capfd):
    """With what scores.py does between the product and the softmax."""
    check_shipped(config.configure(torch.bfloat16, *dims, sees, **changes), compile_and_inspect, capfd)


RUNS = [(dims, sees, EVERY_CHANGE) for dims in config.TILES for sees in ("rows", "runs")]


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "sees", "changes"), RUNS)
def test_changed_scores_under_masks_beyond_one_band(dims, sees, changes, compile_and_inspect, capfd):
    check_shipped(config.configure(torch.bfloat16, *dims, sees, **changes), compile_and_inspect, capfd)


def test_intervals_of_documents(compile_and_inspect, capfd):
    """The small kernels ahead of "rows"."""
    forward = rows.kernel(config.configure(torch.bfloat16, 128, 128, "rows"))
    backward = backward_tables.kernel(backward_config.configure(torch.bfloat16, 128, 128, "rows"))
    for kernel in (forward, backward):
        check_nothing_spills(compile_and_inspect(lambda kernel=kernel: build(*kernel, REMARKS), kernel[2], capfd))


def check_shipped(shipped, compile_and_inspect, capfd):
    found = compile_and_inspect(lambda: build(forward_call.LAUNCH, forward_call.arguments, shipped, REMARKS), shipped, capfd)
    check_nothing_spills(found)
    check_registers(found, shipped)
    check_descriptors(found)
    at_both_ends = shipped.sees in ("interval", "rows") and not shipped.pingpong
    loops = 1 + shipped.from_zero if shipped.sees == "all" else 2 + at_both_ends
    assert found.count("HGMMA.*gsb0") == found.count("WARPGROUP.ARRIVE") == found.count("WARPGROUP.DEPBAR") == 2 * (1 + loops)
    assert found.count("HGMMA") == (1 + loops) * (shipped.head_dim // 16 + shipped.tile_n // 16) and found.count("UTMALDG") > 0


def test_the_series_of_tanh():
    """In fp32, as the kernel evaluates it, against fp64."""
    from tilewise.backends.hopper.forward.scores import SMALL, TANH

    y = torch.linspace(1e-6, SMALL, 100_000)
    z = y * y
    series = y + y * (z * (TANH[0] + z * (TANH[1] + z * (TANH[2] + z * TANH[3]))))
    exact = y.double().tanh()
    assert ((series.double() - exact) / exact).abs().max() < 2.0**-22


SEES = ("all", "from", "interval", "rows", "runs")


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("dims", backward_config.TILES, ids=lambda x: str(x).replace(" ", ""))
def test_backward(dims, sees, compile_and_inspect, capfd):
    check_backward(many_keys(dims, sees, {}), compile_and_inspect, capfd)


def check_backward(shipped, compile_and_inspect, capfd):
    """Its kernels, the last launched first; the products of a step stand in the code once for each role."""
    found = compile_and_inspect(lambda: compiled(gradients.LAUNCH, gradients.arguments, shipped, REMARKS), shipped, capfd)
    alone = shipped.one_block and not shipped.repairs
    assert len(found.usage) == 3 - alone + shipped.repairs
    check_nothing_spills(found)
    main = found.usage[-2]
    check_registers(replace(found, usage=[main]), shipped, kernels=1 + shipped.dq_apart)
    groups, instructions = backward_products(shipped)
    assert found.count("HGMMA") == instructions and found.count("UTMALDG") > 0
    assert found.count("HGMMA.*gsb0") == found.count("WARPGROUP.ARRIVE") == groups


SHAPES = list(itertools.product(backward_config.TILES, SEES))


def few_keys(dims, sees, changes, dtype=torch.bfloat16):
    return backward_config.configure(dtype, *dims, sees, few=True, **changes)


def many_keys(dims, sees, changes):
    return backward_config.configure(torch.bfloat16, *dims, sees, **changes)


FEW = [shape for shape in SHAPES if few_keys(*shape, {}).one_block]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dims, sees", FEW, ids=lambda x: str(x).replace(" ", ""))
def test_backward_of_one_block_of_keys(dims, sees, dtype, compile_and_inspect, capfd):
    check_backward(few_keys(dims, sees, {}, dtype), compile_and_inspect, capfd)


# All but what `test_backward` compiles: bf16, from one query on.
STEPS = [(*what, least) for what, each in backward_config.LONG.items() for least, _ in each]
STEPS += [(dims, "from", backward_config.STAYS_UP_TO + 1) for dims in ((64, 64), (128, 128))]
DTYPES = torch.bfloat16, torch.float16
LONG = [(*step, dtype) for step in STEPS for dtype in DTYPES if (step[-1], dtype) != (1, torch.bfloat16)]


@pytest.mark.parametrize("dims, sees, least, dtype", LONG, ids=lambda x: str(x).replace(" ", ""))
def test_backward_of_long_sequences(dims, sees, least, dtype, compile_and_inspect, capfd):
    check_backward(backward_config.configure(dtype, *dims, sees, least), compile_and_inspect, capfd)


SMALLER = (40, 40), (72, 72), (104, 104), (136, 128)
OF_SMALLER_HEADS = [(dims, SEES[1:][i], 1) for i, dims in enumerate(SMALLER)]


@pytest.mark.parametrize(
    ("dims", "sees", "least"),
    [
        pytest.param(*case, marks=() if case in OF_SMALLER_HEADS else pytest.mark.slow)
        for case in itertools.product(SMALLER, SEES, (1, 1024, 8192))
    ],
    ids=lambda x: str(x).replace(" ", ""),
)
def test_backward_of_smaller_heads(dims, sees, least, compile_and_inspect, capfd):
    """Whose sums leave out what tiles have beyond them."""
    check_backward(backward_config.configure(torch.bfloat16, *dims, sees, least), compile_and_inspect, capfd)


BACKWARD_CHANGES = (
    {"softcap": True},
    {"alibi": True},
    {"bias": torch.bfloat16},
    {"bias": torch.float32, "alibi": True, "diagonal": True},
    {"softcap": True, "alibi": True},
    {"softcap": True, "bias": torch.float32, "alibi": True, "diagonal": True},
)
BACKWARD_CHANGED = [  # all at once for every head_dim, which takes the most registers, under one mask after another
    (dims, SEES[i % len(SEES)], BACKWARD_CHANGES[-1]) for i, dims in enumerate(backward_config.TILES)
]
BACKWARD_CHANGED_TOO = [(*shape, changes) for shape in SHAPES for changes in BACKWARD_CHANGES]
BACKWARD_CHANGED_SMALLER = list(itertools.product((*SMALLER, (200, 200)), SEES, BACKWARD_CHANGES[::5]))


@pytest.mark.parametrize(
    ("dims", "sees", "changes"),
    BACKWARD_CHANGED
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in BACKWARD_CHANGED_TOO + BACKWARD_CHANGED_SMALLER
        if case not in BACKWARD_CHANGED
    ],
)
def test_backward_of_changed_scores(dims, sees, changes, compile_and_inspect, capfd):
    """With what backward/scores.py does between the products."""
    check_changed(many_keys(dims, sees, changes), compile_and_inspect, capfd)


OF_FEW_KEYS = [case for case in BACKWARD_CHANGED_TOO if few_keys(*case) != many_keys(*case)]
MOST_WITH_TABLES = ((256, 256), "runs", BACKWARD_CHANGES[-1])


@pytest.mark.parametrize(
    ("dims", "sees", "changes"), [pytest.param(*case, marks=() if case == MOST_WITH_TABLES else pytest.mark.slow) for case in OF_FEW_KEYS]
)
def test_backward_of_changed_scores_and_one_block_of_keys(dims, sees, changes, compile_and_inspect, capfd):
    check_changed(few_keys(dims, sees, changes), compile_and_inspect, capfd)


def check_changed(shipped, compile_and_inspect, capfd):
    found = compile_and_inspect(lambda: build(gradients.LAUNCH, gradients.arguments, shipped, REMARKS), shipped, capfd)
    check_nothing_spills(found)
    assert found.count("HGMMA.*gsb0") == found.count("WARPGROUP.ARRIVE") > 0
    producer, consumer = shipped.registers
    assert producer + shipped.consumers * consumer <= max(usage["REG"] for usage in found.usage) * (1 + shipped.consumers)


SUMS = (True, True, 1, 1), (True, False, 4, 4), (False, True, 2, 2), (False, False, 3, 2)  # rows, whole, chunks, chunks_v
BIAS_GRADIENTS = [(SUMS[i % len(SUMS)], sees, i % 4 // 2) for i, sees in enumerate(("band", "rows", "runs") * 2)]


@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("sums", "sees", "everything"),
    [
        pytest.param(*case, marks=() if case in BIAS_GRADIENTS else pytest.mark.slow)
        for case in itertools.product(SUMS, ("band", "rows", "runs"), (0, 1))
    ],
    ids=str,
)
def test_gradient_of_a_bias(sums, sees, everything, bias, compile_and_inspect, capfd):
    """Its kernel has S and dP once each, by four instructions for the columns of a stage, and P under dP's."""
    rows, whole, chunks, chunks_v = sums
    changes = {"softcap": True, "alibi": True, "diagonal": True} if everything else {}
    shape = {"rows": rows, "whole": whole, "chunks": chunks, "chunks_v": chunks_v}
    shipped = bias_gradient.Config(dtype=torch.bfloat16, bias=bias, bias_pairs=rows and bias.itemsize == 2, sees=sees, **shape, **changes)
    found = compile_and_inspect(lambda: build(bias_gradient.LAUNCH, bias_gradient.arguments, shipped, REMARKS), shipped, capfd)
    check_nothing_spills(found)
    check_registers(found, shipped)
    check_descriptors(found)
    groups = chunks + chunks_v
    assert found.count("HGMMA") == 4 * groups and found.count("HGMMA.*gsb0") == found.count("WARPGROUP.ARRIVE") == groups
    waits = [i for i, each in enumerate(found.code) if re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x0", each)]
    exponentials = [i for i, each in enumerate(found.code) if each.startswith("MUFU.EX2")]
    assert len(waits) == 2 and max(exponentials) < min(waits)


def backward_products(shipped) -> tuple[int, int]:
    """Groups and instructions of S, dP, dV, dK and dQ. Where columns are split, each of two roles has S or dP ahead of the loop and in it, and a
    last step after it without; where dQ has a kernel of its own, each role has a score, dV and dK, and that kernel S, dP and dQ.
    """
    over_m, over_n = shipped.tile_m // 16, shipped.tile_n // 16
    ahead = shipped.head_dim // 16, shipped.head_dim_v // 16
    if shipped.dq_apart:
        from tilewise.backends.hopper.backward.by_queries import KEYS

        return 2 * 3 + 3, 2 * sum(ahead) + 4 * over_m + KEYS // 16
    if shipped.split == "columns":
        behind = 2 * over_m + shipped.dq_pieces * over_n
        return 2 * (2 + 2 * (2 + shipped.dq_pieces)), 2 * (sum(ahead) + 2 * behind)
    roles = 1 if shipped.dq_consumers == shipped.consumers else 2
    dQ = 1 + 2 * shipped.skips  # of tiles that see none of a warpgroup's keys, at either end of its walk, there is nothing else
    return 4 * roles + dQ, roles * (sum(ahead) + 2 * over_m) + dQ * over_n


def check_nothing_spills(found: Compiled):
    for usage in found.usage:
        assert usage["STACK"] == usage["LOCAL"] == 0 and usage["REG"] <= MOST_REGISTERS
    assert found.count(r"LDL|STL") == 0
    assert not re.findall(r"\(C7\d+\).*", found.remarks), "the compiler had to serialise, or to order, warpgroup products"


def check_descriptors(found: Compiled):
    """Operands in shared memory are named by uniform registers that are ready before a group of products begins.

    One branch on a number that ptxas takes for a thread's own, anywhere in the loop over units, puts the stages of the rings into vector registers,
    and then each product waits for its descriptor to be moved over (R2UR): a tenth more instructions.
    """
    groups, in_group = [], False
    for instruction in found.code:
        if instruction.startswith("WARPGROUP.ARRIVE"):
            groups.append(0)
            in_group = True
        elif in_group:
            groups[-1] += instruction.startswith("R2UR")
        in_group = in_group and not re.match("HGMMA.*gsb0", instruction)
    assert max(groups) <= MOST_MOVED, groups


def check_registers(found: Compiled, config, kernels: int = 1):
    """What setmaxnreg hands out is what Config says, and no more than the block was launched with, or it would wait for ever."""
    (usage,), (producer, consumer) = found.usage, config.registers
    launched = usage["REG"] * (1 + config.consumers)
    assert producer + config.consumers * consumer <= launched and launched * WARPGROUP * getattr(config, "blocks", 1) <= FILE
    operands = [
        int(each.rpartition(" ")[2] or each.split()[-1], 16) for each in map(str.strip, found.code) if each.startswith("USETMAXREG")
    ]
    assert Counter(operands) == Counter([producer, consumer] * kernels)


def test_a_wrong_kernel_is_seen(compile_and_inspect, capfd, monkeypatch):
    """Touching the sums between two products of a group makes the compiler serialise them; the gate must see that."""
    from tilewise.sm90.dsl import cute

    right = cute.gemm

    def gemm(atom, acc, *operands):
        right(atom, acc, *operands)
        acc[0] = acc[0] + 1.0

    monkeypatch.setattr(cute, "gemm", gemm)
    compiled.cache_clear()
    try:
        found = inspect_rung(compile_and_inspect, RUNGS["k4_2"], 64, True, capfd)
    finally:
        compiled.cache_clear()
    assert "(C7" in found.remarks and found.count("HGMMA.*gsb0") > sum(products("k4_2", found.config))


def test_what_changes_from_call_to_call_is_no_part_of_the_key():
    """One object for every length and batch: the key is the rung's configuration, which has no field for either."""
    rung = RUNGS["k5"]
    assert rung.compiled(64, False) is rung.compiled(64, False)
    for each in EVERY.values():
        fields = set(vars(each.code.configure(64, False, **each.choice)))
        assert fields <= {"head_dim", "causal", "tile_m", "tile_n", "kv_stages", "pingpong"}, each.name
