from jax_ring.cli.sizes import sizes_from


def test_sizes():
    assert sizes_from("4K", "64K", 4) == [4096, 16384, 65536]
    assert sizes_from("4K", "10K", 2) == [4096, 8192]
    assert sizes_from("1", "4", 1.1) == [1, 2, 3, 4]
    assert sizes_from("1K", "4K", 2, "1K") == [1024, 2048, 3072, 4096]
