"""Reading states that clients save, list, delete and continue from."""
