"""Quantities on the command line: the same units in every command, read and written.

| what      | units                                              | a bare number is |
|-----------|----------------------------------------------------|------------------|
| size      | B, kB MB GB TB (powers of 1000), KiB MiB GiB TiB;  | bytes            |
|           | K M G T as in nccl-tests: KiB MiB GiB TiB          |                  |
| bandwidth | GB/s, GiB/s (bytes), Gbit/s, Gb/s, Gbps (bits) ... | bytes per second |
| time      | s, ms, us, ns                                      | seconds          |

A large B is a byte, a small b a bit; prefixes may be in either case.
"""

from __future__ import annotations

import math
import re

import jax.numpy as jnp

_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"
_DECIMAL = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "p": 1000**5}
_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_PER_SECOND = {"": 1, "s": 1, "ms": 10**3, "us": 10**6, "µs": 10**6, "μs": 10**6, "ns": 10**9}

DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
}
_ITEM_BITS = re.compile(r"(?:bfloat|float|int|uint|complex)(8|16|32|64|128)(?:_e\dm\d(?:fnu?z?)?)?")


def _split(text: str, what: str, units: str) -> tuple[float, str]:
    found = re.fullmatch(rf"\s*{_NUMBER}\s*(\S*)\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{what} must be a number with a unit such as {units}, got {text!r}")
    return float(found[1]), found[2]


def _finite(number: float, what: str, text: str) -> float:
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {text!r}")
    return number


def parse_size(text: str) -> int:
    """Bytes.

    Raises:
      ValueError: saying what would be right.

    Example:
      >>> parse_size("1GB"), parse_size("64MiB"), parse_size("4K"), parse_size("100")
      (1000000000, 67108864, 4096, 100)
    """
    number, unit = _split(text, "a size", "1GB, 64MiB or 4K")
    found = re.fullmatch(r"([kKmMgGtTpP]?)(iB|B|)", unit)
    if not found or (not found[1] and found[2] == "iB"):
        hint = f" (a small b is a bit: {unit[:-1]}B?)" if unit.endswith("b") else ""
        raise ValueError(f"a size must end in a unit such as GB, MiB or K, got {text!r}{hint}")
    prefix = found[1].lower()
    factor = _DECIMAL[prefix] if found[2] == "B" or not prefix else _BINARY[prefix]
    size = _finite(number * factor, "a size", text)
    if not size.is_integer():
        raise ValueError(f"a size must be a whole number of bytes, got {text!r}")
    return int(size)


def parse_bandwidth(text: str) -> float:
    """Bytes per second.

    Raises:
      ValueError: saying what would be right.

    Example:
      >>> parse_bandwidth("400GB/s"), parse_bandwidth("100Gbit/s"), parse_bandwidth("100Gbps")
      (400000000000.0, 12500000000.0, 12500000000.0)
    """
    number, unit = _split(text, "a bandwidth", "400GB/s or 100Gbit/s")
    found = re.fullmatch(r"([kKmMgGtTpP]?)(i?)(B/s|bits?/s|b/s|bps)", unit)
    if (not found and unit) or (found and found[2] and not found[1]):
        raise ValueError(
            f"a bandwidth must end in a unit such as GB/s (bytes) or Gbit/s (bits), got {text!r}"
        )
    if found:
        prefix = found[1].lower()
        factor = _BINARY[prefix] if found[2] else _DECIMAL[prefix]
        number *= factor / (1 if found[3] == "B/s" else 8)
    if not number:
        raise ValueError(f"a bandwidth must be above 0, got {text!r}")
    return _finite(number, "a bandwidth", text)


def parse_seconds(text: str) -> float:
    """Seconds.

    Raises:
      ValueError: saying what would be right.

    Example:
      >>> parse_seconds("5us"), parse_seconds("1.5ms"), parse_seconds("0")
      (5e-06, 0.0015, 0.0)
    """
    number, unit = _split(text, "a time", "5us or 1.5ms")
    if unit.lower() not in _PER_SECOND:
        raise ValueError(f"a time must end in s, ms, us or ns, got {text!r}")
    return _finite(number, "a time", text) / _PER_SECOND[unit.lower()]


def parse_factor(text: str) -> float:
    """How many times as long something takes.

    Raises:
      ValueError: saying what would be right.

    Example:
      >>> parse_factor("1.5")
      1.5
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"a factor must be a finite number above 0, such as 1.5, got {text!r}")
    return number


def parse_dtype(text: str) -> tuple[str, int]:
    """The full name of a type, and the bytes of an element.

    Raises:
      ValueError: saying what would be right.

    Example:
      >>> parse_dtype("bf16"), parse_dtype("float32")
      (('bfloat16', 2), ('float32', 4))
    """
    name = DTYPES.get(text.lower(), text.lower())
    found = _ITEM_BITS.fullmatch(name)
    if name != "bool" and not (found and hasattr(jnp, name)):
        raise ValueError(f"a dtype must be a name such as bf16, float32 or int8, got {text!r}")
    return name, int(found[1]) // 8 if found else 1


def format_size(nbytes: float) -> str:
    """Bytes for people.

    Example:
      >>> format_size(1_750_000_000), format_size(12)
      ('1.75 GB', '12 B')
    """
    return _prefixed(nbytes, "B")


def format_bandwidth(bytes_per_second: float) -> str:
    """Bytes per second for people.

    Example:
      >>> format_bandwidth(45e9)
      '45 GB/s'
    """
    return _prefixed(bytes_per_second, "B/s")


def format_seconds(seconds: float) -> str:
    """A time for people.

    Example:
      >>> format_seconds(0.004375), format_seconds(5e-6), format_seconds(0.0)
      ('4.38 ms', '5 us', '0 s')
    """
    return _prefixed(seconds, "s")


def _prefixed(value: float, unit: str) -> str:
    """Three digits and a prefix."""
    if not value or math.isinf(value):
        return f"{value:.0f} {unit}"
    value = float(f"{value:.3g}")
    exponent = min(max(math.floor(math.log10(value) / 3 + 1e-9), -3), 5)
    return f"{value / 1000.0**exponent:.4g} {'num kMGTP'[exponent + 3].strip()}{unit}"
