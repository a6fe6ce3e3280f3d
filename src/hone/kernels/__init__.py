"""Fused operations with hand-written gradients. Each has a plain-torch twin, `*_reference`, that a test holds it to."""
