"""Checkpoints of a run: their folders, their content, the adapters that they may hold, and averages of several."""
