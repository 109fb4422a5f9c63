"""Operands whose collectives are exact in any order, and the oracle that says what must come out.

The values are small whole numbers: no partial sum or product is more than the dtype (and the wire)
can hold exactly, so every algorithm, in whatever order it adds, must give the bits that NumPy gives
in float64. Each rank's values repeat with a prime period, so that those of a gigabyte need no
gigabyte on the host, and no chunk of a usual size looks like another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_ring.schedules import Kind

Values = npt.NDArray[np.float64]

# Annotated by hand: they are ml_dtypes', which has no types.
_finfo: Any = jnp.finfo
_iinfo: Any = jnp.iinfo

PERIOD = 65_521
OPS = ("sum", "prod", "max", "min", "mean")
_LARGEST = 127  # Of a single value, so that different ones do not need many bits.
_ROWS = 64  # Periods that are compared at once.

# Whole numbers up to these are exact on the wire.
_EXACT_WIRES = {"bfloat16": 2**8, "float16": 2**11}
# A rounding error on these is at most so much of the largest value of its block.
_ROUNDING = {
    "float8_e4m3fn": 2.0**-4 + 2.0**-18,
    "float8_e5m2": 2.0**-3,
    "int8": 1 / 252,
    "int4": 1 / 13.8,
}


@dataclasses.dataclass(frozen=True)
class Operands:
    """The values of all ranks, and what a collective must make of them.

    Attributes:
      kind: the collective.
      op: one of `OPS`; means nothing for an all-gather.
      dtype: the name of the elements' dtype.
      ranks: how many take part.
      wires: the formats that chunks travel as, None for as they are: the values suit all of them.

    Raises:
      ValueError: for an op that is not there, or a mean of integers.

    Example:
      >>> operands = Operands(Kind.ALL_REDUCE, "sum", "float32", 4)
      >>> total = sum(operands.of_rank(rank, 3).astype(float) for rank in range(4))
      >>> operands.wrong(total, rank=0, count=3), operands.wrong(total + [0, 1, 0], rank=0, count=3)
      (0, 1)
    """

    kind: Kind
    op: str
    dtype: str
    ranks: int
    wires: tuple[str | None, ...] = (None,)

    def __post_init__(self) -> None:
        """Rejects what has no exact result."""
        if self.op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {self.op!r}")
        if self.op == "mean" and not jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating):
            raise ValueError(f"a mean is for floats, got dtype {self.dtype}")
        lossy = sorted(wire for wire in self.wires if wire in _ROUNDING)
        if self.op == "prod" and lossy:
            raise ValueError(f"what a product may lose over wire={lossy[0]!r} has no bound")

    @functools.cached_property
    def _limit(self) -> int:
        """All whole numbers up to this one are exact."""
        dtype = jnp.dtype(self.dtype)
        floats = jnp.issubdtype(dtype, jnp.floating)
        limit = 2 ** (_finfo(dtype).nmant + 1) if floats else _iinfo(dtype).max
        return min(int(limit), 2**24, *(_EXACT_WIRES.get(wire or "", 2**24) for wire in self.wires))

    @functools.cached_property
    def _largest(self) -> int:
        """The largest value of a rank."""
        adds = self.kind is not Kind.ALL_GATHER and self.op in ("sum", "mean")
        return max(min(self._limit // (self.ranks if adds else 1), _LARGEST), 1)

    @property
    def _at_once(self) -> int:
        """How many ranks may have other than the neutral value at one place."""
        if self.kind is Kind.ALL_GATHER or self.op in ("max", "min"):
            return self.ranks
        if self.op != "prod":
            return max(self._limit // self._largest, 1)
        dtype = jnp.dtype(self.dtype)
        if jnp.issubdtype(dtype, jnp.floating):  # Powers of two are exact whatever their size.
            return int(_finfo(dtype).maxexp) - 1
        return int(_iinfo(dtype).bits) - 2

    @property
    def _signed(self) -> bool:
        return not jnp.issubdtype(jnp.dtype(self.dtype), jnp.unsignedinteger)

    def _period(self, rank: int) -> Values:
        """One period of a rank's values."""
        random = np.random.default_rng(rank)
        product = self.op == "prod" and self.kind is not Kind.ALL_GATHER
        if product:
            factors = np.array([1.0, 2.0, -1.0] if self._signed else [1.0, 2.0])
            values = factors[random.integers(len(factors), size=PERIOD)]
        else:
            low = -self._largest if self._signed else 0
            values = random.integers(low, self._largest + 1, PERIOD).astype(np.float64)
        spread = math.ceil(self.ranks / self._at_once)
        idle = (np.arange(PERIOD) + rank) % spread != 0
        values[idle] = 1.0 if product else 0.0
        return values

    @functools.cached_property
    def _all(self) -> Values:
        """float64 [ranks, PERIOD]."""
        return np.stack([self._period(rank) for rank in range(self.ranks)])

    @functools.cached_property
    def _reduced(self) -> Values:
        reduce: dict[str, Callable[..., Values]] = {
            "sum": np.sum,
            "prod": np.prod,
            "max": np.max,
            "min": np.min,
            "mean": np.mean,
        }
        return reduce[self.op](self._all, axis=0)

    def of_rank(self, rank: int, count: int) -> npt.NDArray[np.generic]:
        """What a rank puts in.

        Args:
          rank: which one.
          count: elements.

        Returns:
          dtype [count].
        """
        return np.resize(self._all[rank].astype(jnp.dtype(self.dtype)), count)

    def wrong(
        self,
        result: npt.NDArray[np.generic],
        *,
        rank: int,
        count: int,
        wire: str | None = None,
        algorithm: str = "",
    ) -> int:
        """Counts the elements of a result that are not what they must be.

        Args:
          result: what a rank ended with, [elements].
          rank: which one.
          count: elements that each rank put in.
          wire: what chunks travelled as.
          algorithm: by which algorithm: the direct exchange rounds less often than others.

        Returns:
          How many are wrong; all, if the result has another size than it must have.
        """
        parts = list(self._expected(rank, count))
        if sum(size for _, _, size in parts) != len(result):
            return max(len(result), 1)
        found, at = 0, 0
        for period, start, size in parts:
            found += self._differing(
                result[at : at + size], np.roll(period, -start), wire, algorithm
            )
            at += size
        return found

    def _expected(self, rank: int, count: int) -> Iterator[tuple[Values, int, int]]:
        """The parts of a rank's result: a period of values, where in it to begin, elements."""
        if self.kind is Kind.ALL_GATHER:
            yield from ((values, 0, count) for values in self._all)
        elif self.kind is Kind.REDUCE_SCATTER:
            each = count // self.ranks
            yield self._reduced, rank * each % PERIOD, each
        else:
            yield self._reduced, 0, count

    def _differing(
        self, found: npt.NDArray[np.generic], period: Values, wire: str | None, algorithm: str
    ) -> int:
        allowed = self._tolerance(period, wire, algorithm)
        wrong = 0
        for start in range(0, len(found), _ROWS * PERIOD):
            block = found[start : start + _ROWS * PERIOD].astype(np.float64)
            whole = len(block) // PERIOD * PERIOD
            rows, rest = block[:whole].reshape(-1, PERIOD), block[whole:]
            for got, want, most in (
                (rows, period, allowed),
                (rest, period[: len(rest)], allowed[: len(rest)]),
            ):
                right = np.abs(got - want) <= most  # So that NaN is wrong.
                wrong += right.size - int(np.count_nonzero(right))
        return wrong

    def _tolerance(self, period: Values, wire: str | None, algorithm: str) -> Values:
        """How far a result may be off: not at all, but for lossy wires and quotients."""
        allowed = np.zeros_like(period)
        if self.op == "mean" and self.kind is not Kind.ALL_GATHER:
            allowed += np.abs(period) * float(_finfo(jnp.dtype(self.dtype)).eps)
        if wire in _ROUNDING:
            n = self.ranks
            # In values of the largest size: the direct exchange rounds n contributions and a sum
            # of n of them, others at worst a sum of 1, of 2 and so on.
            rounded = 2 * n if algorithm == "direct" else n * (n + 1) // 2 + n
            rounded = 1 if self.kind is Kind.ALL_GATHER else rounded
            allowed += _ROUNDING[wire] * rounded * self._largest / (n if self.op == "mean" else 1)
        return allowed
