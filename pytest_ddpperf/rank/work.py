"""The work of a step, by what it calls: operators, and their floating-point operations."""

import re
from typing import Any

import torch

# Here and not at its first use, which would be in a rank.
import torch.utils.flop_counter

from pytest_ddpperf.rank import torch_names

# Names of operators that multiply matrices, whether torch has a formula for them or not. Others
# cost little next to them, and count nothing, as in torch's FlopCounterMode.
_MULTIPLIES = re.compile(
    r"(?:^|_)(?:add|badd)?"
    r"(?:b?mm|mv|matmul|v?dot|ger|outer|linear|conv\w*olution|conv\dd|rnn|attention|transformer)"
    r"(?:_|$)"
)
# Whose operators are torch's own. What others do is not known.
_OF_TORCH = """
    aten prim prims profiler inductor c10d _c10d_functional fsdp _dtensor
""".split()
# Attention on CPU has arguments as on a device, and torch has a formula for that alone.
_ON_CPU = "_for_cpu"


class Work:
    """What the operators of a step do, as they are called."""

    def __init__(self) -> None:
        self.operators = 0
        # None where torch has no formula for an operator that may have many
        self.flops: int | None = 0
        self._formulas = torch_names.find(
            "torch.utils.flop_counter:flop_registry"
        )

    def add(self, func: Any, args: Any, options: Any, result: Any) -> None:
        """Count a call of an operator."""
        self.operators += 1
        if self.flops is None:
            return
        namespace, _, name = func.name().partition("::")
        packet = getattr(func, "overloadpacket", func)
        if _ON_CPU in name:
            on_device = name.replace(_ON_CPU, "")
            packet = getattr(torch.ops.aten, on_device, packet)
        formula = (self._formulas or {}).get(packet)
        if formula is not None:
            try:
                self.flops += int(formula(*args, **options, out_val=result))
            except Exception:  # arguments that the formula does not know
                self.flops = None
            return
        is_known = self._formulas is not None and namespace in _OF_TORCH
        if not is_known or _MULTIPLIES.search(name.partition(".")[0]):
            self.flops = None
