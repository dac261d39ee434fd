"""vLLM's two launches: its fused norm, rotation and gate, then its cache writer. Any T."""

from fusion_evidence.lib.measure.candidates import candidate

qkv_prologue = candidate("vllm")
