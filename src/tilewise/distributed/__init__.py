"""Attention over a sequence that several GPUs, or processes, hold: exact for any mask, with the bits of one (docs/guide/several-gpus.md)."""

from tilewise.distributed.context import attention
from tilewise.distributed.decoding import decode, held
from tilewise.distributed.planning import Plan, plan
from tilewise.distributed.reporting import Report

__all__ = ["Plan", "Report", "attention", "decode", "held", "plan"]
