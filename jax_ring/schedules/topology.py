"""Clusters as shared links: who reaches whom over what, at what bandwidth and latency.

A topology has directed links, numbered from 0, each with a bandwidth in bytes per second and a
latency in seconds, and says which of them a message crosses. `simulate` lets the messages of a
schedule share them. Nothing here imports JAX.

The numbers that a class has by default are those of a kind of hardware that is common, with where
they come from in its docstring. They are there to be overridden by what you measured.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SCHEMA, VERSION = "jax-ring-topology", 1


class TopologyError(ValueError):
    """A topology that cannot be, or a file that does not describe one."""


# What a field must be: a test, and the words for it.
_Check = tuple[Callable[[Any], bool], str]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_finite(value: Any) -> bool:
    """Whether something is a number that a float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer of more than 308 digits.
        return False


_COUNT: _Check = (_is_count, "a whole number of at least 1")
_BANDWIDTH: _Check = (
    lambda value: is_finite(value) and value > 0,
    "a number of bytes per second above 0, such as 45e9",
)
_LATENCY: _Check = (
    lambda value: is_finite(value) and value >= 0,
    "a number of seconds of at least 0, such as 5e-6",
)
_SHAPE: _Check = (
    lambda value: isinstance(value, Sequence) and bool(value) and all(map(_is_count, value)),
    "a list of whole numbers of at least 1, such as [16, 16]",
)


def _field(check: _Check, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"check": check})


def _check_fields(value: Any) -> None:
    for field in dataclasses.fields(value):
        fits, wanted = field.metadata.get("check", (lambda _: True, ""))
        given = getattr(value, field.name)
        if not fits(given):
            raise TopologyError(f"{field.name} must be {wanted}, got {given!r}")


class Topology(abc.ABC):
    """A cluster: ranks, and the links between them.

    Attributes:
      kind: what it is called in a file.
      ranks: the number of ranks.
    """

    kind: ClassVar[str]
    ranks: int

    @property
    @abc.abstractmethod
    def bandwidths(self) -> Floats:
        """Bytes per second of each link."""

    @property
    @abc.abstractmethod
    def latencies(self) -> Floats:
        """Seconds that each link adds to a message."""

    @abc.abstractmethod
    def routes(self, sources: npt.ArrayLike, destinations: npt.ArrayLike) -> Ints:
        """The links that messages cross.

        Args:
          sources: the rank that sends each message, int [messages].
          destinations: the rank that receives each.

        Returns:
          int [messages, hops], filled up with -1. A message to oneself crosses nothing.
        """

    @abc.abstractmethod
    def link_name(self, link: int) -> str:
        """What a link is, in words."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Sizes of groups of consecutive ranks that are closer to each other than to the rest."""
        return ()

    @property
    def ports(self) -> int:
        """How many messages a rank can send at once over links of their own."""
        return 1

    @property
    def name(self) -> str:
        """One line for tables."""
        return f"{self.kind}, {self.ranks} ranks"

    @functools.cached_property
    def hockney(self) -> tuple[float, float]:
        """Seconds per message and seconds per byte, for a closed form that knows no links.

        Those of the slowest message from a rank to the next that has its way to itself.
        """
        ranks = np.arange(self.ranks)
        routes = self.routes(ranks, np.roll(ranks, -1))
        used = routes[routes >= 0]
        if not used.size:
            return 0.0, 0.0
        latency = np.append(self.latencies, 0.0)[routes].sum(axis=1)
        return float(latency.max()), float(1 / self.bandwidths[used].min())


def _filled(columns: Sequence[Ints], messages: int) -> Ints:
    """Routes from one column for each hop, without those that no message takes."""
    taken = [column for column in columns if (column >= 0).any()]
    return np.stack(taken, axis=1) if taken else np.empty((messages, 0), np.int64)


def _ends(sources: npt.ArrayLike, destinations: npt.ArrayLike) -> tuple[Ints, Ints]:
    return np.asarray(sources, np.int64), np.asarray(destinations, np.int64)


@dataclasses.dataclass(frozen=True)
class Uniform(Topology):
    """Ranks around a perfect switch: each has a port to send and one to receive, and no more.

    Attributes:
      ranks: the number of ranks.
      bandwidth: of each port, in bytes per second and direction.
      alpha: seconds per message.

    Example:
      >>> Uniform(4, bandwidth=45e9).routes([0, 1], [2, 3])  # Ports out, then ports in.
      array([[0, 6],
             [1, 7]])
    """

    kind: ClassVar[str] = "uniform"
    ranks: int = _field(_COUNT)
    bandwidth: float = _field(_BANDWIDTH)
    alpha: float = _field(_LATENCY, 0.0)

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_fields(self)

    @functools.cached_property
    def bandwidths(self) -> Floats:
        """All alike."""
        return np.full(2 * self.ranks, float(self.bandwidth))

    @functools.cached_property
    def latencies(self) -> Floats:
        """Alpha at the port out."""
        return np.repeat([float(self.alpha), 0.0], self.ranks)

    def routes(self, sources: npt.ArrayLike, destinations: npt.ArrayLike) -> Ints:
        """Two ports."""
        source, destination = _ends(sources, destinations)
        away = source != destination
        columns = [np.where(away, source, -1), np.where(away, destination + self.ranks, -1)]
        return _filled(columns, len(source))

    def link_name(self, link: int) -> str:
        """A port."""
        way, rank = divmod(link, self.ranks)
        return f"port {('out of', 'into')[way]} rank {rank}"


@dataclasses.dataclass(frozen=True)
class NvlinkNodes(Topology):
    """Nodes of GPUs on NVLink, with a NIC for each GPU on a rail-optimised fat tree.

    Rank r is GPU r % node_size of node r // node_size. In a node every GPU has an NVLink port in
    each direction to a switch that is never the bottleneck. The NICs of GPUs with the same number
    form a rail, which carries all that its NICs can send. A message to a GPU of another number
    goes over NVLink first, to the GPU of its own node that is on the receiver's rail, and through
    that one's NIC, as NCCL's PXN does; nothing crosses the spine between the rails.

    The defaults are for nodes of 8 H100 or H200 with NDR InfiniBand:

    - NVLink: 450 GB/s in each direction by datasheet (18 links of 25 GB/s), of which NCCL's
      messages reach 370 (NCCL's maintainer in github.com/NVIDIA/nccl-tests/issues/212, also on the
      480 GB/s of bus bandwidth that the reduction in the switch, NVLS, reaches there);
    - NIC: 400 Gbit/s = 50 GB/s by datasheet, of which 45 are taken to be reached;
    - latencies: 2 and 5 microseconds, within what NCCL's model of itself has for a step of the ring
      in its protocols LL128 and Simple (src/graph/tuning.cc: NVLink 1.9 and 3.4, network 4.0 and
      14 microseconds).

    Attributes:
      ranks: the number of GPUs, a multiple of node_size.
      node_size: GPUs in a node.
      nvlink_bandwidth: bytes per second, of each GPU in each direction.
      nvlink_latency: seconds per message over NVLink.
      nic_bandwidth: bytes per second, of each NIC in each direction.
      nic_latency: seconds per message from NIC to NIC.

    Example:
      >>> topology = NvlinkNodes(16)
      >>> for link in topology.routes([0], [9])[0].tolist():
      ...     print(topology.link_name(link))
      NVLink out of rank 0
      NVLink into rank 1
      NIC out of rank 1
      NIC into rank 9
    """

    kind: ClassVar[str] = "nvlink+ib"
    ranks: int = _field(_COUNT)
    node_size: int = _field(_COUNT, 8)
    nvlink_bandwidth: float = _field(_BANDWIDTH, 370e9)
    nvlink_latency: float = _field(_LATENCY, 2e-6)
    nic_bandwidth: float = _field(_BANDWIDTH, 45e9)
    nic_latency: float = _field(_LATENCY, 5e-6)

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_fields(self)
        if self.ranks % self.node_size:
            raise TopologyError(
                f"ranks must be a multiple of node_size={self.node_size}, got {self.ranks}"
            )

    @functools.cached_property
    def bandwidths(self) -> Floats:
        """NVLink ports out, NVLink ports in, NICs out, NICs in."""
        nvlink, nic = float(self.nvlink_bandwidth), float(self.nic_bandwidth)
        return np.repeat([nvlink, nvlink, nic, nic], self.ranks)

    @functools.cached_property
    def latencies(self) -> Floats:
        """All of it where a message leaves."""
        nvlink, nic = float(self.nvlink_latency), float(self.nic_latency)
        return np.repeat([nvlink, 0.0, nic, 0.0], self.ranks)

    @property
    def groups(self) -> tuple[int, ...]:
        """The nodes."""
        return (self.node_size,)

    def routes(self, sources: npt.ArrayLike, destinations: npt.ArrayLike) -> Ints:
        """NVLink to the receiver or to its rail, then the rail."""
        source, destination = _ends(sources, destinations)
        size = self.node_size
        crosses = source // size != destination // size
        leaves = np.where(crosses, source - source % size + destination % size, destination)
        on_nvlink = leaves != source
        columns = [
            np.where(on_nvlink, source, -1),
            np.where(on_nvlink, leaves + self.ranks, -1),
            np.where(crosses, leaves + 2 * self.ranks, -1),
            *self._between(leaves, destination),
            np.where(crosses, destination + 3 * self.ranks, -1),
        ]
        return _filled(columns, len(source))

    def _between(self, leaves: Ints, destination: Ints) -> list[Ints]:
        """What lies between two NICs: a rail is never the bottleneck."""
        del leaves, destination
        return []

    def link_name(self, link: int) -> str:
        """A port of NVLink, or a NIC."""
        what, rank = divmod(link, self.ranks)
        return f"{('NVLink out of', 'NVLink into', 'NIC out of', 'NIC into')[what]} rank {rank}"


@dataclasses.dataclass(frozen=True)
class TwoDatacentres(NvlinkNodes):
    """Two halves of `NvlinkNodes`, joined by a long link each way that all messages share.

    The defaults of the long link are a guess at 800 Gbit/s over 100 km of fibre, in which light
    takes 5 microseconds per kilometre: replace them.

    Attributes:
      ranks: the number of GPUs, a multiple of 2 node_size; the first half is in one place.
      node_size: as in `NvlinkNodes`, like all that is not named here.
      long_bandwidth: bytes per second of the long link in each direction.
      long_latency: seconds that it adds to a message.

    Example:
      >>> topology = TwoDatacentres(16, node_size=4)
      >>> [topology.link_name(link) for link in topology.routes([0], [8])[0]]
      ['NIC out of rank 0', 'long link out of half 0', 'NIC into rank 8']
    """

    kind: ClassVar[str] = "two_datacentres"
    long_bandwidth: float = _field(_BANDWIDTH, 100e9)
    long_latency: float = _field(_LATENCY, 500e-6)

    def __post_init__(self) -> None:
        """Checks the numbers."""
        super().__post_init__()
        if self.ranks % (2 * self.node_size):
            raise TopologyError(
                f"ranks must be a multiple of 2 x node_size={2 * self.node_size}, got {self.ranks}"
            )

    @functools.cached_property
    def bandwidths(self) -> Floats:
        """Those of the nodes, and of the long link each way."""
        return np.append(super().bandwidths, [float(self.long_bandwidth)] * 2)

    @functools.cached_property
    def latencies(self) -> Floats:
        """Those of the nodes, and of the long link each way."""
        return np.append(super().latencies, [float(self.long_latency)] * 2)

    @property
    def groups(self) -> tuple[int, ...]:
        """The nodes, and the halves."""
        return tuple(sorted({self.node_size, self.ranks // 2}))

    def _between(self, leaves: Ints, destination: Ints) -> list[Ints]:
        """The long link, from one half to the other."""
        here, there = (2 * ranks // self.ranks for ranks in (leaves, destination))
        return [np.where(here != there, 4 * self.ranks + here, -1)]

    def link_name(self, link: int) -> str:
        """A port of NVLink, a NIC, or the long link."""
        half = link - 4 * self.ranks
        return f"long link out of half {half}" if half >= 0 else super().link_name(link)


@dataclasses.dataclass(frozen=True)
class Torus(Topology):
    """A torus of any number of dimensions, with a link from each node to each of its neighbours.

    Ranks count along the last dimension first. A message goes along the first dimension until it is
    right, then along the second, and so on, each the shorter way round (upwards, if both are as
    long). Nothing but the links is shared: a node sends over all of its links at once.

    The defaults are for a TPU v5e: 400 Gbit/s = 50 GB/s of each of its four links in each direction
    (cloud.google.com/tpu/docs/v5e has 1,600 Gbit/s per chip), of which 45 are taken to be reached,
    and a microsecond per hop.

    Attributes:
      shape: nodes along each dimension.
      bandwidth: bytes per second of each link.
      latency: seconds per hop.

    Example:
      >>> torus = Torus((4, 4))
      >>> [torus.link_name(link) for link in torus.routes([0], [13])[0]]
      ['link of rank 0 down dimension 0', 'link of rank 12 up dimension 1']
    """

    kind: ClassVar[str] = "torus"
    shape: tuple[int, ...] = _field(_SHAPE)
    bandwidth: float = _field(_BANDWIDTH, 45e9)
    latency: float = _field(_LATENCY, 1e-6)

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_fields(self)
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def ranks(self) -> int:  # type: ignore[override]  # Follows from the shape.
        """The number of nodes."""
        return math.prod(self.shape)

    @functools.cached_property
    def bandwidths(self) -> Floats:
        """All alike: of each rank one link up and one down each dimension."""
        return np.full(2 * len(self.shape) * self.ranks, float(self.bandwidth))

    @functools.cached_property
    def latencies(self) -> Floats:
        """All alike."""
        return np.full(2 * len(self.shape) * self.ranks, float(self.latency))

    @property
    def groups(self) -> tuple[int, ...]:
        """The lines along the last dimension, the planes along the last two, and so on."""
        return tuple(math.prod(self.shape[i:]) for i in range(len(self.shape) - 1, 0, -1))

    @property
    def ports(self) -> int:
        """One for each link."""
        return 2 * len(self.shape)

    @property
    def name(self) -> str:
        """With the shape."""
        return f"torus {'x'.join(map(str, self.shape))}"

    def routes(self, sources: npt.ArrayLike, destinations: npt.ArrayLike) -> Ints:
        """One dimension after the other."""
        source, destination = _ends(sources, destinations)
        at = np.array(np.unravel_index(source, self.shape))
        to = np.array(np.unravel_index(destination, self.shape))
        columns = []
        for dimension, size in enumerate(self.shape):
            ahead = (to[dimension] - at[dimension]) % size
            up = 2 * ahead <= size
            hops = np.where(up, ahead, size - ahead)
            for hop in range(int(hops.max(initial=0))):
                link = self._link(at, dimension, up)
                columns.append(np.where(hop < hops, link, -1))
                step = np.where(up, 1, -1) * (hop < hops)
                at[dimension] = (at[dimension] + step) % size
        return _filled(columns, len(source))

    def _link(self, at: Ints, dimension: int, up: npt.NDArray[np.bool_]) -> Ints:
        rank = np.ravel_multi_index(tuple(at), self.shape)
        link: Ints = (rank * len(self.shape) + dimension) * 2 + ~up
        return link

    def link_name(self, link: int) -> str:
        """The node that sends over it, and where to."""
        at, down = divmod(link, 2)
        rank, dimension = divmod(at, len(self.shape))
        return f"link of rank {rank} {('up', 'down')[down]} dimension {dimension}"


@dataclasses.dataclass(frozen=True)
class Link:
    """A link of a `Graph`.

    Attributes:
      source: the name of a node, any string.
      target: the name of another.
      bandwidth: bytes per second, in each direction.
      latency: seconds that it adds to a message.
      both_ways: whether there is a link from target to source as well.
    """

    source: str
    target: str
    bandwidth: float = _field(_BANDWIDTH)
    latency: float = _field(_LATENCY, 0.0)
    both_ways: bool = _field((lambda value: isinstance(value, bool), "true or false"), True)

    def __post_init__(self) -> None:
        """Checks the numbers."""
        _check_fields(self)


@dataclasses.dataclass(frozen=True)
class Graph(Topology):
    """Any graph of ranks and switches. Messages take the way of the fewest links.

    Of several ways of as few links it is, from each node on, the one whose link is listed first.

    Attributes:
      endpoints: the node that each rank is.
      links: the links.

    Example:
      >>> star = Graph(("a", "b"), (Link("a", "switch", 1e9), Link("b", "switch", 1e9)))
      >>> [star.link_name(link) for link in star.routes([0], [1])[0]]
      ['link from a to switch', 'link from switch to b']
    """

    kind: ClassVar[str] = "graph"
    endpoints: tuple[str, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        """Checks that every rank is a node of its own."""
        known = {node for link in self.links for node in (link.source, link.target)}
        for node in self.endpoints:
            if node not in known and len(self.endpoints) > 1:
                raise TopologyError(f"endpoints must be nodes of the links; no link has {node!r}")
        if not self.endpoints or len(set(self.endpoints)) < len(self.endpoints):
            raise TopologyError(
                f"endpoints must be different nodes, at least one, got {list(self.endpoints)}"
            )

    @property
    def ranks(self) -> int:  # type: ignore[override]  # Follows from the endpoints.
        """The number of endpoints."""
        return len(self.endpoints)

    @functools.cached_property
    def _directed(self) -> list[tuple[str, str, Link]]:
        """Each direction of each link; their numbers are those of the links of the topology."""
        ways: list[tuple[str, str, Link]] = []
        for link in self.links:
            ways.append((link.source, link.target, link))
            if link.both_ways:
                ways.append((link.target, link.source, link))
        return ways

    @functools.cached_property
    def bandwidths(self) -> Floats:
        """In the order of the links, the direction back right after the one there."""
        return np.array([link.bandwidth for _, _, link in self._directed], float)

    @functools.cached_property
    def latencies(self) -> Floats:
        """In the same order."""
        return np.array([link.latency for _, _, link in self._directed], float)

    @functools.cached_property
    def _into(self) -> dict[str, list[int]]:
        into: dict[str, list[int]] = {}
        for link, (_, target, _) in enumerate(self._directed):
            into.setdefault(target, []).append(link)
        return into

    @functools.cached_property
    def _first_links(self) -> dict[str, dict[str, int]]:
        """For each destination asked for so far, the first link from every node."""
        return {}

    def _towards(self, destination: str) -> dict[str, int]:
        """The first link of the way from each node, by a search backwards from the destination."""
        if destination not in self._first_links:
            first: dict[str, int] = {}
            reached, ring = {destination}, [destination]
            while ring:
                links = sorted(link for node in ring for link in self._into.get(node, []))
                ring = []
                for link in links:
                    node = self._directed[link][0]
                    if node not in reached:
                        reached.add(node)
                        ring.append(node)
                        first[node] = link
            self._first_links[destination] = first
        return self._first_links[destination]

    def _route(self, source: str, destination: str) -> list[int]:
        first, route = self._towards(destination), []
        while source != destination:
            if source not in first:
                raise TopologyError(f"links do not lead from {source!r} to {destination!r}")
            route.append(first[source])
            source = self._directed[route[-1]][1]
        return route

    def routes(self, sources: npt.ArrayLike, destinations: npt.ArrayLike) -> Ints:
        """Over the fewest links."""
        found = [
            self._route(self.endpoints[s], self.endpoints[d])
            for s, d in zip(*_ends(sources, destinations), strict=True)
        ]
        result = np.full((len(found), max(map(len, found), default=0)), -1)
        for row, route in zip(result, found, strict=True):
            row[: len(route)] = route
        return result

    def link_name(self, link: int) -> str:
        """Its ends."""
        source, target, _ = self._directed[link]
        return f"link from {source} to {target}"


# By name, and from files.

_KINDS: dict[str, type[Any]] = {
    kind.kind: kind for kind in (Uniform, NvlinkNodes, TwoDatacentres, Torus, Graph)
}
_PRESETS: dict[str, Callable[[re.Match[str], int], Topology]] = {
    r"nvlink(\d+)\+ib": lambda found, ranks: NvlinkNodes(ranks, int(found[1])),
    r"nvlink(\d+)\+ib\+wan": lambda found, ranks: TwoDatacentres(ranks, int(found[1])),
    r"torus(\d+(?:x\d+)*)": lambda found, _: Torus(tuple(map(int, found[1].split("x")))),
}
PRESETS: Mapping[str, str] = {
    "nvlink8+ib": "nodes of 8 GPUs on NVLink, a NIC for each (`NvlinkNodes`; any other number too)",
    "nvlink8+ib+wan": "two halves of these, joined by a long link (`TwoDatacentres`)",
    "torus16x16": "a torus of any shape (`Torus`)",
}


def get(spec: str, ranks: int) -> Topology:
    """The topology that `--topology` means.

    Args:
      spec: a name like those of `PRESETS`, or the path of a file for `load`.
      ranks: the number of ranks.

    Returns:
      The topology.

    Raises:
      TopologyError: if there is neither such a name nor such a file, it is not for as many ranks,
        or the file is wrong.

    Example:
      >>> get("nvlink4+ib", 8)  # doctest: +ELLIPSIS
      NvlinkNodes(ranks=8, node_size=4, nvlink_bandwidth=370000000000.0, ...)
    """
    for pattern, make in _PRESETS.items():
        found = re.fullmatch(pattern, spec)
        if found:
            try:
                return _for_ranks(make(found, ranks), ranks)
            except TopologyError as error:
                raise TopologyError(f"{spec}: {error}") from None
    if not pathlib.Path(spec).is_file():
        raise TopologyError(
            f"topology must be a file or a name like {', '.join(PRESETS)}; there is no {spec!r}"
        )
    return load(spec, ranks)


def load(path: str | pathlib.Path, ranks: int | None = None) -> Topology:
    """Reads a topology from a JSON file.

    The file is an object with "schema": "jax-ring-topology", "version": 1, a "kind" (uniform,
    nvlink+ib, two_datacentres, torus or graph) and the attributes of the class of that kind as
    keys, in bytes per second and seconds. Those that have defaults may be left out, and "ranks" is
    then the number of those that plan. A link of a graph is an object with "from", "to",
    "bandwidth", and perhaps "latency" and "both_ways".

    Args:
      path: of the file.
      ranks: how many ranks it must have; None takes what the file says.

    Returns:
      The topology.

    Raises:
      TopologyError: naming the file, the key, and what would be right.

    Example:
      >>> import json, pathlib, tempfile
      >>> content = {"schema": "jax-ring-topology", "version": 1, "kind": "nvlink+ib",
      ...            "node_size": 4, "nic_bandwidth": 23e9}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "cluster.json")
      ...     _ = path.write_text(json.dumps(content))
      ...     load(path, ranks=8).nic_bandwidth
      23000000000.0
    """
    try:
        return _for_ranks(_parse(_read(path), ranks), ranks)
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from None


def _for_ranks(topology: Topology, ranks: int | None) -> Topology:
    if ranks is not None and topology.ranks != ranks:
        raise TopologyError(f"it has {topology.ranks} ranks, not the {ranks} asked for")
    return topology


def _read(path: str | pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TopologyError(f"is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise TopologyError(f"must hold a JSON object, got a {type(content).__name__}")
    return content


def _parse(content: dict[str, Any], ranks: int | None) -> Topology:
    _expect(content, "schema", [SCHEMA])
    _expect(content, "version", [VERSION])
    _expect(content, "kind", list(_KINDS))
    kind = _KINDS[content["kind"]]
    values = {k: v for k, v in content.items() if k not in ("schema", "version", "kind")}
    if "ranks" in _keys(kind) and ranks is not None:
        values.setdefault("ranks", ranks)
    if kind is Graph:
        values = _parse_graph(values)
    topology: Topology = _construct(kind, values, {})
    return topology


def _expect(content: dict[str, Any], key: str, allowed: Sequence[Any]) -> None:
    if content.get(key) not in allowed or isinstance(content.get(key), bool):
        wanted = " or ".join(json.dumps(value) for value in allowed)
        given = f"got {content[key]!r}" if key in content else "it is missing"
        raise TopologyError(f"{key} must be {wanted}; {given}")


def _keys(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _construct(kind: type[Any], values: dict[str, Any], spelled: Mapping[str, str]) -> Any:
    """Makes a dataclass of the values of a file, in which some keys are spelled differently."""
    known = {spelled.get(field.name, field.name): field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in known:
            raise TopologyError(f"there is no key {key!r}; there are {', '.join(known)}")
    for key, field in known.items():
        if key not in values and field.default is dataclasses.MISSING:
            wanted = field.metadata["check"][1] if "check" in field.metadata else "given"
            raise TopologyError(f"{key} must be {wanted}; it is missing")
    return kind(**{known[key].name: value for key, value in values.items()})


def _parse_graph(values: dict[str, Any]) -> dict[str, Any]:
    for key, wanted in (("endpoints", "a list of names"), ("links", "a list of objects")):
        kind = str if key == "endpoints" else dict
        given = values.get(key)
        if not isinstance(given, list) or not all(isinstance(item, kind) for item in given):
            raise TopologyError(f"{key} must be {wanted}, got {given!r}")
    links = [_parse_link(i, link) for i, link in enumerate(values["links"])]
    return {**values, "endpoints": tuple(values["endpoints"]), "links": tuple(links)}


def _parse_link(index: int, values: dict[str, Any]) -> Link:
    try:
        for key in ("from", "to"):
            if not isinstance(values.get(key), str):
                raise TopologyError(f"{key} must be the name of a node, got {values.get(key)!r}")
        link: Link = _construct(Link, values, {"source": "from", "target": "to"})
        return link
    except TopologyError as error:
        raise TopologyError(f"links[{index}]: {error}") from None
