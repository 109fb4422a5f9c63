"""Every setting of jax_ring: the environment variables it reads, and how to override them.

| variable           | values    | default | meaning                                             |
|--------------------|-----------|---------|-----------------------------------------------------|
| JAX_RING_ALGORITHM | auto, xla or one of `schedules.FAMILIES` | auto | what "auto" means |
| JAX_RING_ALLOW_XLA | 0, 1      | 0       | 1: "auto" may also be lax's own op                  |
| JAX_RING_LINK      | auto or one of `choose.LINKS` | auto | what joins the ranks, for "auto"    |
| JAX_RING_TUNING    | a file    |         | measured links, see `choose.load_tuning`            |
| JAX_RING_REDUCER   | auto, native, xla | auto    | what does the work on chunks                |
| JAX_RING_UNROLL    | 1 or more | 32      | longer runs of like steps become a loop             |
| JAX_RING_NATIVE    | 0, 1      | 1       | 0: neither build (at install) nor load native code  |
| JAX_RING_CHECK_CONSISTENCY | 0, 1 | 1    | 0: do not compare what the processes compile        |
| JAX_RING_CUDA      | 0, 1      | 0       | 1: also build the CUDA kernels (at install only)    |

Settings are read while a function is traced; what is compiled already does not change.
JAX_RING_PROCESSES, JAX_RING_PROCESS, JAX_RING_COORDINATOR and what launchers set are for
`jax_ring.distributed.find`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax_ring import choose
from jax_ring.schedules import FAMILIES

ALGORITHMS = ("auto", *FAMILIES, "xla")
REDUCERS = ("auto", "native", "xla")
LINKS = ("auto", *choose.LINKS)
# Where the rest of the package finds variables that are no settings.
ENVIRONMENT: Mapping[str, str] = os.environ
_FLAGS = ("native", "allow_xla", "check_consistency")


def _variable(name: str) -> str:
    """The variable of the environment for a setting."""
    return f"JAX_RING_{name.upper()}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings in force.

    Attributes:
      algorithm: what `algorithm="auto"` means: a name in `schedules.FAMILIES`, "xla", or "auto":
        the one with the smallest predicted time, and over a lossy wire direct.
      allow_xla: whether "auto" may choose lax's own op.
      link: what joins the ranks, of which "auto" takes the prices: a name in `choose.LINKS`, or
        "auto": found from the platform and the number of processes.
      tuning: a tuning file, or None.
      unroll: runs of at most this many like steps are unrolled, so that XLA can fuse and overlap
        them; longer ones become a loop, so that the program's size does not grow with the ranks.
      native: whether the native module may be loaded.
      reducer: what does the work on chunks: "native" code where there is any, plain JAX ("xla"),
        or ("auto") which of them was measured to be faster.
      check_consistency: whether what the processes compile is compared, see
        `jax_ring.consistency`.
    """

    algorithm: str = "auto"
    allow_xla: bool = False
    link: str = "auto"
    tuning: str | None = None
    unroll: int = 32
    native: bool = True
    reducer: str = "auto"
    check_consistency: bool = True

    def __post_init__(self) -> None:
        """Rejects what no setting can be."""
        for name, allowed in (("algorithm", ALGORITHMS), ("reducer", REDUCERS), ("link", LINKS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"{name} ({_variable(name)}) must be one of {allowed}, got {value!r}"
                )
        if isinstance(self.unroll, bool) or not isinstance(self.unroll, int) or self.unroll < 1:
            raise ValueError(
                f"unroll (JAX_RING_UNROLL) must be an integer of at least 1, got {self.unroll!r}"
            )
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} ({_variable(name)}) must be a bool, got {value!r}")
        if self.tuning is not None:
            choose.load_tuning(self.tuning)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = ENVIRONMENT) -> Settings:
        """Reads the environment variables.

        Args:
          environment: the variables, by default the process's.

        Returns:
          The settings; those that are not set have their defaults.

        Raises:
          ValueError: naming a variable whose value is not allowed, and what is.
        """
        found: dict[str, Any] = {}
        for name in ("algorithm", "reducer", "link"):
            if (variable := _variable(name)) in environment:
                found[name] = environment[variable].strip().lower()
        if "JAX_RING_UNROLL" in environment:
            found["unroll"] = _parse(environment, "JAX_RING_UNROLL", int, "an integer")
        flags = {"0": False, "false": False, "1": True, "true": True}
        for name in _FLAGS:
            if (variable := _variable(name)) in environment:
                found[name] = _parse(environment, variable, lambda v: flags[v], "0 or 1")
        if environment.get("JAX_RING_TUNING"):
            found["tuning"] = environment["JAX_RING_TUNING"]
        return cls(**found)


def _parse(environment: Mapping[str, str], name: str, parse: Any, wanted: str) -> Any:
    text = environment[name].strip().lower()
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name} must be {wanted}, got {environment[name]!r}") from None


def _at_start() -> tuple[Settings, str]:
    """The settings of the environment, or the defaults and what is wrong with the environment."""
    try:
        return Settings.from_environment(), ""
    except ValueError as error:
        return Settings(), str(error)


# What is wrong is told where settings are first used: an import must not fail for it, or
# `jax-ring doctor` could not say what to do.
settings, environment_error = _at_start()
_current: contextvars.ContextVar[Settings] = contextvars.ContextVar("jax_ring", default=settings)


# What else the environment may say: see `jax_ring.distributed`, and the table above.
_OTHERS = ("coordinator", "processes", "process", "cuda")


def unread(environment: Mapping[str, str] = ENVIRONMENT) -> dict[str, str]:
    """The variables that are named as if they were settings, which nothing reads.

    Args:
      environment: the variables, by default the process's.

    Returns:
      For each of them the most similar one that there is, or "".

    Example:
      >>> unread({"JAX_RING_ALGORTIHM": "ring", "JAX_RING_LINK": "auto", "JAX_RING_X": "1"})
      {'JAX_RING_ALGORTIHM': 'JAX_RING_ALGORITHM', 'JAX_RING_X': ''}
    """
    fields = (field.name for field in dataclasses.fields(Settings))
    known = [_variable(name) for name in (*fields, *_OTHERS)]
    return {
        name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), "")
        for name in sorted(environment)
        if name.startswith("JAX_RING_") and name not in known
    }


def current() -> Settings:
    """The settings in force where this is called.

    Raises:
      ValueError: naming a variable of the environment whose value is not allowed, and what is.
    """
    found = _current.get()
    if environment_error and found is settings:
        raise ValueError(environment_error)
    return found


def _without(changes: Iterable[str]) -> Settings:
    """The settings in force, where it does not matter what the environment says of some of them."""
    if not environment_error or _current.get() is not settings:
        return _current.get()
    replaced = {_variable(name) for name in changes}
    return Settings.from_environment({k: v for k, v in ENVIRONMENT.items() if k not in replaced})


@contextlib.contextmanager
def config(**changes: Any) -> Iterator[Settings]:
    """Changes settings for what is traced inside a with statement, in this thread.

    Args:
      **changes: fields of `Settings`: `algorithm`, what "auto" means (`JAX_RING_ALGORITHM`);
        `allow_xla`, whether that may be lax's own op (`JAX_RING_ALLOW_XLA`); `link`, what joins the
        ranks (`JAX_RING_LINK`); `tuning`, a tuning file (`JAX_RING_TUNING`); `unroll`, the longest
        run of like steps that is not made a loop (`JAX_RING_UNROLL`); `native`, whether native code
        may be used (`JAX_RING_NATIVE`); `reducer`, what does the work on chunks
        (`JAX_RING_REDUCER`); `check_consistency`, whether what the processes compile is compared
        (`JAX_RING_CHECK_CONSISTENCY`).

    Yields:
      The settings in force.

    Raises:
      TypeError: for a name that is no setting.
      ValueError: for a value that is not allowed, here or in the variable of another setting.

    Example:
      >>> import jax_ring
      >>> with jax_ring.config(unroll=4) as settings:
      ...     settings.unroll
      4
    """
    token = _current.set(dataclasses.replace(_without(changes), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
