"""What a forward pass on Hopper is made of, found once for a call: its configuration, the order of its units, the sizes of its scratch."""

from dataclasses import dataclass
from functools import cache

import torch

from tilewise.backends.hopper import changes, visibility
from tilewise.backends.hopper.forward.config import Config, configure
from tilewise.backends.tables import documents
from tilewise.backends.tables.band import band_of
from tilewise.problem import Call

SECTION_BYTES, MOST_SECTION_BYTES = 16 << 20, 40 << 20  # of the L2 cache's 50 MB, for keys and values that are read at the same time
EXTRA_HEADS = 16  # a section may have this many more heads than the smallest one


@dataclass(frozen=True)
class Plan:
    """Everything about one call on one GPU that its tensors do not decide; sizes in elements."""

    config: Config
    section: int  # heads that have their units mixed (scheduler.Units)
    blocks: int  # thread blocks, at most
    band: tuple[int, ...]  # the integers of operands.Band
    partials: tuple[int, int] | None  # sizes of operands.Work.sums and .arrivals, where units are shared

    @classmethod
    def of(cls, call: Call, num_sms: int, config: Config | None = None) -> "Plan":
        """With `config` in place of the call's own."""
        config = config or config_of(call)
        blocks = num_sms * config.blocks
        numbers = 0, 0, 0, call.seqlen_k, 0, 0
        if config.mask_kind in ("causal", "band"):
            numbers = band_of(call.mask, call.seqlen_q, call.seqlen_k)
        partials = None
        if config.shares:
            slots = 2 * (blocks // config.cluster)
            partials = slots * config.partial_elements, slots * config.cluster * config.tile_m // 16
        return cls(config, _section(call, config), blocks, numbers, partials)


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def config_of(call: Call) -> Config:
    """The configuration for the call as it is given; where heads are packed as rows, ask for the packed call's."""
    mask_kind = visibility.mask_kind(call.mask)
    return configure(
        call.q.dtype,
        call.head_dim,
        call.head_dim_v,
        mask_kind,
        _queries(call, mask_kind),
        call.seqlen_k,
        **changes.fields(call),
        bias_pairs=call.bias is not None and changes.in_pairs(call.bias),
        sink=call.sink is not None,
        row_max=call.row_max,
    )


def _queries(call: Call, mask_kind: str) -> int:
    """Of a sequence, or of what it consists of, as `config.Choice` counts them."""
    if mask_kind == "varlen":
        return documents.longest_walk(call.mask)
    if mask_kind == "band":
        *_, lo, hi = band_of(call.mask, call.seqlen_q, call.seqlen_k)
        return min(call.seqlen_q, hi - lo + 1)
    return call.seqlen_q


def _section(call: Call, config) -> int:
    """Heads that have their tiles mixed, longest first: about as many as share the L2 cache, and none left over for a short last section, as its
    first tiles would keep a few multiprocessors busy for long. One where all tiles are alike.
    """
    if config.mask_kind == "full":
        return 1
    heads, keys = call.batch * call.heads_k, call.seqlen_k
    if config.mask_kind == "band":
        *_, lo, hi = band_of(call.mask, call.seqlen_q, call.seqlen_k)
        keys = min(keys, 2 * (hi - lo + 1))
    a_head = config.dtype.itemsize * keys * (config.head_dim + config.head_dim_v)
    least, most = SECTION_BYTES // a_head, MOST_SECTION_BYTES // a_head
    least = max(2 if config.mask_kind == "varlen" else 1, least)  # documents are shorter than all of them
    if least >= heads or heads % least == 0:
        return min(least, heads) * call.group
    return min(range(least, min(most, least + EXTRA_HEADS) + 1), key=lambda width: (-heads % width, -width), default=least) * call.group
