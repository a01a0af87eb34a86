"""The kernels of the Triton backend that its compile gate holds to its rules: those that calls would launch on GPUs that need not be here."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton_decoding

from tilewise.backends.eight_bits import RECIPES
from tilewise.backends.triton import bound as bounds
from tilewise.backends.triton.config import CLASSES, INSTEAD, Config
from tilewise.backends.triton.kernels import backward, bias, forward
from tilewise.backends.triton.launch import Kernel
from tilewise.backends.triton.targets import COMPILED, Target
from tilewise.masks import Full, Part
from tilewise.problem import Call, Dropout

EIGHT_BITS = "centres", "quantise_q", "quantise_k", "largest_values", "quantise_v"
PASSES = {"forward": forward.forward, "dkdv": backward.dkdv, "dq": backward.dq}
AGAIN = "careful "
FAMILIES = "sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100"  # one GPU of each
OTHERS = [arch for arch in COMPILED if arch not in FAMILIES]
NARROW = "sm_89", "gfx942"  # with 99 and 64 KiB of shared memory
RARE = "sm_80", "sm_90", "gfx942"  # which stand for all where a kernel takes little, or is seldom run


class Case(NamedTuple):
    """One kernel of calls on one GPU, which launch those of PASSES once more, CAREFUL."""

    arch: str
    kernel: str
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    mask: str = "band"  # of decode and append how many queries a sequence has, and other features (triton_decoding.py)
    # Or "scores", with all that changes them, a bias but not; "softcap" and "alibi", each alone; "bias", or "odd" where its rows are no multiples of
    # 16; "dropout", "part" of that; "largest" scores; a recipe in 8 bits; "given" such; several with +.
    feature: str = "plain"
    aligned: bool = True
    chosen: Config | None = None  # in place of the table's (tools/triton_table.py --try)

    @property
    def target(self) -> Target:
        return Target(self.arch)

    @property
    def name(self) -> str:
        """For people, and of a row of kernels.json."""
        words = self.arch, self.kernel, str(self.dtype).removeprefix("torch."), str(self.head_dim), self.mask, self.feature
        return " ".join(words) + ("" if self.aligned else " unaligned")

    def bound(self) -> bounds.Bound:
        q, k = (torch.empty(1, 16, heads, self.head_dim, dtype=self.dtype, device="cpu") for heads in (2, 1))
        features = {
            "scores": {"softcap": 30.0, "alibi_slopes": torch.empty(1, 2, device="cpu"), "sink": torch.empty(2, device="cpu")},
            "softcap": {"softcap": 30.0},
            "alibi": {"alibi_slopes": torch.empty(1, 2, device="cpu")},
            "bias": {"bias": torch.empty(1, 2, 16, 16, dtype=self.dtype, device="cpu")},
            "odd": {"bias": torch.empty(1, 2, 16, 17, dtype=self.dtype, device="cpu")[..., :16]},
            "dropout": {"dropout": Dropout(0.1, seed=1, offset=0)},
            "part": {"dropout": Dropout(0.1, seed=1, offset=0, part=Part(Full(), 16, ((0, 16),)))},
            "largest": {"row_max": True},
            **{recipe: {"precision": recipe} for recipe in RECIPES},
        }
        v = k
        if self.feature == "given":  # with a scale for each token of all of them
            q, k, v = q.to(torch.int8), k.to(torch.int8), k.to(torch.float8_e4m3fn)
            of_k = torch.empty(1, 1, 16, device="cpu")
            features["given"] = {"q_scale": torch.empty(1, 2, 16, device="cpu"), "k_scale": of_k, "v_scale": of_k, "out_dtype": self.dtype}
        given = {name: x for word in self.feature.split("+") for name, x in features.get(word, {}).items()}
        found = bounds.Bound(Call(q=q, k=k, v=v, mask=Full(), scale=1.0, grad=True, **given), target=self.target)
        return found

    def built(self) -> Kernel:
        """What `launch.compiled` takes."""
        if self.kernel == "documents":
            return bounds.finding(by_keys=False)
        if self.kernel in triton_decoding.KERNELS:
            return triton_decoding.kernel(self)
        call = self.bound()
        if self.kernel in EIGHT_BITS:
            return call.quantiser.kernel(self.kernel, self.aligned)
        purpose = self.kernel.removeprefix(AGAIN)
        function, more = {
            **{name: (each, {"SINK": "scores" in self.feature} | call.wanted | call.biased) for name, each in PASSES.items()},
            "prepare": (backward.prepare, {"D_LSE": True, "SINK": True}),
            "dbias": (bias.dbias, {"EACH_BATCH": False, "EACH_HEAD": True, "EACH_ROW": True} | call.biased),
        }[purpose]
        if purpose == "prepare":
            return call.kernel(function, bounds.SMALL, "", self.aligned, more)
        config = self.chosen or call.config_of("dq" if purpose == "dbias" else purpose, self.mask)
        if purpose != self.kernel:
            config, more = bounds.once(config), more | {"CAREFUL": True}
        return call.kernel(function, config, self.mask, self.aligned, more)


def cases() -> Iterator[Case]:
    """Every kernel of the gate, each once."""
    fp32 = torch.float32
    for name in PASSES:
        for arch in FAMILIES:
            yield from (Case(arch, name, head_dim=dim) for dim in CLASSES if arch != "gfx950" or dim < 192)  # else as gfx942
            yield Case(arch, name, mask="tiles", feature="scores")
            yield from (Case(arch, name, feature=feature) for feature in ("bias", "dropout"))
            yield Case(arch, name, fp32)
        yield from (Case(arch, name) for arch in OTHERS)
        yield Case("sm_80", name, feature="odd")
        for arch in RARE:
            yield Case(arch, name, torch.float16, 96, "varlen")
            yield Case(arch, name, head_dim=40, aligned=False)
            yield Case(arch, name, feature="part")
    for arch in FAMILIES:
        yield from (Case(arch, "forward", head_dim=dim, feature="int8") for dim in CLASSES if arch != "gfx950" or dim < 192)
        yield from (Case(arch, "forward", feature=feature) for feature in ("int8_qk", "fp8"))
        yield Case(arch, "forward", mask="tiles", feature="int8+scores")
    yield from (Case(arch, "forward", feature="int8") for arch in OTHERS)
    for arch in RARE:
        yield from (Case(arch, name, feature="int8") for name in (*EIGHT_BITS, f"{AGAIN}forward"))
        yield from (Case(arch, name, head_dim=512, feature="int8") for name in EIGHT_BITS)
        yield Case(arch, "forward", torch.float16, 96, "varlen", "int8")
        yield from (Case(arch, "forward", feature=feature) for feature in ("largest", "int8+largest", "given"))
    for each in INSTEAD:
        if each.family == "sm90":
            features = {"plain": ("plain",), "scores": ("softcap", "alibi"), "pairs": ("bias",)}[each.weight]
            masks = each.masks[:1] if each.weight == "pairs" else each.masks
            yield from (
                Case("sm_90", each.purpose, head_dim=each.most, mask=mask, feature=feature) for mask in masks for feature in features
            )
    for arch in RARE:
        yield Case(arch, "prepare")
        yield Case(arch, "prepare", head_dim=512)
        yield Case(arch, "documents")
        yield Case(arch, "dbias", mask="tiles", feature="bias")
    for name in PASSES:  # of shared memory they take more than the first time
        yield from (Case(arch, AGAIN + name, mask="tiles", feature="scores") for arch in RARE)
        yield from (Case(arch, AGAIN + name, head_dim=dim) for arch in NARROW for dim in CLASSES)
        yield from (Case(arch, AGAIN + name, fp32) for arch in NARROW)
    yield from of_decode()


def of_decode() -> Iterator[Case]:
    """Those of decode and append: of what a GPU has least of, shared memory, each row of config.DECODE; of the others what is run most."""
    fp32, bf16 = torch.float32, torch.bfloat16
    for arch, queries in itertools.product(FAMILIES, triton_decoding.QUERIES):
        of_caches = (bf16, 128, "paged"), (bf16, 128, "e4m3+paged"), (fp32, 128, "plain"), (bf16, 576, "plain"), (bf16, 576, "e4m3+rows")
        yield from (Case(arch, "decode", dtype, dim, queries, feature) for dtype, dim, feature in of_caches)
    yield from (Case("sm_90", "decode", bf16, 576, "one", feature) for feature in ("latent+paged+group", "group"))
    for arch, dim, queries in itertools.product(NARROW, (64, 192, 256), triton_decoding.QUERIES):
        for dtype, feature in ((bf16, "plain"), (bf16, "int8"), (fp32, "plain")):
            yield Case(arch, "decode", dtype, dim, queries, feature)
    for arch in RARE:
        yield from (
            Case(arch, "decode", bf16, 128, "one", feature) for feature in ("prefix", "joined", "ranks", "ragged+rotary", "rows+scores")
        )
        yield from (
            Case(arch, "decode", bf16, 128, "chunk", feature) for feature in ("prefix", "joined+tree+paged", "ragged+rotary+rows", "scores")
        )
        yield Case(arch, "decode", torch.float16, 40, "one", aligned=False)
        yield Case(arch, "decode", fp32, 96, "chunk", "int8+paged")
        yield from (Case(arch, "merge", bf16, dim, "one", feature) for dim, feature in ((128, "plain"), (576, "ragged")))
        yield from (Case(arch, "append", bf16, 128, "one", feature) for feature in ("plain", "ragged+rotary", "e4m3+paged"))
        yield Case(arch, "append", bf16, 576, "one", "paged+rotary")


QUICK = [Case(arch, "forward", head_dim=64) for arch in FAMILIES]
"""What CI compiles whatever the table says: one kernel a family."""
