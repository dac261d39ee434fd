"""Defines the two operators that a torchvision without its compiled part describes but does not have.

PyPI's torchvision is built for a CUDA torch. Beside a CPU build of torch its compiled part does not load,
and ``import torchvision`` stops at ``operator torchvision::nms does not exist``. vLLM imports it and, for
text, calls nothing of it, so the names are enough: they are defined just before torchvision is imported.

`vllm_environment` puts a copy into the environment of the CPU server, imported when its Python starts.
"""

from __future__ import annotations

import sys
from typing import Any

_SCHEMA = "{}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[Any] = []  # a library's operators end with it


class _BeforeTorchvision:
    """Finds nothing; the first search for torchvision is the moment to define."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(_SCHEMA.format(operator))
            _kept.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
