"""A training session: forward, backward, optimizer steps and sampling as separate calls."""
