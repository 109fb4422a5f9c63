import pytest

from jax_ring.cli.units import (
    format_bandwidth,
    format_seconds,
    format_size,
    parse_bandwidth,
    parse_dtype,
    parse_seconds,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("100", 100),
        ("100B", 100),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1GB", 10**9),
        ("1.5 GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
        ("64MiB", 64 << 20),
        ("1GiB", 1 << 30),
        ("4K", 4096),
        ("4k", 4096),
        ("1M", 1 << 20),
        ("0.5G", 1 << 29),
        ("1e6", 10**6),
        ("1e3kB", 10**6),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a size must be a number with a unit such as 1GB, 64MiB or 4K, got ''"),
        ("GB", "a size must be a number"),
        ("-1GB", "a size must be a number"),
        ("1gb", r"a size must end in a unit such as GB, MiB or K, got '1gb' \(a small b is a bit"),
        ("1XB", "a size must end in a unit .*, got '1XB'$"),
        ("1iB", "a size must end in a unit"),
        ("1.5", "a size must be a whole number of bytes, got '1.5'"),
        ("nan", "a size must be a number"),
    ],
)
def test_bad_sizes(text, message):
    with pytest.raises(ValueError, match=message):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400GB/s", 400e9),
        ("100Gbit/s", 12.5e9),
        ("100Gb/s", 12.5e9),
        ("100 Gbps", 12.5e9),
        ("8Gbits/s", 1e9),
        ("1TB/s", 1e12),
        ("1GiB/s", float(1 << 30)),
        ("5B/s", 5.0),
        ("45e9", 45e9),
    ],
)
def test_bandwidths(text, expected):
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize("text", ["400GB", "400G", "400iB/s", "400gbyte/s"])
def test_bad_units_of_bandwidths(text):
    with pytest.raises(ValueError, match=r"must end in a unit such as GB/s \(bytes\) or Gbit/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("parse", "text", "what"),
    [
        (parse_size, "1e400", "a size"),
        (parse_size, "1e300PB", "a size"),
        (parse_bandwidth, "1e400GB/s", "a bandwidth"),
        (parse_bandwidth, "1e300PB/s", "a bandwidth"),
        (parse_seconds, "1e400us", "a time"),
    ],
)
def test_what_no_float_holds(parse, text, what):
    with pytest.raises(ValueError, match=f"{what} must be finite, got '{text}'"):
        parse(text)


def test_bad_bandwidths():
    with pytest.raises(ValueError, match="a bandwidth must be above 0, got '0GB/s'"):
        parse_bandwidth("0GB/s")
    with pytest.raises(ValueError, match="a bandwidth must be a number with a unit such as 400GB"):
        parse_bandwidth("fast")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0.0), ("5us", 5e-6), ("5µs", 5e-6), ("1.5ms", 1.5e-3), ("2s", 2.0), (".5 ns", 5e-10)],
)
def test_times(text, expected):
    assert parse_seconds(text) == expected


def test_bad_times():
    with pytest.raises(ValueError, match="a time must end in s, ms, us or ns, got '5min'"):
        parse_seconds("5min")
    with pytest.raises(ValueError, match="a time must be a number with a unit such as 5us"):
        parse_seconds("soon")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", ("bfloat16", 2)),
        ("BF16", ("bfloat16", 2)),
        ("fp32", ("float32", 4)),
        ("double", ("float64", 8)),
        ("int8", ("int8", 1)),
        ("float8_e4m3fn", ("float8_e4m3fn", 1)),
        ("complex128", ("complex128", 16)),
        ("bool", ("bool", 1)),
    ],
)
def test_dtypes(text, expected):
    assert parse_dtype(text) == expected


@pytest.mark.parametrize("text", ["", "bf", "float128", "float12", "float8", "int128", "tensor"])
def test_bad_dtypes(text):
    with pytest.raises(ValueError, match="a dtype must be a name such as bf16, float32 or int8"):
        parse_dtype(text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (999.9, "1 kB"),
        (1e9, "1 GB"),
        (123456, "123 kB"),
        (5e18, "5000 PB"),
        (float("inf"), "inf B"),
    ],
)
def test_formatted_sizes(value, expected):
    assert format_size(value) == expected


def test_formatted_times_and_bandwidths():
    assert [format_seconds(10.0**i) for i in range(-10, 2, 3)] == [
        "0.1 ns",
        "100 ns",
        "100 us",
        "100 ms",
    ]
    assert format_bandwidth(12.5e9) == "12.5 GB/s"


@pytest.mark.parametrize("text", ["1.5 GB", "12 B", "64 kB"])
def test_sizes_are_read_as_they_are_written(text):
    assert format_size(parse_size(text)) == text
