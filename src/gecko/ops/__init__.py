"""Operators. Each raises ValueError if the shapes of its arguments are inconsistent."""
