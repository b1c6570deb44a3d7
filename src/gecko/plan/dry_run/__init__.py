"""Dry run: one step of a run's real training code on this machine, without GPUs, for some ranks of its mesh."""
