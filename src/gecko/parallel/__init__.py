"""Many processes: who they are, how a model and a sequence are divided among them."""
