"""Preloaded with --ddp-preload: several ranks over NCCL share one GPU. For checks of failures only.

NCCL below 2.30 takes two ranks on one GPU only if it believes them on two hosts (NCCL_HOSTID); from
2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1 allows it.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from pytest_ddpperf.rank import environment, group

_prepare, _probe = group.prepare, environment.probe


def _share(plan: Any, index: int, threads: int) -> torch.device:
    if plan.device == "cuda":
        os.environ |= {
            "NCCL_HOSTID": f"host-{index}",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MNNVL_ENABLE": "0",
            "NCCL_IB_DISABLE": "1",
            "NCCL_MAX_CTAS": "4",
        }
        index = 0
    return _prepare(plan, index, threads)


def _count() -> dict[str, Any]:
    facts: dict[str, Any] = {**_probe()}
    ranks = int(os.environ["GPU_RANKS"])
    return facts | {"device_count": max(facts["device_count"], ranks)}


group.prepare, environment.probe = _share, _count
