"""A pretended GPU, as a module that ranks preload.

Ranks believe in two CUDA devices and NCCL. Tensors stay on the CPU, and groups use Gloo; streams,
events and memory are those of a device that works through a queue on a clock of its own.
"""

from __future__ import annotations

PRETENDED = """
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from pytest_ddpperf.rank import clock, environment, group, loop_states, warm_up
from pytest_ddpperf.rank import device as profiled

warm_up._FREELY_SECONDS = 0.05  # this device has no clock that has to rise

class Device:
    now, free_at, allocations, kernels = 1, 0, 0, []
    def work(self, milliseconds, name="gemm"):
        begin = max(self.free_at, self.now)
        self.free_at = begin + int(milliseconds * 1e6)
        span = SimpleNamespace(start=begin / 1e3, end=self.free_at / 1e3)
        self.kernels.append(SimpleNamespace(
            name=name, device_type=DeviceType.CUDA, is_user_annotation=False, time_range=span,
        ))
    def synchronize(self, *_):
        self.now = max(self.now, self.free_at)
    def monotonic_ns(self):
        return self.now
    thread_time_ns = monotonic_ns
    def event(self, *_, enable_timing):
        event = SimpleNamespace()
        event.record = lambda: vars(event).update(at=max(self.free_at, self.now))
        event.synchronize = lambda: setattr(self, "now", max(self.now, event.at))
        event.elapsed_time = lambda other: (other.at - event.at) / 1e6
        return event

device = clock.time = Device()
profiled.profile = lambda activities: SimpleNamespace(
    start=device.kernels.clear, stop=lambda: None, events=lambda: device.kernels,
)
torch.Event = device.event
torch.accelerator.synchronize = device.synchronize
torch.accelerator.set_device_index = torch.accelerator.reset_peak_memory_stats = lambda _: None
torch.accelerator.memory_stats = lambda _: {"num_device_alloc": device.allocations}
torch.accelerator.max_memory_allocated = lambda _: 1 << 20
torch.cuda.is_current_stream_capturing = lambda: False
group._pin_near = lambda _: None

probe, empty, init = environment.probe, torch.empty, dist.init_process_group
torch.empty = lambda *shape, device=None, **how: empty(*shape, **how)
dist.init_process_group = lambda backend, device_id=None, **how: init("gloo", **how)
loop_states.refuse_wrong_group = lambda *_: None  # the group is Gloo's
model = {"device_model": "Pretended", "device_memory_gib": 80}
environment.device = lambda place: model
environment.probe = lambda: {
    **probe(), **model,
    "device_type": "cuda", "device_count": 2, "backends": "gloo,nccl", "default_backends": "cpu:gloo,cuda:nccl",
}
"""
