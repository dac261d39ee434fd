"""What runs on the device: the fused attention prologue, its definition and its declared numerics.

Importing this package chooses Triton's interpreter on a machine without an accelerator. Triton reads
that choice when ``triton.language`` is first imported, so it must be made here, before any kernel module.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
