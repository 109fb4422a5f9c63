"""The processes that `network.py` times: one on each host for each library.

Each connects to the program that started it, prepares what it is told to, and then times calls on
request. Imports only what its library brings, as that may be in another Python than jax_ring.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[[], Any]
Prepared = tuple[Call, Call]  # What is timed, and what all ranks meet in before.


def operand(rank: int, nbytes: int) -> Any:
    """Small integers, whose sums are exact in every order and type that travels."""
    return (np.arange(nbytes // 4) % 3 + rank % 2).astype(np.float32)


def check(case: str, result: Any, size: int, nbytes: int) -> None:
    """Compares a result with NumPy's."""
    expected = sum(operand(rank, nbytes) for rank in range(size))
    np.testing.assert_allclose(np.asarray(result), expected, atol=size / 20, err_msg=case)


# --- the libraries: each is (rank, size) -> (case, bytes) -> what is timed, and the version ------


def jax_cases() -> tuple[Any, str]:
    """`lax.psum`, and jax_ring as the case says: the keywords of `jax_ring.psum`."""
    import jax

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.distributed.initialize(os.environ["COORDINATOR"], size, rank)
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_ring

    mesh = Mesh(jax.devices(), "x")

    def mapped(f: Any) -> Any:
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P()))

    meet = mapped(lambda v: jax.lax.psum(v[0, 0], "x"))

    def prepare(case: str, nbytes: int) -> Prepared:
        x = jax.make_array_from_callback(
            (size, nbytes // 4), NamedSharding(mesh, P("x")), lambda i: operand(rank, nbytes)[None]
        )
        if case == "lax.psum":
            reduce = functools.partial(jax.lax.psum, axis_name="x")
        else:
            known = {"dict": dict, "ring": jax_ring.schedules.ring, "N": size}
            options = eval(case, known)
            reduce = functools.partial(jax_ring.psum, axis_name="x", **options)
        run = mapped(lambda v: reduce(v[0])).lower(x).compile()
        check(case, run(x).addressable_data(0), size, nbytes)
        return lambda: jax.block_until_ready(run(x)), lambda: jax.block_until_ready(meet(x))

    return prepare, f"jax {jax.__version__}, jax_ring {jax_ring.__version__}"


def torch_cases() -> tuple[Any, str]:
    """`torch.distributed.all_reduce` over gloo, in place."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"tcp://{os.environ['COORDINATOR']}", rank=rank, world_size=size
    )

    def prepare(case: str, nbytes: int) -> Prepared:
        x = torch.from_numpy(operand(rank, nbytes))
        dist.all_reduce(x)
        check(case, x.numpy(), size, nbytes)
        x.zero_()
        return lambda: dist.all_reduce(x), dist.barrier

    return prepare, f"torch {torch.__version__}"


def mpi_cases() -> tuple[Any, str]:
    """`MPI_Allreduce`, out of place."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def prepare(case: str, nbytes: int) -> Prepared:
        x = operand(world.rank, nbytes)
        result = np.empty_like(x)
        world.Allreduce(x, result)
        check(case, result, world.size, nbytes)
        return lambda: world.Allreduce(x, result), world.Barrier

    os.environ["RANK"] = str(world.rank)
    return prepare, MPI.Get_library_version().split(", package")[0].splitlines()[0]


LIBRARIES = {"jax": jax_cases, "torch": torch_cases, "mpi": mpi_cases}


def serve(library: str, address: str) -> None:
    """Does what the other end of a Unix socket asks for, until it is closed.

    Every answer is a pair: what went wrong, or "", and what was asked for.
    """
    with multiprocessing.connection.Client(address, "AF_UNIX") as peer:
        prepare, version = LIBRARIES[library]()
        peer.send((int(os.environ["RANK"]), version))
        prepared: dict[str, Prepared] = {}
        with contextlib.suppress(EOFError, BrokenPipeError):  # It is closed.
            while True:
                command, argument = peer.recv()
                answer: tuple[str, Any] = "", None
                try:
                    if command == "prepare":
                        prepared = {case: prepare(case, argument[1]) for case in argument[0]}
                    else:
                        answer = "", timed(*prepared[argument])
                except Exception as error:  # Whatever it is, it is told where it was asked for.
                    traceback.print_exc()
                    answer = f"{type(error).__name__}: {error}", None
                peer.send(answer)


def timed(run: Call, meet: Call) -> float:
    """The seconds of a call, after all ranks met."""
    meet()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(*sys.argv[1:])
