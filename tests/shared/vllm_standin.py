"""vLLM 0.26's interface for attention backends, as much of it as `tilewise.compat.vllm_backend` touches: for machines without vLLM.

Names, parameters and defaults are vLLM's; where vLLM is installed, tests/compat/test_vllm.py holds these to it.
"""

import enum
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor


class AttentionType(enum.StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class MultipleOf:
    def __init__(self, base):
        self.base = base


class AttentionBackend:
    """The base class's questions that are answered by what a subclass says."""

    @classmethod
    def is_mla(cls):
        return False

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER


class AttentionImpl:
    pass


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device


class QueryLenSupport(enum.Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls):
        return True


@dataclass
class MLACommonDecodeMetadata:
    block_table: Tensor
    seq_lens: Tensor
    dcp_tot_seq_lens: Tensor | None


class MLACommonMetadata:
    pass


class MLACommonMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, metadata_cls=None, supports_dcp_with_varlen=False):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.metadata_cls = metadata_cls or MLACommonMetadata


class MLACommonImpl:
    """Takes what vLLM's takes of every MLA layer; the two names that `forward_mqa` reads are kept."""

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap,
        attn_type,
        kv_sharing_target_layer_name,
        q_lora_rank,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        qk_head_dim,
        v_head_dim,
        kv_b_proj,
        indexer=None,
        q_pad_num_heads=None,
    ):
        self.scale, self.kv_lora_rank, self.supports_quant_query_input = float(scale), kv_lora_rank, True


OF_MLA = QueryLenSupport, MLACommonBackend, MLACommonDecodeMetadata, MLACommonMetadata, MLACommonMetadataBuilder, MLACommonImpl


class AttentionBackendEnum(enum.Enum):
    CPU_ATTN = "cpu"
    FLASH_ATTN_MLA = "fa_mla"
    CUSTOM = "custom"


@dataclass
class CommonAttentionMetadata:
    """What a builder is given of a batch."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True


class Ranks:
    """A group of threads, each of which is a rank: what vLLM's group of decode context parallelism is asked for."""

    def __init__(self, world: int) -> None:
        self.world, self.sent, self.barrier, self.local = world, [None] * world, threading.Barrier(world, timeout=60), threading.local()

    def run(self, work) -> list:
        """What `work(rank)` returns on each rank."""

        def each(rank):
            self.local.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(each, range(self.world)))

    def exchanged(self, x: Tensor) -> list[Tensor]:
        self.sent[self.local.rank] = x
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()
        return found

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.exchanged(x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return sum(self.exchanged(x)).chunk(self.world, dim)[self.local.rank]


def modules(layout: list[str], cpu: bool = True, invariant: bool = False) -> dict[str, ModuleType]:
    """For sys.modules. layout: one of "NHD" and "HND", which may be changed."""
    registered = {}

    def register_backend(backend, class_path=None, is_mamba=False):
        registered[backend.name] = class_path
        return lambda x: x

    held = {
        "vllm": {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=invariant)},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {},
        "vllm.model_executor.layers.attention.mla_attention": {each.__name__: each for each in OF_MLA},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            each.__name__: each
            for each in (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType, MultipleOf)
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: layout[0]},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum,
            "register_backend": register_backend,
            "registered": registered,
        },
    }
    made = {}
    for name, names in held.items():
        made[name] = module = ModuleType(name)
        module.__dict__.update(names)
    return made


def batch(lengths: list[int], new: list[int], block: int, padded: int = 0, seed: int = 0) -> tuple[CommonAttentionMetadata, int]:
    """Sequences of `lengths` tokens, of which the last `new` are in the batch, in blocks of a pool in any order, with so many tokens of padding; and
    the blocks of the pool."""
    ends = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    width = max(-(-length // block) for length in lengths) + 2
    blocks = len(lengths) * width + 1
    table = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed))[: len(lengths) * width].view(len(lengths), width) + 1
    slots = [
        int(table[b, at // block]) * block + at % block
        for b, (length, n) in enumerate(zip(lengths, new, strict=True))
        for at in range(length - n, length)
    ]
    made = CommonAttentionMetadata(
        query_start_loc=ends,
        query_start_loc_cpu=ends,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=sum(new) + padded,
        max_query_len=max(new),
        max_seq_len=max(lengths),
        block_table_tensor=table.to(torch.int32),
        slot_mapping=torch.tensor([*slots, *[-1] * padded], dtype=torch.int64),
    )
    return made, blocks


def install(monkeypatch, **options) -> list[str]:
    """Put the stand-in in vLLM's place; the layout is returned, and may be changed."""
    layout = ["NHD"]
    for name, module in modules(layout, **options).items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm_backend", "vllm_mla"):
        monkeypatch.delitem(sys.modules, f"tilewise.compat.{name}", raising=False)
    return layout
