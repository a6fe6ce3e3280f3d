"""A server of Tinker's API: clients of its SDK train adapters and sample on this machine."""
