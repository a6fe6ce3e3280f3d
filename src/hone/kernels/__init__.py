"""Fused operations with hand-written gradients; tests hold them to plain twins (`tests/twins.py`, `*_reference`)."""
