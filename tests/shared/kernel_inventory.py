"""Every kernel that the compile gate holds to its rules, by the lists that its tests are parametrised with: what `jit.build` takes, and a name."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from tilewise.backends.hopper.backward import call as gradients
from tilewise.backends.hopper.backward import config as backward
from tilewise.backends.hopper.backward import plan, tables
from tilewise.backends.hopper.backward.bias import call as bias_gradient
from tilewise.backends.hopper.backward.repair import call as repairs
from tilewise.backends.hopper.backward.sink import call as sinks
from tilewise.backends.hopper.decode import append_call
from tilewise.backends.hopper.decode import call as decode_call
from tilewise.backends.hopper.decode import config as decoding
from tilewise.backends.hopper.eight_bits import call as eight_bits_call
from tilewise.backends.hopper.eight_bits import config as eight_bits
from tilewise.backends.hopper.forward import call as forward_call
from tilewise.backends.hopper.forward import config as forward
from tilewise.backends.hopper.forward import rows
from tilewise.ladder import BACKWARD_RUNGS, DECODE_RUNGS, RUNGS, VARIANTS

EVERY = {**RUNGS, **VARIANTS}


class Kernel(NamedTuple):
    name: str  # for people; launch and config are the identity
    launch: str | Callable
    arguments: Callable
    config: object
    remarks: bool = True  # whether the compiler has something to say about it


def of_rung(name: str, head_dim: int, causal: bool) -> Kernel:
    rung = EVERY[name]
    config = rung.code.configure(head_dim, causal, **rung.choice)
    return Kernel(
        f"rung {name} {head_dim} {'causal' if causal else 'full'}", rung.code.launch, rung.arguments(), config, remarks=name >= "k4"
    )


def of_decode_rung(name: str) -> Kernel:
    rung = DECODE_RUNGS[name]
    return Kernel(f"rung {name}", rung.code.launch, rung.arguments, rung.code.configure(**rung.choice))


def of_backward_rung(name: str, head_dim: int, causal: bool) -> Kernel:
    rung = BACKWARD_RUNGS[name]
    kind = "causal" if causal else "full"
    return Kernel(f"rung {name} {head_dim} {kind}", rung.code.launch, rung.arguments, rung.configure(head_dim, causal))


def of_forward(config) -> Kernel:
    return Kernel(f"forward {_tile(config)}", forward_call.LAUNCH, forward_call.arguments, config)


def of_backward(config) -> Kernel:
    return Kernel(f"backward {_tile(config)}", gradients.LAUNCH, gradients.arguments, config)


def of_repairs(configs: Iterable[backward.Config]) -> list[Kernel]:
    """The kernels that repair what those of the configurations compute, each once."""
    found = dict.fromkeys(kernel for each in configs for kernel in repairs.kernels(each))
    return [Kernel(f"repair {_tile(kernel.config)}", *kernel) for kernel in found]


def of_decode(dims: tuple, page_size: int, changes: dict, dtype: torch.dtype = torch.bfloat16) -> Kernel:
    config = decoding.configure(dtype, *dims, page_size or None, **changes)
    return Kernel(f"decode {dims} pages of {page_size} {changes}", *decode_call.kernel_of(config))


def of_append(changes: dict) -> Kernel:
    return Kernel(f"append {changes}", append_call.LAUNCH, append_call.arguments, append_call.Appending(**changes), remarks=False)


def of_bias(sums: tuple, mask_kind: str, everything: bool, bias: torch.dtype) -> Kernel:
    in_rows, whole, chunks, chunks_v = sums
    changes = {"softcap": True, "alibi": True, "diagonal": True} if everything else {}
    shape = {"rows": in_rows, "whole": whole, "chunks": chunks, "chunks_v": chunks_v}
    pairs = in_rows and bias.itemsize == 2
    config = bias_gradient.Config(dtype=torch.bfloat16, bias=bias, bias_pairs=pairs, mask_kind=mask_kind, **shape, **changes)
    return Kernel(f"bias {mask_kind} {chunks} {chunks_v}", bias_gradient.LAUNCH, bias_gradient.arguments, config)


def of_intervals() -> list[Kernel]:
    """The small kernels ahead of "varlen"."""
    return [
        Kernel("intervals of rows", *rows.kernel(forward.configure(torch.bfloat16, 128, 128, "varlen"))),
        Kernel("intervals of columns", *tables.kernel(backward.configure(torch.bfloat16, 128, 128, "varlen"))),
    ]


def of_sinks() -> list[Kernel]:
    """The gradients of sinks."""
    return [
        Kernel(f"sink's gradient {dtype}", sinks.LAUNCH, sinks.arguments, sinks.Config(dtype=dtype), remarks=False)
        for dtype in (torch.bfloat16, torch.float32)
    ]


def _tile(config) -> str:
    return f"{config.head_dim} {config.head_dim_v} {config.mask_kind} {str(config.dtype).removeprefix('torch.')}"


OF_RUNGS = list(itertools.product(EVERY, (64, 128), (False, True)))
OF_BACKWARD_RUNGS = list(itertools.product(BACKWARD_RUNGS, (64, 128), (False, True)))

# Forward

SHIPPED = forward.shipped(torch.bfloat16)
DROPOUT = {"dropout": True}
EVERY_CHANGE = {"softcap": True, "bias": torch.float32, "alibi": True, "diagonal": True, "sink": True}
CHANGED = [
    ((128, 128), "causal", {"softcap": True}),
    ((128, 128), "full", {"bias": torch.bfloat16, "bias_pairs": True, "sink": True}),
    ((64, 64), "band", {"alibi": True}),
    *((dims, ("full", "band")[i % 2], EVERY_CHANGE) for i, dims in enumerate(forward.TILES)),
    ((64, 64), "full", {"row_max": True}),
    ((256, 256), "causal", EVERY_CHANGE | {"row_max": True}),
    ((64, 64), "full", DROPOUT),
    ((128, 128), "causal", DROPOUT),
]
CHANGED_TOO = [
    *((dims, mask_kind, EVERY_CHANGE) for dims in forward.TILES for mask_kind in ("full", "band")),
    *((dims, "causal", {"softcap": True}) for dims in forward.TILES),
    *((dims, "band", {"bias": torch.bfloat16, "sink": True}) for dims in forward.TILES),
    *((dims, mask_kind, {"row_max": True}) for dims in forward.TILES for mask_kind in ("full", "causal", "band")),
    *((dims, mask_kind, DROPOUT) for dims in forward.TILES for mask_kind in ("full", "causal", "band")),
    *((dims, "band", EVERY_CHANGE | DROPOUT) for dims in forward.TILES),
]
RUNS = [(dims, mask_kind, changes) for dims in forward.TILES for mask_kind in ("varlen", "tiles") for changes in (EVERY_CHANGE, DROPOUT)]


def changed_forward(dims, mask_kind, changes) -> Kernel:
    return of_forward(forward.configure(torch.bfloat16, *dims, mask_kind, **changes))


# Decode

DECODE_CHANGES = {"softcap": True, "alibi": True, "sinks": True, "ragged": True, "leftpad": True}
DECODE = [((128, 128), 0, {}), ((128, 128), 16, DECODE_CHANGES), ((256, 256), 64, {}), ((64, 64), 4, {"split": True, "tree": True})]
DECODE += [((576, 512), 64, {}), ((576, 512), 8, DECODE_CHANGES)]
DECODE.append(((128, 128), 64, {"rotary": decoding.Rotary(64, False, torch.float32)}))
DECODE.append(((128, 128), 16, {"wide": ("seqlens", "pages"), "leftpad": True}))
DECODE_CHUNK = {"causal_tiles": True, "consumers": 2} | decoding.CHUNK
DECODE.append(((128, 128), 64, {"ragged": True} | DECODE_CHUNK))
DECODE.append(((128, 128), 64, {"onto": True}))
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
DECODE.append(((128, 128), 64, {"cached": (E4M3, E4M3), "scales": ("head", "head")}))
DECODE_TOO = [
    *(
        (dims, page, {"cached": (E4M3, kind), "scales": ("token", "token")})
        for dims in decoding.TILES
        for page in (4, 64)
        for kind in (E4M3, INT8)
    ),
    *((dims, 16, {"cached": (E4M3, E4M3), "scales": ("head", "head")} | DECODE_CHANGES) for dims in decoding.TILES),
    *((dims, page, {}) for dims in decoding.TILES for page in (0, 4, 16, 64)),
    *((dims, 0, changes) for dims in decoding.TILES for changes in (DECODE_CHANGES, {"split": True, "onto": True, "tree": True})),
    *((dims, 16, {"out": torch.float32, "common": "even"}) for dims in decoding.TILES),
    ((128, 128), 4, {"out": torch.float32, "common": "packed", "wide": ("all_seqlens",)}),
    ((128, 128), 64, {"out": torch.float32, "common": "packed", "cached": (E4M3, INT8), "scales": ("token", "token")}),
    *((dims, 4, {"onto": True, "softcap": True, "sinks": True, "ragged": True}) for dims in decoding.TILES),
    ((128, 128), 64, {"onto": True, "cached": (E4M3, INT8), "scales": ("token", "token"), "ragged": True, "sinks": True}),
    ((256, 256), 4, {"onto": True, "tree": True, "sinks": True, "ragged": True}),
]
DECODE_TOO += [(dims, 0, {"rotary": decoding.Rotary(dims[0] // 2, i % 2 == 0, torch.float32)}) for i, dims in enumerate(decoding.TILES)]
DECODE_TOO += [(dims, page, {}) for dims in decoding.LATENT_TILES for page in (0, 16, 64)]
DECODE_TOO += [
    (dims, 16, changes) for dims in decoding.LATENT_TILES for changes in (DECODE_CHANGES, {"split": True, "onto": True, "tree": True})
]
DECODE_TOO += [(dims, 0, {"out": torch.float32}) for dims in decoding.LATENT_TILES]
DECODE_TOO += [
    ((256, 256), 16, changes) for changes in ({"tree": True}, {"tree": True, "split": True}, {"tree": True, "cached": (E4M3, E4M3)})
]
DECODE_TOO += [
    (dims, page, DECODE_CHUNK | changes)
    for dims in decoding.WIDE
    for page, changes in (
        (16, DECODE_CHANGES),
        (16, DECODE_CHANGES | {"split": True}),
        (0, {"split": True, "onto": True, "tree": True}),
        (0, {"onto": True, "tree": True}),
        (0, {}),
        (8, {"out": torch.float32}),
        *((64, {"split": split, "rotary": decoding.Rotary(dims[0] // 2, split, torch.float32)}) for split in (False, True)),
    )
]
DECODE_TOO += [(dims, 16, {"consumers": 2}) for dims in decoding.WIDE]
DECODE_TOO += [(dims, page, {"causal_tiles": True} | DECODE_CHANGES) for dims in decoding.TILES for page in (4, 16)]
DECODE_TOO = [case for case in DECODE_TOO if case not in DECODE]

APPEND = [{"dtype": torch.bfloat16}, {"dtype": torch.float16, "pages": torch.int64, "rotary": torch.float32, "cu_seqlens": torch.int32}]

# In 8 bits

EIGHT_BITS = [  # dtype of Q and K, head_dim, sees, centred (by the quantiser), and what else is unusual
    *((torch.int8, 128, mask_kind, True, {}) for mask_kind in ("full", "causal", "band")),
    *((dtype, head_dim, "causal", True, {}) for dtype in (torch.int8, E4M3) for head_dim in (64, 256)),
    (E4M3, 128, "full", False, {}),
    (E4M3, 256, "full", False, {"tiles_of_values": True}),
    (torch.int8, 256, "tiles", True, {}),
    (torch.int8, 256, "causal", True, {"few": True}),
]
EIGHT_BITS_TOO = [
    *itertools.product((torch.int8, E4M3), (64, 128, 256), ("full", "causal", "band"), (False, True), ({},)),
    *itertools.product((torch.int8, E4M3), (256,), ("full", "causal", "band"), (True,), ({"few": True},)),
    *itertools.product((torch.int8, E4M3), (256,), ("full", "causal", "band"), (False,), ({"tiles_of_values": True},)),
    *itertools.product(
        (torch.int8, E4M3), (128,), ("full", "causal"), (False,), ({"tiles_of_values": True},)
    ),  # int8 "band" spills 16 bytes
    *((E4M3, 256, "tiles", centred, {}) for centred in (False, True)),
]
EIGHT_BITS_TOO = [case for case in EIGHT_BITS_TOO if case not in EIGHT_BITS]
TOKENS = [  # dtype of Q and K, (head_dim, head_dim_v), sees, which of K and V have a scale for each token
    (torch.int8, (64, 64), "causal", (True, True)),
    (E4M3, (128, 128), "full", (True, True)),
    (torch.int8, (128, 128), "band", (True, False)),
    (E4M3, (256, 128), "causal", (False, True)),
]
TOKENS_TOO = [
    *(
        (dtype, dims, mask_kind, (True, True))
        for dtype in (torch.int8, E4M3)
        for dims in eight_bits.TILES
        for mask_kind in ("full", "causal", "band")
    )
]
TOKENS_TOO = [case for case in TOKENS_TOO if case not in TOKENS]
TRANSPOSERS = [(64, (False, False)), (128, (True, True)), (256, (False, True))]
WIDE_VALUES = [  # (head_dim, head_dim_v), sees, long, changes of the scores
    *((dims, "full", True, {}) for dims in eight_bits.TILES_OF_WIDE_VALUES),
    *((dims, "causal", True, {}) for dims in ((64, 64), (128, 128))),
    ((128, 128), "band", False, {}),
    ((64, 64), "band", False, {"softcap": True, "alibi": True, "diagonal": True, "sink": True, "row_max": True}),
]
WIDE_VALUES_TOO = [
    *(
        (dims, mask_kind, long, {})
        for dims in eight_bits.TILES_OF_WIDE_VALUES
        for mask_kind in ("full", "causal", "band", "varlen", "tiles")
        for long in (False, True)
    ),
    *(
        (dims, mask_kind, False, WIDE_VALUES[-1][-1])
        for dims in eight_bits.TILES_OF_WIDE_VALUES
        for mask_kind in ("full", "causal", "varlen", "tiles")
    ),
]
WIDE_VALUES_TOO = [case for case in WIDE_VALUES_TOO if case not in WIDE_VALUES]
QUANTISERS = [  # dtype of Q and K, head_dim, whether V is made
    *itertools.product((torch.int8, E4M3), (64, 128, 256), (True,)),
    *((torch.int8, head_dim, False) for head_dim in (64, 128, 256)),
]


def of_eight_bits(dtype: torch.dtype, head_dim: int, mask_kind: str, centred: bool, fields: dict) -> Kernel:
    config = eight_bits.configure(dtype, torch.bfloat16, head_dim, head_dim, mask_kind, long=True, centred=centred, **fields)
    return Kernel(f"8 bits {dtype} {head_dim} {mask_kind} {fields}", eight_bits_call.LAUNCH, eight_bits_call.arguments, config)


def of_tokens(dtype: torch.dtype, dims: tuple[int, int], mask_kind: str, tokens: tuple[bool, bool]) -> Kernel:
    fields = {"tokens_k": tokens[0], "tokens_v": tokens[1], "tiles_of_values": tokens[1]}
    config = eight_bits.configure(dtype, torch.bfloat16, *dims, mask_kind, long=True, centred=False, **fields)
    return Kernel(f"8 bits, scales of tokens, {dtype} {dims} {mask_kind}", eight_bits_call.LAUNCH, eight_bits_call.arguments, config)


def of_transposer(head_dim: int, tokens: tuple[bool, bool]) -> Kernel:
    fields = {"tokens_k": tokens[0], "tokens_v": tokens[1]}
    config = eight_bits.configure_quantiser(torch.int8, torch.int8, head_dim, **fields)
    return Kernel(f"transposer {head_dim} {tokens}", eight_bits_call.TRANSPOSE, eight_bits_call.transpose_arguments, config)


def of_wide_values(dims: tuple[int, int], mask_kind: str, long: bool, changes: dict) -> Kernel:
    config = eight_bits.configure(torch.int8, torch.bfloat16, *dims, mask_kind, long=long, centred=True, wide_values=True, **changes)
    return Kernel(f"8 and 16 bits {dims} {mask_kind}", eight_bits_call.LAUNCH, eight_bits_call.arguments, config)


def of_quantiser(dtype: torch.dtype, head_dim: int, values: bool) -> Kernel:
    config = eight_bits.configure_quantiser(torch.bfloat16, dtype, head_dim, values=values)
    return Kernel(f"quantiser {dtype} {head_dim}", eight_bits_call.QUANTISE, eight_bits_call.quantiser_arguments, config)


# Backward

SEES = ("full", "causal", "band", "varlen", "tiles")
SHAPES = list(itertools.product(backward.TILES, SEES))


def few_keys(dims, mask_kind, changes, dtype=torch.bfloat16):
    return backward.configure(dtype, *dims, mask_kind, few=True, **changes)


def many_keys(dims, mask_kind, changes):
    return backward.configure(torch.bfloat16, *dims, mask_kind, **changes)


def of_length(dims, mask_kind, least, dtype=torch.bfloat16):
    return backward.configure(dtype, *dims, mask_kind, least)


FEW = [shape for shape in SHAPES if few_keys(*shape, {}).one_block]

# All but what SHAPES has: bf16, from one query on.
STEPS = [(*what, least) for what, each in backward.LONG.items() for least, _ in each]
STEPS += [(dims, "causal", backward.PERSISTENT_UP_TO + 1) for dims in ((64, 64), (128, 128))]
DTYPES = torch.bfloat16, torch.float16
LONG = [(*step, dtype) for step in STEPS for dtype in DTYPES if (step[-1], dtype) != (1, torch.bfloat16)]

APART = [*itertools.product(((64, 64), (96, 96), (128, 128)), ("causal", "band")), ((128, 128), "causal", 8192)]


def block_per_q_head(dims, mask_kind, least=2048, dtype=torch.bfloat16):
    return plan.block_per_q_head(of_length(dims, mask_kind, least, dtype))


APART_TOO = [
    *((dims, mask_kind, 2048, torch.float16) for dims in ((64, 64), (128, 128)) for mask_kind in ("causal", "band")),
    *((dims, "causal", least) for dims in ((64, 64), (128, 128), (104, 104), (40, 40)) for least in (1, 300, 20000)),
]
SMALLER = (40, 40), (72, 72), (104, 104), (136, 128)
OF_SMALLER_HEADS = [(dims, SEES[1:][i], 1) for i, dims in enumerate(SMALLER)]
OF_SMALLER_HEADS_TOO = [case for case in itertools.product(SMALLER, SEES, (1, 1024, 8192)) if case not in OF_SMALLER_HEADS]

BACKWARD_CHANGES = (
    {"softcap": True},
    {"alibi": True},
    {"bias": torch.bfloat16},
    {"bias": torch.float32, "alibi": True, "diagonal": True},
    {"softcap": True, "alibi": True},
    {"softcap": True, "bias": torch.float32, "alibi": True, "diagonal": True},
)
BACKWARD_CHANGED = [  # all at once for every head_dim, which takes the most registers, under one mask after another
    (dims, SEES[i % len(SEES)], BACKWARD_CHANGES[-1]) for i, dims in enumerate(backward.TILES)
] + [((64, 64), "causal", DROPOUT), ((128, 128), "full", DROPOUT)]
_OF_ALL_SHAPES = [(*shape, changes) for shape in SHAPES for changes in (*BACKWARD_CHANGES, DROPOUT, BACKWARD_CHANGES[-1] | DROPOUT)]
BACKWARD_CHANGED_TOO = [
    case
    for case in (*_OF_ALL_SHAPES, *itertools.product((*SMALLER, (200, 200)), SEES, BACKWARD_CHANGES[::5]))
    if case not in BACKWARD_CHANGED
]
MOST_WITH_TABLES = ((256, 256), "tiles", BACKWARD_CHANGES[-1])
OF_FEW_KEYS_TOO = [case for case in _OF_ALL_SHAPES if few_keys(*case) != many_keys(*case) and case != MOST_WITH_TABLES]


def shipped_backward() -> Iterator[backward.Config]:
    """Of what `make test` holds to the rules."""
    yield from (many_keys(*shape, {}) for shape in SHAPES)
    yield from (few_keys(*shape, {}, dtype) for shape in FEW for dtype in DTYPES)
    yield from (of_length(*case) for case in LONG + OF_SMALLER_HEADS)
    yield from (block_per_q_head(*case) for case in APART)
    yield from (many_keys(*case) for case in BACKWARD_CHANGED)
    yield few_keys(*MOST_WITH_TABLES)


def shipped_backward_too() -> Iterator[backward.Config]:
    """Of what `make test-slow` adds."""
    yield from (of_length(*case) for case in OF_SMALLER_HEADS_TOO)
    yield from (block_per_q_head(*case) for case in APART_TOO)
    yield from (many_keys(*case) for case in BACKWARD_CHANGED_TOO)
    yield from (many_keys(dims, "tiles", {}).but(q_heads_in_turn=True) for dims in ((64, 64), (96, 96), (128, 128)))
    yield from (few_keys(*case) for case in OF_FEW_KEYS_TOO)


# dK and dV in fp32: of every tile, and of what ends a block of keys in ways of its own.


WIDE_KEYS = (
    *(many_keys(dims, SEES[i % len(SEES)], {}) for i, dims in enumerate(backward.TILES)),
    block_per_q_head(*APART[4]),
    of_length((128, 128), "full", 8192),
    few_keys((64, 64), "causal", {}, torch.float16),
)
WIDE_KEYS_TOO = (
    *(many_keys(*shape, {}) for shape in SHAPES),
    *(of_length(*case) for case in LONG if case[-1] == torch.bfloat16),
    *(block_per_q_head(*case) for case in APART),
    *(many_keys(*case) for case in BACKWARD_CHANGED),
    *(few_keys(*shape, {}) for shape in FEW),
)
WIDE_KEYS, WIDE_KEYS_TOO = ([*dict.fromkeys(map(plan.wide_keys, each))] for each in (WIDE_KEYS, WIDE_KEYS_TOO))
WIDE_KEYS_TOO = [each for each in WIDE_KEYS_TOO if each not in WIDE_KEYS]

REPAIRS = of_repairs([*shipped_backward(), *WIDE_KEYS])
REPAIRS_TOO = [each for each in of_repairs([*shipped_backward_too(), *WIDE_KEYS_TOO]) if each not in REPAIRS]

# A bias's gradient

SUMS = (True, True, 1, 1), (True, False, 4, 4), (False, True, 2, 2), (False, False, 3, 2)  # rows, whole, chunks, chunks_v
BIAS_GRADIENTS = [(SUMS[i % len(SUMS)], mask_kind, i % 4 // 2) for i, mask_kind in enumerate(("band", "varlen", "tiles") * 2)]
BIAS_GRADIENTS_TOO = [case for case in itertools.product(SUMS, ("band", "varlen", "tiles"), (0, 1)) if case not in BIAS_GRADIENTS]
BIASES = torch.bfloat16, torch.float32


def fast() -> Iterator[Kernel]:
    """What `make test` holds to the rules; some come more than once."""
    yield from itertools.starmap(of_rung, OF_RUNGS)
    yield from map(of_decode_rung, DECODE_RUNGS)
    yield from itertools.starmap(of_backward_rung, OF_BACKWARD_RUNGS)
    yield from map(of_forward, SHIPPED)
    yield from itertools.starmap(changed_forward, CHANGED)
    yield from of_intervals()
    yield from of_sinks()
    yield from itertools.starmap(of_decode, DECODE)
    yield from map(of_append, APPEND)
    yield from itertools.starmap(of_eight_bits, EIGHT_BITS)
    yield from itertools.starmap(of_wide_values, WIDE_VALUES)
    yield from itertools.starmap(of_tokens, TOKENS)
    yield from itertools.starmap(of_transposer, TRANSPOSERS)
    yield from itertools.starmap(of_quantiser, QUANTISERS)
    yield from map(of_backward, [*shipped_backward(), *WIDE_KEYS])
    yield from REPAIRS
    yield from (of_bias(*case, bias) for case in BIAS_GRADIENTS for bias in BIASES)


def slow() -> Iterator[Kernel]:
    """What `make test-slow` adds."""
    yield from (changed_forward(*case) for case in CHANGED_TOO + RUNS)
    yield from map(of_backward, [*shipped_backward_too(), *WIDE_KEYS_TOO])
    yield from REPAIRS_TOO
    yield from (of_bias(*case, bias) for case in BIAS_GRADIENTS_TOO for bias in BIASES)
    yield from itertools.starmap(of_decode, DECODE_TOO)
    yield from itertools.starmap(of_eight_bits, EIGHT_BITS_TOO)
    yield from itertools.starmap(of_wide_values, WIDE_VALUES_TOO)
    yield from itertools.starmap(of_tokens, TOKENS_TOO)
