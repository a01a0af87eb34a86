"""What crosses the boundary between torch and the launches of 8 bits; see ../operands.py. Nothing here imports the DSL."""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tilewise.backends.hopper.operands import LikeL
from tilewise.backends.hopper.stand_ins import Floats, Ints, Of, When

GIVEN_V = Of("batch seqlen_k heads_k head_dim_v", torch.int8, aligned=True)
MADE_V = Of(
    "batch heads_k head_dim_v tokens", torch.int8, aligned=True
)  # tokens in the order of P (sm90/eight_bits.py), 0 from seqlen_k on
OF_CHANNELS = Floats("batch heads_k head_dim_v", aligned=True)
OF_GROUPS = Floats("batch heads_k groups", scattered=True)  # of GROUP keys
OF_TOKENS = Floats("batch heads_k _", aligned=True)  # _: groups * GROUP


class Tensors(NamedTuple):
    """Of a forward pass. Elements of 8 bits come as int8, whatever they mean."""

    Q: Annotated[Tensor, Of("batch seqlen_q heads_q head_dim", torch.int8, aligned=True)]
    K: Annotated[Tensor, Of("batch seqlen_k heads_k head_dim", torch.int8, aligned=True)]
    V: Annotated[Tensor | None, When("wide_values", (False,)), MADE_V]
    O: Annotated[Tensor, Of("batch seqlen_q heads_q head_dim_v", "out", aligned=True)]
    L: LikeL
    # What V was made from, for elements that are not finite; without V what is multiplied:
    values: Annotated[Tensor, GIVEN_V._replace(dtype=lambda config: config.out if config.centred else torch.int8)]


class Scales(NamedTuple):
    """What elements of 8 bits are to be multiplied with; strides of 0 where several have one."""

    q: Annotated[Tensor, Floats("batch heads_q seqlen_q", scattered=True)]
    k: Annotated[Tensor, OF_GROUPS]
    v: Annotated[Tensor | None, When("channels"), OF_CHANNELS]  # without `centre` OF_GROUPS; None: V has 16 bits
    centre: Annotated[Tensor | None, When("channels"), OF_CHANNELS]  # what V lacks
    shift: Annotated[Tensor | None, When("centred"), Floats("batch heads_q seqlen_q")]  # what a row's scores, and its log-sum-exp, lack
    # As k, but NaN where a key of the group was not finite, which int8 cannot say:
    whole: Annotated[Tensor | None, When("loses"), Floats("batch heads_k groups")]
    lost: Annotated[
        Tensor | None, When("loses"), Floats("batch heads_k _")
    ]  # of each token: NaN for keys that were not finite, 0 for others
    columns: Annotated[Tensor | None, When("tokens_k"), OF_TOKENS]  # in addition to `k`, of each token
    weights: Annotated[Tensor | None, When("tokens_v"), OF_TOKENS]  # likewise, in addition to `v`


class OfTokens(NamedTuple):
    """Scales that each token has: as given, by any strides, and what becomes of them."""

    k: Annotated[Tensor | None, When("tokens_k"), Floats("batch heads_k seqlen_k", scattered=True)]
    v: Annotated[Tensor | None, When("tokens_v"), Floats("batch heads_k seqlen_k", scattered=True)]
    columns: Annotated[Tensor | None, When("tokens_k"), OF_TOKENS]  # k, and 0 from seqlen_k on
    weights: Annotated[Tensor | None, When("tokens_v"), OF_TOKENS]  # likewise v, over `units`; NaN for what is not finite
    units: Annotated[Tensor | None, When("tokens_v"), Floats("batch heads_k groups")]  # a group's largest finite |v|, or 1 where that is 0


class Given(NamedTuple):
    """What the quantiser reads: bf16 or fp16, and where keys end that count."""

    Q: Annotated[Tensor, Of("batch seqlen_q heads_q head_dim", "given", aligned=True)]
    K: Annotated[Tensor, Of("batch seqlen_k heads_k head_dim", "given", aligned=True)]
    V: Annotated[Tensor, Of("batch seqlen_k heads_k head_dim_v", "given", aligned=True)]
    ends: Annotated[Tensor | None, When("ends"), Ints("cu_seqlens")] = None  # of which the last does; None: all count


class Made(NamedTuple):
    """What it writes, as `Tensors` have it, with the tile's head_dim."""

    Q: Annotated[Tensor, Of(lambda config: f"batch seqlen_q heads_q {config.head_dim}", torch.int8, aligned=True)]
    K: Annotated[Tensor, Of(lambda config: f"batch seqlen_k heads_k {config.head_dim}", torch.int8, aligned=True)]
    V: Annotated[Tensor | None, When("values"), MADE_V]
