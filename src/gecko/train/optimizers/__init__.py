"""Optimizers, the learning rates of their parameters, and their settings."""
