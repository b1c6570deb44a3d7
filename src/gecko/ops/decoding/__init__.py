"""One token of several sequences through a whole network in C (``cpu.py``); ``inference/decoder.py`` calls it."""
