"""Markers of the opaque prologue: how often each path ran, as the device and as the host count it.

The device's counters are incremented by what runs there, so they count every replay of a captured
graph. The host's count the operator's Python, which runs when a graph is captured and not when it is
replayed: that difference is the reason for having both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch

from fusion_evidence.kernels import fused
from fusion_evidence.kernels.op import (
    DECODE,
    ERRORS,
    PREFILL,
    RESETS,
    OpaquePrologue,
    Path,
    new_marker,
    register,
)

Where = Literal["host", "device"]

KERNEL = "_prologue"
"""What a profiler calls the fused kernel."""


class StaleMarker(RuntimeError):
    """A marker whose counts are not those of the calls since the last reset."""


class Markers:
    """Counts of one `OpaquePrologue`, from its last `reset` on (at first: from now on)."""

    def __init__(self, prologue: OpaquePrologue) -> None:
        self._prologue = prologue
        self._entry = register(prologue.configuration)
        self._resets = int(prologue.marker[RESETS])
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero, on the device in order with the work of the current stream.

        Raises RuntimeError while a graph captures: the reset would become part of the graph.
        """
        self._refuse_capture("reset")
        self._resets += 1
        fresh = new_marker("cpu")
        fresh[RESETS] = self._resets
        self._prologue.marker.copy_(fresh)
        self._entry.calls.clear()
        self._entry.captured.clear()

    def read(self) -> dict[Where, dict[Path, int]]:
        """Counts by where and path; waits for the device.

        Raises:
            RuntimeError: a graph is capturing, so that what it will run has not run yet.
            StaleMarker: the device's counter has not seen the last reset (it was reset elsewhere,
                restored or written over), or it does not account for the calls that the operator
                made: they counted in another marker, or another prologue's counted in this one.
            ValueError: a ``debug`` configuration met a position outside the table or a slot beyond the
                cache since the reset.
        """
        self._refuse_capture("read")
        marker, entry = self._prologue.marker, self._entry
        if marker.is_cuda:
            torch.cuda.synchronize(marker.device)
        counts = marker.tolist()
        if counts[RESETS] != self._resets:
            raise StaleMarker(
                f"the marker on {marker.device} is at reset {counts[RESETS]}, the last one made here "
                f"is {self._resets}: it was reset elsewhere, restored or written over"
            )
        fused.raise_errors(marker[ERRORS])
        device: dict[Path, int] = {"decode": counts[DECODE], "prefill": counts[PREFILL]}
        for path, count in device.items():
            called = entry.calls[path] - entry.captured[path]
            # Only a graph that captured the operator can run it without its Python.
            if count < called or (count > called and not entry.in_a_graph):
                raise StaleMarker(
                    f"{path}: the device counted {count} runs, but since the reset the operator was "
                    f"called {called} times for {self._prologue.handle!r}: not the same marker"
                )
        return {"host": {path: entry.calls[path] for path in device}, "device": device}

    def _refuse_capture(self, what: str) -> None:
        if self._prologue.marker.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"cannot {what} markers while a CUDA graph captures: {what} before or after"
            )


def count_kernels(call: Callable[[], object], name: str = KERNEL) -> int:
    """How many kernels of that name ran on the device during ``call``, as ``torch.profiler`` saw it.

    Raises RuntimeError on a machine without an accelerator: kernels have no names there.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("counting kernels by name needs a CUDA or ROCm device and there is none")
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():  # of a profiler with several cycles; this has one
        warnings.filterwarnings("ignore", message=".*clears events at the end of each cycle")
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(
        event.name == name and event.device_type == on_device for event in profile.events() or ()
    )
