"""What is found out before a command starts to work."""

import pytest

from jax_ring import distributed
from jax_ring.cli import devices
from jax_ring.cli.devices import by_first_process
from jax_ring.cli.files import check_file, check_folder


def test_checking_leaves_things_as_they_are(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("content")
    check_file(new)
    check_file(old)
    assert not new.exists()
    assert old.read_text() == "content"
    check_folder(tmp_path / "a" / "b")
    check_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/b: Not a directory"):
        check_folder(tmp_path / "file" / "b")
    with pytest.raises(ValueError, match="file/b: there is no folder"):
        check_file(tmp_path / "file" / "b")


def test_all_processes_fail_with_the_first(monkeypatch):
    monkeypatch.setattr(devices, "is_first_process", lambda: False)
    monkeypatch.setattr(distributed, "exchanged", lambda what, own, _: ["a full disk", own])
    with pytest.raises(ValueError, match="a full disk"):
        by_first_process(lambda: pytest.fail("this is not the first"))
