"""Reads scheduled HLO: the instructions of a device, in the order in which they run."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from harness import Hlo

Array = tuple[str, int]  # element type, elements

_NO_PASS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
      name: its name.
      op: what it does, "fusion" for example.
      arrays: what it results in, tuples flattened.
      operands: the names of its operands.
      attributes: what follows them, as text.
      root: whether it is the result of its computation.
    """

    name: str
    op: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def promised(self) -> dict[int, int]:
        """Which operand's memory each array of a custom call's result takes."""
        aliases = re.findall(r"\{(\d*)\}: \((\d+), \{\d*\}", self.attributes)
        return {int(output or 0): int(operand) for output, operand in aliases}

    def __str__(self) -> str:
        arrays = ", ".join(f"{kind}[{elements}]" for kind, elements in self.arrays)
        return f"{self.name} = {arrays} {self.op}({', '.join(self.operands)})"


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True, repr=False)
class Scheduled(Hlo):
    """A module compiled for devices that are not there."""

    def __repr__(self) -> str:
        return f"<{len(self.schedule)} instructions>"

    @functools.cached_property
    def computations(self) -> dict[str, Computation]:
        """Every computation by its name, fused ones too."""
        parts = re.findall(r"^(?:ENTRY )?%(\S+) \(.*\{\n((?:  .*\n)+)", self.text, re.MULTILINE)
        return {name: _parse(body) for name, body in parts}

    @functools.cached_property
    def schedule(self) -> list[Instruction]:
        """What the device runs, in order."""
        (entry,) = re.findall(r"^ENTRY %(\S+) ", self.text, re.MULTILINE)
        return list(self.computations[entry].values())

    @property
    def counts(self) -> collections.Counter[str]:
        """How often each instruction occurs in the schedule; fusions count as one."""
        return collections.Counter(instruction.op for instruction in self.schedule)

    @property
    def permutes(self) -> list[Array]:
        """What each collective-permute sends, in order, whether XLA combined some into one."""
        ends = ("collective-permute", "collective-permute-done")
        return [array for i in self.schedule if i.op in ends for array in i.arrays]

    @property
    def during_permutes(self) -> list[list[Instruction]]:
        """For each permute in order, what is scheduled between its start and its end."""
        found: list[list[Instruction]] = []
        for position, instruction in enumerate(self.schedule):
            if instruction.op == "collective-permute":
                found.append([])
            if instruction.op == "collective-permute-start":
                rest = self.schedule[position + 1 :]
                ends = [instruction.name in later.operands for later in rest]
                found.append([i for i in rest[: ends.index(True)] if i.op not in _NO_PASS])
        return found

    def custom_calls(self, target: str) -> list[Instruction]:
        """The calls of one handler, in order."""
        wanted = f'custom_call_target="{target}"'
        return [i for i in self.schedule if i.op == "custom-call" and wanted in i.attributes]

    def reads(self, call: Instruction) -> list[int]:
        """The elements of each operand."""
        by_name = {i.name: i for i in self.schedule}
        return [sum(size for _, size in by_name[name].arrays) for name in call.operands]

    def whole_writes(self, elements: int) -> list[str]:
        """Names what each instruction does that writes at least `elements`, if not in place.

        One that updates a part of its operand in place, or that is a handler which was promised
        its operand's memory, does not write the whole. Nor does making room for it.
        """
        room = self.custom_calls("AllocateBuffer")
        passes = [i for i in self.schedule if i.op not in _NO_PASS and i not in room]
        return [
            self._does(i) for i in passes if sum(size for _, size in self._fresh(i)) >= elements
        ]

    def _fresh(self, instruction: Instruction) -> list[Array]:
        """The arrays of a result that are not an operand updated in place."""
        in_place = [self._updates(root, body) for root, body in self._roots(instruction)]
        if len(in_place) != len(instruction.arrays):
            in_place = [False] * len(instruction.arrays)
        for output in instruction.promised:
            in_place[output] = True
        return [a for a, kept in zip(instruction.arrays, in_place, strict=True) if not kept]

    def _roots(self, instruction: Instruction) -> list[tuple[Instruction, Computation]]:
        """What computes each array of a result: the instruction, or the roots of a fusion."""
        called = re.search(r"calls=%(\S+?)(?:,|$)", instruction.attributes)
        if instruction.op != "fusion" or called is None:
            return [(instruction, {})]
        body = self.computations[called[1]]
        (root,) = [i for i in body.values() if i.root]
        roots = [body[name] for name in root.operands] if root.op == "tuple" else [root]
        return [(_behind_bitcasts(i, body), body) for i in roots]

    def _updates(self, root: Instruction, body: Computation) -> bool:
        if root.op != "dynamic-update-slice":
            return False
        updated = body.get(root.operands[0])
        return updated is None or _behind_bitcasts(updated, body).op == "parameter"

    def _does(self, instruction: Instruction) -> str:
        roots = [root.op for root, _ in self._roots(instruction)]
        return instruction.op if instruction.op != "fusion" else f"fusion of {', '.join(roots)}"


def _parse(body: str) -> Computation:
    return {i.name: i for i in map(_instruction, body.splitlines()) if i is not None}


def _instruction(line: str) -> Instruction | None:
    found = re.match(r"  (ROOT )?%(\S+) = (.*)", line)
    if found is None:
        return None
    root, name, rest = found.groups()
    kind, rest = _split(rest, 0 if rest.startswith("(") else rest.index(" "))
    op, rest = rest.strip().split("(", 1)
    operands, attributes = _split(f"({rest}", 0)
    return Instruction(
        name,
        op,
        tuple(_arrays(kind)),
        tuple(re.findall(r"%([^\s,()]+)", operands)),
        attributes,
        root is not None,
    )


def _split(text: str, start: int) -> tuple[str, str]:
    """Splits at `start`, or if a parenthesis opens there, behind the one that closes it."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            end += text[end] == ")"
            return text[:end], text[end:]
    raise ValueError(f"a parenthesis is not closed: {text}")


def _arrays(kind: str) -> Iterator[Array]:
    for element, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", kind):
        yield element, math.prod(int(d) for d in dims.split(",") if d)


def _behind_bitcasts(instruction: Instruction, body: Computation) -> Instruction:
    while instruction.op == "bitcast":
        instruction = body[instruction.operands[0]]
    return instruction


def scheduled(f: Callable[..., Any], *args: Any, **jit_options: Any) -> Scheduled:
    """Compiles f for the devices that its arguments' shardings name."""
    result = jax.jit(f, **jit_options).lower(*args).compile()
    hlo = Scheduled(result.as_text(), result.memory_analysis())
    print(*hlo.schedule, sep="\n")  # pytest shows it where a test fails.
    return hlo
