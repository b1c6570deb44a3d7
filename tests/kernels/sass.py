"""Instructions of a compiled kernel: which there are, and how often a thread executes them.

The disassembly of a GPU's machine code (SASS) is a list of instructions with addresses. A branch to a lower address
closes a loop, and the instructions between the two are its body.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import triton


def printed(tool: str, *options: str, cubin: bytes) -> str:
    """Return what a tool of CUDA prints about a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], check=True, capture_output=True, text=True).stdout


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


class Instruction(NamedTuple):
    """One instruction: its address, its name with modifiers ("LDG.E.128"), and its operands."""

    address: int
    name: str
    operands: str

    @property
    def kind(self) -> str:
        """The name without modifiers."""
        return self.name.partition(".")[0]


class Loop(NamedTuple):
    """Addresses of the first and the last instruction of a loop."""

    first: int
    last: int

    def holds(self, address: int) -> bool:
        return self.first <= address <= self.last


@dataclass(frozen=True)
class Code:
    """Instructions of one kernel in the order of their addresses."""

    instructions: Sequence[Instruction]

    @classmethod
    def of(cls, cubin: bytes) -> Code:
        """Disassemble the one kernel in ``cubin``."""
        return cls.parse(printed(triton.knobs.nvidia.cuobjdump.path, "--dump-sass", cubin=cubin))

    @classmethod
    def parse(cls, text: str) -> Code:
        """Read the output of ``cuobjdump --dump-sass``. Padding after the last instruction is left out."""
        found = [
            Instruction(int(address, 16), name, operands.strip())
            for address, name, operands in _LINE.findall(text)
            if name != "NOP"
        ]
        if not found:
            raise ValueError(f"There must be instructions in the disassembly; got {text[:200]!r}.")
        return cls(found)

    @cached_property
    def loops(self) -> list[Loop]:
        """The loops, outer ones before those that they contain. Branches to themselves, after the end, are none."""
        found: dict[int, int] = {}
        for x in self.instructions:
            target = re.search(r"0x([0-9a-f]+)\s*$", x.operands) if x.kind == "BRA" else None
            if target is not None and int(target[1], 16) < x.address:
                first = int(target[1], 16)
                found[first] = max(x.address, found.get(first, 0))
        return sorted((Loop(*pair) for pair in found.items()), key=lambda loop: (loop.first, -loop.last))

    def depth(self, loop: Loop) -> int:
        """Return how many loops contain this one."""
        return sum(x.first <= loop.first and loop.last <= x.last for x in self.loops) - 1

    def has(self, wanted: Callable[[Instruction], bool]) -> bool:
        """Return whether an instruction of the code is ``wanted``."""
        return any(map(wanted, self.instructions))

    def innermost(self, loop: Loop) -> bool:
        """Return whether the loop contains no other one."""
        return not any(loop.first <= x.first and x.last <= loop.last and x != loop for x in self.loops)

    def executed(self, trips: Sequence[float], weight: Callable[[Instruction], float] = lambda _: 1.0) -> float:
        """Return how many instructions a warp executes if loops of depth i run ``trips[i]`` times.

        Both sides of a branch that is no loop are counted. ``weight``: what an instruction counts.

        Raises:
            ValueError: there are deeper loops than trip counts.
        """
        deepest = 1 + max(map(self.depth, self.loops), default=-1)
        if deepest > len(trips):
            raise ValueError(f"Trip counts must be given for {deepest} depths of loops; got {list(trips)}.")
        total = 0.0
        for x in self.instructions:
            times = weight(x)
            for loop in self.loops:
                times *= trips[self.depth(loop)] if loop.holds(x.address) else 1.0
            total += times
        return total
