"""Many texts continued side by side, and the server that offers it."""
