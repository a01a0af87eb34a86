"""SGLang 0.5.17's interface for attention backends, as much of it as `tilewise.compat.sglang_backend` touches: for machines without SGLang.

Names, parameters and meanings are SGLang's; where SGLang is installed, tests/compat/test_sglang.py holds these to it.
"""

import enum
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class AttentionBackend:
    """The base class's one body that is used: which method answers a batch."""

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        answer = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return answer(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


@dataclass
class KVWriteLoc:
    loc: Tensor
    swa_loc: Tensor | None = None


class Pool:
    """Keys and values of each layer, (slots, heads_k, head_dim); NaN where nothing was written. e4m3 is divided by a layer's scales on its way in."""

    def __init__(self, slots, heads, dim, dim_v, dtype=torch.float32, layers=1):
        self.dtype = dtype
        self.k, self.v = ([torch.full((slots, heads, d), torch.nan).to(dtype) for _ in range(layers)] for d in (dim, dim_v))

    def get_key_buffer(self, layer_id):
        return self.k[layer_id]

    def get_value_buffer(self, layer_id):
        return self.v[layer_id]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        for pool, x, scale in ((self.k, cache_k, k_scale), (self.v, cache_v, v_scale)):
            x = x if scale is None or x.dtype == self.dtype else x / scale
            pool[layer.layer_id][self.place(loc_info)] = x.to(self.dtype)

    def place(self, loc_info):
        return loc_info.loc


class WindowPool(Pool):
    """Of layers with a window: slots of its own, by a mapping from the others'."""

    swa_layer_nums = 1

    def __init__(self, slots, *shape, **options):
        super().__init__(slots, *shape, **options)
        self.mapping = torch.cat([torch.randperm(slots, generator=torch.Generator().manual_seed(9)), torch.tensor([-1])])

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.mapping[kv_indices]

    def place(self, loc_info):
        return loc_info.swa_loc


class LatentPool(Pool):
    """Keys and values in one memory, a head."""

    def __init__(self, slots, rank, rope):
        super().__init__(slots, 1, rank + rope, 0)
        self.rank = rank

    def get_value_buffer(self, layer_id):
        return self.k[layer_id][..., : self.rank]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v):
        self.k[layer.layer_id][loc_info] = cache_k

    def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
        self.k[layer.layer_id][loc] = torch.cat([cache_k_nope, cache_k_rope], dim=-1)


def modules() -> dict[str, ModuleType]:
    """For sys.modules."""
    registered = {}

    def register_attention_backend(name):
        return lambda create: registered.setdefault(name, create)

    arguments = {}
    for choices in ("ATTENTION_BACKEND", "DETERMINISTIC_ATTENTION_BACKEND"):
        arguments[f"{choices}_CHOICES"] = ["fa3"]
        arguments[f"add_{choices.lower()}_choices"] = arguments[f"{choices}_CHOICES"].extend
    arguments["RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND"] = radix = ["fa3"]
    arguments["add_radix_supported_deterministic_attention_backend_choices"] = radix.extend
    held = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.server_args": arguments,
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": register_attention_backend,
            "ATTENTION_BACKENDS": registered,
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
    }
    made = {}
    for name, names in held.items():
        made[name] = module = ModuleType(name)
        module.__dict__.update(names)
    for name, module in made.items():  # `from sglang.srt import server_args`
        above, _, last = name.rpartition(".")
        if above:
            setattr(made[above], last, module)
    return made


def install(monkeypatch) -> None:
    """Put the stand-in in SGLang's place."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tilewise.compat.sglang_backend", raising=False)


def runner(pool, requests, page=1, context=512, latent=False, dtype=torch.float32, **arguments):
    """What a model runner says of itself. Requests' tokens lie in pages in any order."""
    pages = -(-context // page)
    order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(4)).view(requests, pages) + 1  # page 0 is for padding
    slots = (order[..., None] * page + torch.arange(page)).view(requests, -1)[:, :context]
    given = {"speculative_algorithm": None, "enable_deterministic_inference": False, "attn_cp_size": 1, "dcp_size": 1} | arguments
    return SimpleNamespace(
        server_args=SimpleNamespace(**given),
        model_config=SimpleNamespace(is_encoder_decoder=False, is_local_attention_model=False, context_len=context),
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=slots.to(torch.int32)),
        page_size=page,
        kv_cache_dtype=dtype,
        kv_cache_dtype_str="auto",
        use_mla_backend=latent,
        device="cpu",
    )


def slots_of(requests: int, page: int, context: int = 512) -> int:
    return (requests * -(-context // page) + 1) * page


def layer(heads=4, heads_k=2, dim=16, dim_v=None, **others):
    """A RadixAttention, as its fields."""
    return SimpleNamespaceByIdentity(
        **{
            "tp_q_head_num": heads,
            "tp_k_head_num": heads_k,
            "tp_v_head_num": heads_k,
            "qk_head_dim": dim,
            "v_head_dim": dim if dim_v is None else dim_v,
            "scaling": 0.3,
            "layer_id": 0,
            "logit_cap": 0.0,
            "logit_capping_method": "tanh",
            "sliding_window_size": -1,
            "is_cross_attention": False,
            "pos_encoding_mode": "NONE",
            "attn_type": AttentionType.DECODER,
            "xai_temperature_len": -1,
            "k_scale": None,
            "v_scale": None,
        }
        | others
    )


class SimpleNamespaceByIdentity(SimpleNamespace):
    """As a module: one object is one key."""

    __hash__ = object.__hash__


def batch(runner, which: list[int], lengths: list[int], new: list[int], decoding: bool | None = None):
    """A ForwardBatch of requests `which`, of which the last `new` of `lengths` tokens are computed; out_cache_loc is where these go in the pool."""
    decoding = set(new) == {1} if decoding is None else decoding
    table = runner.req_to_token_pool.req_to_token.long()
    places = [table[r, n - m : n] for r, n, m in zip(which, lengths, new, strict=True)]
    lens = torch.tensor(lengths)
    return SimpleNamespace(
        batch_size=len(which),
        req_pool_indices=torch.tensor(which),
        seq_lens=lens,
        seq_lens_cpu=lens,
        out_cache_loc=torch.cat(places),
        extend_seq_lens=None if decoding else torch.tensor(new, dtype=torch.int32),
        extend_seq_lens_cpu=None if decoding else new,
        forward_mode=SimpleNamespace(is_decode=lambda: decoding, is_decode_or_idle=lambda: decoding),
        _attn_output=None,
    )
