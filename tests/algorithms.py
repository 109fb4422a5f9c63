"""Schedules unlike the ring, to test that nothing is written for the ring alone."""

from jax_ring.schedules import Kind, Op, Schedule, Step


def recursive_doubling(n):
    """The whole buffer exchanged with the partner across each bit, n a power of two."""
    steps = [
        Step(tuple((r, r ^ bit) for r in range(n)), [0] * n, [0] * n, Op.REDUCE)
        for bit in (1 << i for i in range(n.bit_length() - 1))
    ]
    return Schedule(n, 1, steps, Kind.ALL_REDUCE, "recursive_doubling")


def reduce_and_broadcast(n):
    """A star through rank 0, in which most ranks are idle in each step."""
    up = [Step(((r, 0),), [0] * n, [0] * n, Op.REDUCE) for r in range(1, n)]
    down = [Step(((0, r),), [0] * n, [0] * n, Op.COPY) for r in range(1, n)]
    return Schedule(n, 1, up + down, Kind.ALL_REDUCE, "star")


def halving_doubling(n):
    """Rabenseifner: halves, quarters, ... are reduced, then gathered; n a power of two."""
    owned = {r: list(range(n)) for r in range(n)}
    down, up = [], []
    for bit in (1 << i for i in reversed(range(n.bit_length() - 1))):
        keep = {r: [c for c in owned[r] if (c & bit) == (r & bit)] for r in range(n)}
        give = {r: [c for c in owned[r] if (c & bit) != (r & bit)] for r in range(n)}
        perm = tuple((r, r ^ bit) for r in range(n))
        down.append(Step(perm, [give[r] for r in range(n)], [keep[r] for r in range(n)], Op.REDUCE))
        up.insert(0, Step(perm, [keep[r] for r in range(n)], [give[r] for r in range(n)], Op.COPY))
        owned = keep
    return Schedule(n, n, down + up, Kind.ALL_REDUCE, "halving_doubling")


def relay(n):
    """Rank 0 takes its partial sum to one rank after the other and gets it back by COPY."""
    table = [0] * n
    steps = []
    for r in range(1, n):
        steps.append(Step(((0, r),), table, table, Op.REDUCE))
        steps.append(Step(((r, 0),), table, table, Op.COPY))
    steps += [Step(((0, r),), table, table, Op.COPY) for r in range(1, n - 1)]
    return Schedule(n, 1, steps, Kind.ALL_REDUCE, "relay")


ALL_REDUCES = [recursive_doubling, reduce_and_broadcast, halving_doubling, relay]
