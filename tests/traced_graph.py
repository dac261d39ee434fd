"""What Dynamo traces of a function; no tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.testing import EagerAndRecordGraphs


def traced(forward: Callable[..., Any], *arguments: Any) -> torch.fx.GraphModule:
    """The first graph of ``forward(*arguments)``, traced from nothing and run as it is."""
    torch._dynamo.reset()
    recorded = EagerAndRecordGraphs()
    torch.compile(forward, backend=recorded)(*arguments)
    return recorded.graphs[0]
