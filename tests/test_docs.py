"""The documents: their examples run, their links lead somewhere, their pictures are up to date."""

import doctest
import importlib.util
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

from jax_ring.schedules import recursive_doubling
from jax_ring.schedules.draw import draw, draw_text, plot_times

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = load(ROOT / "tools" / "draw_algorithms.py")


def shown(path):
    """What a picture says: its words and the names of its arrows, without their coordinates."""
    root = ElementTree.parse(path).getroot()
    ids = (group.get("id", "") for group in root.iter(f"{SVG}g"))
    texts = (text.text for text in root.iter(f"{SVG}text"))
    return [*(gid for gid in ids if gid.startswith("step")), *texts]


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# tests/test_readme.py runs the README's.
@pytest.mark.parametrize("page", [page for page in PAGES[1:] if ">>> " in page.read_text()])
def test_examples_at_the_prompt(page):
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for path, _, anchor in (target.partition("#") for target in targets if ":" not in target):
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links {path}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links {path}#{anchor}"


def test_the_table_in_the_terminal():
    assert draw_text(recursive_doubling(4)) in (DOCS / "algorithms.md").read_text()


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_up_to_date(name, tmp_path):
    draw(pictures.PICTURES[name], tmp_path / "now.svg")
    assert shown(pictures.FOLDER / f"{name}.svg") == shown(tmp_path / "now.svg")


def test_the_plot_of_times_is_up_to_date(tmp_path):
    plot_times(pictures.predicted(), pictures.SIZES, tmp_path / "now.svg", title=pictures.TITLE)
    assert shown(pictures.FOLDER / "times.svg") == shown(tmp_path / "now.svg")


def test_every_picture_is_shown():
    page = (DOCS / "algorithms.md").read_text()
    drawn = {f"images/algorithms/{path.name}" for path in pictures.FOLDER.iterdir()}
    assert drawn == set(re.findall(r"\((images/algorithms/[^)]*)\)", page))
    assert len(drawn) == len(pictures.PICTURES) + 1
