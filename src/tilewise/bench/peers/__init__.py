"""The contenders, a file a peer: `known` for attention, `known_for_decode` for decoding.

All are the same kind of object (contender.py): `why_not` says in sentences why a workload is beyond it, `prepare` does what a user does once (builds
the mask, compiles, plans) and returns what is checked and timed.
"""

from tilewise.bench.peers.contender import DecodeImpl, Impl
from tilewise.bench.peers.cudnn import CudnnInEightBits
from tilewise.bench.peers.cudnn_flex import CudnnFlex
from tilewise.bench.peers.cuequivariance import TriangleAttention
from tilewise.bench.peers.flash_attention import FlashAttention, FlashAttentionDecode, VllmFlashAttention3, VllmFlashAttention3Decode
from tilewise.bench.peers.flashinfer import FlashInfer, Xqa
from tilewise.bench.peers.flex import Flex
from tilewise.bench.peers.ladder import BackwardOnLadder, DecodeOnLadder, OnLadder
from tilewise.bench.peers.naive import Naive
from tilewise.bench.peers.sdpa import KERNELS, Sdpa, SdpaDecode, SdpaDocuments
from tilewise.bench.peers.tilewise import Tilewise, TilewiseDecode, TilewiseE4M3
from tilewise.ladder import ALIASES, BACKWARD_RUNGS, DECODE_RUNGS, RUNGS, VARIANTS

FOR_ATTENTION = "tilewise,sdpa,naive"
FOR_DECODE = "tilewise,sdpa:cudnn,sdpa:flash,fa2,fa3,fa3:vllm,fa4,flashinfer,flashinfer:xqa"
FA2, FA3, FA4 = ("fa2", "flash_attn"), ("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")


def ours(name: str) -> bool:
    """Whether a contender is tilewise or a kernel of its ladder; the others are peers."""
    return name.partition(":")[0] == "tilewise" or name in {*RUNGS, *VARIANTS, *ALIASES, *DECODE_RUNGS, *BACKWARD_RUNGS}


def known() -> dict[str, Impl]:
    """Every contender by name, whether or not it can run here."""
    from tilewise.backends.eight_bits import RECIPES
    from tilewise.runtime.dispatch import backends

    everyone: list[Impl] = [
        Tilewise(),
        *(Tilewise(backend.name) for backend in backends()),
        TilewiseE4M3(),
        *(Tilewise(precision=recipe) for recipe in RECIPES),
        Sdpa(),
        *(Sdpa(kernel) for kernel in KERNELS),
        *(SdpaDocuments(way) for way in ("padded", "loop")),
        CudnnInEightBits(),
        CudnnFlex(),
        TriangleAttention(),
        Flex(),
        Flex("FLASH"),
        Naive(),
        FlashAttention(*FA2, -1, ("scale", "softcap", "alibi")),
        FlashAttention(*FA3, -1),
        VllmFlashAttention3(),
        VllmFlashAttention3("fa3:fp8", in_eight_bits=True),
        FlashAttention(*FA4, None, ("scale", "softcap", "sink")),
        *(OnLadder(rung) for rung in (*RUNGS.values(), *VARIANTS.values())),
        *(BackwardOnLadder(rung) for rung in BACKWARD_RUNGS.values()),
    ]
    return {impl.name: impl for impl in everyone}


def known_for_decode() -> dict[str, DecodeImpl]:
    """Every contender for decoding by name, whether or not it can run here."""
    from tilewise.runtime.dispatch import backends

    everyone: list[DecodeImpl] = [
        TilewiseDecode(),
        *(TilewiseDecode(backend.name) for backend in backends()),
        *(DecodeOnLadder(rung) for rung in DECODE_RUNGS.values()),
        *(SdpaDecode(kernel) for kernel in ("cudnn", "flash", "math")),
        FlashAttentionDecode(*FA2, 256),
        FlashAttentionDecode(*FA3, 1),
        VllmFlashAttention3Decode(),
        FlashAttentionDecode(*FA4, 1),
        FlashInfer(),
        Xqa(),
    ]
    return {impl.name: impl for impl in everyone}


def find(names: str = FOR_ATTENTION) -> list[Impl]:
    """The contenders of a comma-separated list, in which `k2..k5` stands for the rungs from k2 to k5.

    ValueError for a name that `known` does not have.
    """
    return _found([name for item in names.split(",") for name in _expanded(item.strip())], known(), "it")


def find_for_decode(names: str = FOR_DECODE) -> list[DecodeImpl]:
    """The contenders of a comma-separated list; ValueError for a name that `known_for_decode` does not have."""
    return _found([name.strip() for name in names.split(",")], known_for_decode(), "for the set decode it")


def _found(names: list[str], everyone: dict, it: str) -> list:
    names = list(dict.fromkeys(names))
    if missing := [name for name in names if name not in everyone]:
        raise ValueError(f"impl is {', '.join(map(repr, missing))}; {it} must be among {', '.join(everyone)}")
    return [everyone[name] for name in names]


def _expanded(item: str) -> list[str]:
    """The rungs of a range, in the order of the ladder or of its backward branch; another item as it is, or by its first name."""
    first, dots, last = item.partition("..")
    if not dots:
        return [ALIASES.get(item, item)]
    ladder = list(BACKWARD_RUNGS if first in BACKWARD_RUNGS else RUNGS)
    if first not in ladder or last not in ladder or ladder.index(first) > ladder.index(last):
        raise ValueError(f"impl is {item!r}; a range goes up the ladder, from one of {', '.join(ladder)} to another: k1..k8")
    return ladder[ladder.index(first) : ladder.index(last) + 1]
