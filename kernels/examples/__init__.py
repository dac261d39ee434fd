"""Candidates to start from and to learn from: `plain` is right, three others are wrong in one thing each.

All can be captured in a CUDA graph and run on a CPU. See ``kernels/BRING_YOUR_OWN.md``.
"""
