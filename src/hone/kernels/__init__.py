"""Fused operations with hand-written gradients, tested against plain torch (`tests/twins.py`,
`*_reference`).
"""
