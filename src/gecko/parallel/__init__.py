"""Parallel training: ranks and their mesh, FSDP, and context parallelism."""
