"""Plugin of pytest: the C kernels are compiled with the address and undefined-behaviour sanitizers.

``make test-sanitized`` uses it, and loads the sanitizers before Python: memory that PyTorch allocates then has guarded
ends. A report ends the process.
"""

from gecko.ops.backends import cpu_library

# Less optimised code has the same accesses and compiles faster. The name of a library contains the flags.
cpu_library._FLAGS += (
    "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)  # fmt: skip
