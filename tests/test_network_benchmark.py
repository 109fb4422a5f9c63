"""benchmarks/network.py: what it says of processes that cannot do what it asks for."""

import multiprocessing.connection
import threading

import network
import network_peers
import pytest
import typer
from typer.testing import CliRunner


def told(case, nbytes):
    """What a library prepares: nothing for one case, a mistake for another."""
    if case == "wrong":
        raise ValueError("algorithm must be one of ...")
    if case == "slow":
        threading.Event().wait(0.5)
    return (lambda: None), (lambda: None)


@pytest.fixture
def library(monkeypatch, tmp_path):
    """A library of one rank, whose process is a thread that serves."""
    monkeypatch.setitem(network_peers.LIBRARIES, "none", lambda: (told, "none 1.0"))
    monkeypatch.setenv("RANK", "0")
    address = str(tmp_path / "socket")
    with multiprocessing.connection.Listener(address, "AF_UNIX") as listener:
        thread = threading.Thread(target=network_peers.serve, args=("none", address), daemon=True)
        thread.start()
        with listener.accept() as peer:
            assert peer.recv() == (0, "none 1.0")
            yield network.Library("none", ("good", "wrong"), [peer], "none 1.0")
        thread.join(60)
        assert not thread.is_alive()


def test_calls_are_timed(library):
    assert library.ask("prepare", (["good"], 4)) == [None]
    (seconds,) = library.ask("time", "good")
    assert 0 <= seconds < 60


def test_a_case_that_is_wrong_is_told_and_another_can_follow(library, capsys):
    with pytest.raises(network.Failed, match="none, rank 0: ValueError: algorithm must be one of"):
        library.ask("prepare", (["good", "wrong"], 4))
    assert "Traceback" in capsys.readouterr().err
    assert library.ask("prepare", (["good"], 4)) == [None]


def test_a_process_that_does_not_answer_is_told(library, monkeypatch):
    monkeypatch.setattr(network, "ANSWER_S", 0.05)
    with pytest.raises(network.Failed, match=r"none: ranks \[0\] did not prepare within 0.05 s"):
        library.ask("prepare", (["slow"], 4))
    assert library.peers[0].recv() == ("", None)  # Too late, but it ends.


def test_a_process_that_has_ended_is_told():
    ours, theirs = multiprocessing.Pipe()

    def end():
        theirs.recv()
        theirs.close()

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    with ours, pytest.raises(network.Failed, match="none: the process of rank 0 has ended"):
        network.Library("none", (), [ours], "").ask("prepare", ([], 4))
    thread.join(60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--size", "16 Kib"], "--size: a size must end in a unit"),
        (["--size", "6"], "--size: floats take 4 bytes each, got '6'"),
        (["--json", "/nowhere/network.json"], "/nowhere/network.json: there is no folder /nowhere"),
    ],
)
def test_mistakes_are_told_before_there_is_a_lab(options, message, monkeypatch):
    monkeypatch.setattr(network, "Lab", lambda *_: pytest.fail("there is one"))
    app = typer.Typer()
    app.command()(network.main)
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"network.py: {message}")
    assert result.stderr.count("\n") == 1


def test_sizes_are_as_they_are_written():
    assert network._size("2 MiB") == ("2 MiB", 2 << 20)
    assert [network._size(text)[1] for text in network.SIZES] == [1 << n for n in (14, 20, 24, 26)]
