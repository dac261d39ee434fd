"""Measuring: import from `machine`, `compare`, `timing` and `floors`.

Nothing is imported here, so that asking for the machine does not load torch.
"""
