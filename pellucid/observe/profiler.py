"""What ran on a worker's device, and when: torch's profiler, reduced to spans that can be sent anywhere."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[str, int, int, str]  # name, start and duration (nanoseconds, the start of time.time_ns), lane


class DeviceProfiler:
    """Of a GPU its kernels and copies, a lane a stream; of a CPU the operations, a lane a thread."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU])

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> list[Span]:
        """What has run since `start`."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        profiler = self._profile.profiler
        assert profiler is not None and profiler.kineto_results is not None, "it was not started"
        spans: list[Span] = []
        for event in profiler.kineto_results.events():
            if (event.device_type().name == "CUDA") == self._on_gpu:
                lane = event.device_resource_id() if self._on_gpu else event.start_thread_id()
                name = f"stream {lane}" if self._on_gpu else f"thread {lane}"
                spans.append((event.name(), event.start_ns(), event.duration_ns(), name))
        return spans
