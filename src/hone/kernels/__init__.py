"""Fused operations with hand-written gradients; tests compare each with plain torch.

The plain versions are the functions `*_reference` and those of `tests/twins.py`.
"""
