"""What a kernel of repair depends on: less than the kernels that it repairs gradients of, so that those of many lengths and tiles share one."""

from dataclasses import dataclass
from typing import Literal

import torch

from tilewise.backends.hopper.backward.config import Config
from tilewise.backends.hopper.score_changes import ScoreChanges


@dataclass(frozen=True, kw_only=True)
class RepairConfig(ScoreChanges):
    """With the launch function, the identity of a compiled kernel."""

    dtype: torch.dtype
    head_dim: int  # of the tile; the tensors' may be smaller
    head_dim_v: int
    mask_kind: Literal["band", "varlen", "tiles"]  # one band, or as Config has it
    columns: int  # of an entry, at most
    tile_m: int = 0  # queries and keys of the tiles that tables are of; where mask_kind is "tiles"
    tile_n: int = 0
    wide_keys: bool = False  # dK and dV are in fp32

    @classmethod
    def of(cls, config: Config) -> "RepairConfig":
        """For gradients that kernels of that configuration compute."""
        changes = {name: getattr(config, name) for name in ScoreChanges.__dataclass_fields__}
        tiles = {"tile_m": config.tile_m, "tile_n": config.tile_n} if config.mask_kind == "tiles" else {}
        return cls(
            dtype=config.dtype,
            head_dim=config.head_dim,
            head_dim_v=config.head_dim_v,
            mask_kind=config.mask_kind if config.mask_kind in ("varlen", "tiles") else "band",
            columns=config.repaired_columns,
            wide_keys=config.wide_keys,
            **tiles,
            **changes,
        )

    @property
    def separate_dq_kernel(self) -> bool:
        """Whether tables of the queries' visits are read."""
        return False

    @property
    def may_look(self) -> bool:
        """Whether it may be known which hidden elements have made a row NaN (Config.looks)."""
        return self.mask_kind != "tiles" and self.bias is None
