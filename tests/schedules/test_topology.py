import json
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import jax_ring
from jax_ring.schedules.topology import (
    PRESETS,
    Graph,
    Link,
    NvlinkNodes,
    Topology,
    TopologyError,
    Torus,
    TwoDatacentres,
    Uniform,
    get,
    load,
)

PACKAGE = pathlib.Path(jax_ring.__file__).parent
RING = Graph(("a", "b", "c"), (Link("a", "b", 1.0), Link("b", "c", 2.0), Link("c", "a", 3.0)))
TOPOLOGIES = [
    Uniform(6, 45e9, 5e-6),
    NvlinkNodes(12, 4),
    NvlinkNodes(3, 1),
    TwoDatacentres(16, 4),
    Torus((3, 4)),
    Torus((2, 5, 3)),
    RING,
]


def names(topology, source, destination):
    (route,) = topology.routes([source], [destination])
    return [topology.link_name(link) for link in route if link >= 0]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.kind)
def test_every_pair_has_a_way_and_oneself_needs_none(topology):
    n = topology.ranks
    source, destination = (grid.ravel() for grid in np.indices((n, n)))
    routes = topology.routes(source, destination)
    assert routes.shape[0] == n * n
    assert routes.max() < len(topology.bandwidths) == len(topology.latencies)
    assert ((routes >= 0).any(axis=1) == (source != destination)).all()
    for s, d, route in zip(source, destination, routes, strict=True):
        alone = topology.routes([s], [d])[0]
        assert [x for x in route if x >= 0] == list(alone)
        assert len(set(alone)) == len(alone)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.kind)
def test_links_have_names_of_their_own(topology):
    links = range(len(topology.bandwidths))
    assert len({topology.link_name(link) for link in links}) == len(links)


def test_no_message_has_no_route():
    assert Uniform(4, 1.0).routes([], []).shape == (0, 0)
    assert Torus((4, 4)).routes([], []).shape == (0, 0)


def test_ports():
    assert names(Uniform(4, 1.0), 1, 3) == ["port out of rank 1", "port into rank 3"]
    assert Uniform(4, 45e9, 5e-6).hockney == (5e-6, 1 / 45e9)


def test_nvlink_inside_and_rails_between():
    topology = NvlinkNodes(16)
    assert names(topology, 1, 6) == ["NVLink out of rank 1", "NVLink into rank 6"]
    assert names(topology, 1, 9) == ["NIC out of rank 1", "NIC into rank 9"]
    assert names(topology, 1, 14) == [
        "NVLink out of rank 1",
        "NVLink into rank 6",
        "NIC out of rank 6",
        "NIC into rank 14",
    ]
    alpha, beta = topology.hockney
    assert (alpha, beta) == (pytest.approx(7e-6), 1 / 45e9)


def test_bandwidths_are_those_of_the_links():
    topology = NvlinkNodes(4, 2, 10.0, 0.1, 1.0, 0.5)
    by_name = {
        topology.link_name(link): (topology.bandwidths[link], topology.latencies[link])
        for link in range(16)
    }
    assert by_name["NVLink out of rank 3"] == (10.0, 0.1)
    assert by_name["NVLink into rank 3"] == (10.0, 0.0)
    assert by_name["NIC out of rank 3"] == (1.0, 0.5)
    assert by_name["NIC into rank 3"] == (1.0, 0.0)
    assert topology.groups == (2,)


def test_the_long_link_lies_between_the_halves_only():
    topology = TwoDatacentres(16, 4, long_bandwidth=3.0, long_latency=2.0)
    assert names(topology, 3, 15)[1] == "long link out of half 0"
    assert names(topology, 15, 3)[1] == "long link out of half 1"
    assert not any("long" in name for name in names(topology, 0, 7) + names(topology, 8, 15))
    assert topology.bandwidths[-2:].tolist() == [3.0, 3.0]
    assert topology.latencies[-2:].tolist() == [2.0, 2.0]


@hypothesis.given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), data=st.data())
def test_torus_routes_are_shortest_walks_along_its_links(shape, data):
    torus = Torus(tuple(shape))
    source = data.draw(st.integers(0, torus.ranks - 1))
    destination = data.draw(st.integers(0, torus.ranks - 1))
    at = list(np.unravel_index(source, shape))
    to = np.unravel_index(destination, shape)
    distance = sum(
        min(abs(a - b), size - abs(a - b)) for a, b, size in zip(at, to, shape, strict=True)
    )
    dimensions = []
    for name in names(torus, source, destination):
        _, _, _, rank, way, _, dimension = name.split()
        assert int(rank) == np.ravel_multi_index(tuple(at), shape)
        at[int(dimension)] = (at[int(dimension)] + (1 if way == "up" else -1)) % shape[
            int(dimension)
        ]
        dimensions.append(int(dimension))
    assert tuple(at) == to
    assert len(dimensions) == distance
    assert dimensions == sorted(dimensions)


def test_groups_and_ports_of_a_torus():
    assert Torus((4, 3, 2)).groups == (2, 6)
    assert Torus((4, 3, 2)).ports == 6
    assert Torus((8,)).groups == ()


def test_a_graph_takes_the_fewest_links():
    ends = [Link("a", "s", 1.0), Link("s", "t", 1.0), Link("t", "b", 1.0)]
    graph = Graph(("a", "b", "c"), (*ends, Link("a", "c", 1.0), Link("c", "b", 1.0)))
    assert names(graph, 0, 1) == ["link from a to c", "link from c to b"]
    assert names(graph, 1, 0) == ["link from b to c", "link from c to a"]


def test_of_equal_ways_a_graph_takes_the_one_listed_first():
    ways = [Link(*ends, 1.0) for ends in (("a", "s"), ("a", "t"), ("s", "b"), ("t", "b"))]
    assert names(Graph(("a", "b"), tuple(ways)), 0, 1)[0] == "link from a to s"
    assert names(Graph(("a", "b"), tuple(ways[::-1])), 0, 1)[0] == "link from a to t"


def test_a_link_may_go_one_way_only():
    one_way = tuple(Link(a, b, 1.0, both_ways=False) for a, b in ("ab", "bc", "ca"))
    assert len(names(Graph(("a", "b", "c"), one_way), 1, 0)) == 2
    with pytest.raises(TopologyError, match="links do not lead from 'b' to 'a'"):
        names(Graph(("a", "b"), one_way[:1]), 1, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(0, 1.0), "ranks must be a whole number of at least 1, got 0"),
        (lambda: Uniform(4, 0.0), "bandwidth must be a number of bytes per second above 0"),
        (lambda: Uniform(4, float("inf")), "bandwidth must be .*, got inf"),
        (lambda: Uniform(4, 10**400), "bandwidth must be .*, got 1000"),
        (lambda: Uniform(4, 1.0, -1.0), "alpha must be a number of seconds of at least 0"),
        (lambda: NvlinkNodes(12), "ranks must be a multiple of node_size=8, got 12"),
        (lambda: NvlinkNodes(8, True), "node_size must be a whole number .*, got True"),
        (lambda: TwoDatacentres(8), "ranks must be a multiple of 2 x node_size=16, got 8"),
        (lambda: Torus(()), "shape must be a list of whole numbers"),
        (lambda: Torus((4, 0)), r"shape must be .*, got \(4, 0\)"),
        (lambda: Link("a", "b", "fast"), "bandwidth must be .*, got 'fast'"),
        (lambda: Graph(("a", "z"), RING.links), "no link has 'z'"),
        (lambda: Graph(("a", "a"), RING.links), "endpoints must be different nodes"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(TopologyError, match=message):
        make()


# Files and names.


def write(tmp_path, **content):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"schema": "jax-ring-topology", "version": 1, **content}))
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"kind": "uniform", "ranks": 4, "bandwidth": 1e9}, Uniform(4, 1e9)),
        (
            {"kind": "nvlink+ib", "ranks": 8, "node_size": 4, "nic_bandwidth": 23e9},
            NvlinkNodes(8, 4, nic_bandwidth=23e9),
        ),
        (
            {"kind": "two_datacentres", "ranks": 16, "long_latency": 1e-3},
            TwoDatacentres(16, long_latency=1e-3),
        ),
        ({"kind": "torus", "shape": [4, 4], "latency": 0}, Torus((4, 4), latency=0)),
        (
            {
                "kind": "graph",
                "endpoints": ["a", "b"],
                "links": [
                    {"from": "a", "to": "b", "bandwidth": 2.0, "latency": 1, "both_ways": False},
                    {"from": "b", "to": "a", "bandwidth": 3},
                ],
            },
            Graph(("a", "b"), (Link("a", "b", 2.0, 1, False), Link("b", "a", 3))),
        ),
    ],
)
def test_files(tmp_path, content, expected):
    assert load(write(tmp_path, **content)) == expected
    assert get(str(write(tmp_path, **content)), expected.ranks) == expected


def test_a_file_may_leave_the_ranks_to_who_reads_it(tmp_path):
    path = write(tmp_path, kind="nvlink+ib")
    assert load(path, ranks=24) == NvlinkNodes(24)
    with pytest.raises(TopologyError, match=r"cluster\.json: ranks must be .*; it is missing"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"schema": "other"}, "schema must be \"jax-ring-topology\"; got 'other'"),
        ({"version": 2}, "version must be 1; got 2"),
        ({"version": True}, "version must be 1; got True"),
        ({}, 'kind must be "uniform" or .* or "graph"; it is missing'),
        ({"kind": "mesh"}, "kind must be \"uniform\" or .*; got 'mesh'"),
        ({"kind": "uniform"}, "bandwidth must be a number of bytes per second.*; it is missing"),
        ({"kind": "uniform", "bandwidth": "45GB/s"}, "bandwidth must be .*, got '45GB/s'"),
        ({"kind": "nvlink+ib", "nics": 8}, "there is no key 'nics'; there are ranks, node_size, "),
        ({"kind": "nvlink+ib", "ranks": 8}, "it has 8 ranks, not the 16 asked for"),
        ({"kind": "torus", "shape": "4x4"}, "shape must be .*, got '4x4'"),
        ({"kind": "torus", "shape": [4, 2]}, "it has 8 ranks, not the 16 asked for"),
        ({"kind": "graph"}, "endpoints must be a list of names, got None"),
        ({"kind": "graph", "endpoints": ["a"], "links": 3}, "links must be a list of objects"),
        (
            {"kind": "graph", "endpoints": ["a"], "links": [{"from": "a", "bandwidth": 1}]},
            r"links\[0\]: to must be the name of a node, got None",
        ),
        (
            {
                "kind": "graph",
                "endpoints": ["a"],
                "links": [{"from": "a", "to": "b", "bandwidth": -1}],
            },
            r"links\[0\]: bandwidth must be .* above 0, such as 45e9, got -1",
        ),
        (
            {
                "kind": "graph",
                "endpoints": ["a"],
                "links": [{"from": "a", "to": "b", "bandwidth": 1, "speed": 2}],
            },
            r"links\[0\]: there is no key 'speed'; there are from, to, bandwidth, latency, both_wa",
        ),
    ],
)
def test_a_wrong_file_is_told_with_its_name_and_the_key(tmp_path, content, message):
    with pytest.raises(TopologyError, match=rf"cluster\.json: {message}"):
        load(write(tmp_path, **content), ranks=16)


def test_what_is_no_file_of_a_topology(tmp_path):
    path = tmp_path / "cluster.json"
    with pytest.raises(TopologyError, match=r"cluster\.json: cannot be read: No such file"):
        load(path)
    path.write_text("{")
    with pytest.raises(TopologyError, match=r"cluster\.json: is not JSON: .*line 1"):
        load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(TopologyError, match=r"cluster\.json: is not JSON"):
        load(path)
    path.write_text("[]")
    with pytest.raises(TopologyError, match=r"cluster\.json: must hold a JSON object, got a list"):
        load(path)


def test_names():
    assert get("nvlink8+ib", 64) == NvlinkNodes(64)
    assert get("nvlink4+ib", 8) == NvlinkNodes(8, 4)
    assert get("nvlink8+ib+wan", 32) == TwoDatacentres(32)
    assert get("torus4x4x2", 32) == Torus((4, 4, 2))
    for name in PRESETS:
        assert isinstance(get(name, 256), Topology)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvlink", "topology must be a file or a name like nvlink8.*there is no 'nvlink'"),
        ("nvlink8+ib", "nvlink8.ib: ranks must be a multiple of node_size=8, got 12"),
        ("nvlink0+ib", "nvlink0.ib: node_size must be a whole number of at least 1, got 0"),
        ("torus4x4", "torus4x4: it has 16 ranks, not the 12 asked for"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(TopologyError, match=message):
        get(name, 12)


def test_neither_topologies_nor_simulation_import_jax():
    code = (
        "import sys, types\n"
        "package = types.ModuleType('jax_ring')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['jax_ring'] = package\n"
        "import jax_ring.schedules.simulate\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
