"""How a result leaves a rank: as bytes, tensors on the CPU and without the rest of a larger storage."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import torch

from pytest_ddpperf.records.errors import TransportError


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type hints
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided:
            # DDP's gradients are views of whole buckets: each would carry its bucket along.
            shared = obj.untyped_storage().nbytes() > obj.nbytes
            if shared or obj.device.type != "cpu":
                own = obj.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                own.requires_grad_(obj.requires_grad)
                return own.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """The pickled value; raises TransportError."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise TransportError("the result", f"{type(error).__name__}: {error}") from None
    return buffer.getvalue()
