"""aiter's fused operation, whole in one launch. Positions ``[T]`` alone, so no model of this collection."""

from fusion_evidence.lib.measure.candidates import candidate

qkv_prologue = candidate("aiter")
