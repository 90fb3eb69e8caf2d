"""The catalogue on the command line, and the README's table of it."""

import pathlib

import pytest

import losses
from launch import papers

README = pathlib.Path(__file__).parents[2] / "README.md"


def test_readme_holds_the_generated_table():
    """Regenerate it with `python -m launch.papers` when this fails."""
    assert papers.table() in README.read_text()


def test_every_paper_has_a_row_and_every_row_its_needs():
    rows = papers.table().splitlines()[2:]
    assert len(rows) == len(losses.papers())
    for row, entry in zip(rows, losses.papers()):
        assert row.startswith(f"| {entry.slug} | `{entry.name}` |")
        assert all(need in row for need in losses.paper(entry.slug).needs)


@pytest.mark.parametrize("slug", ["minpro", "tis", "gae", "soft-overlong", "dynamic-sampling"])
def test_one_paper_in_full(slug):
    shown = papers.full(slug)
    found = losses.entry(slug)
    assert found.title in shown and found.arxiv in shown
    assert f"--paper={slug}" in shown
    for name, default in found.hyper.items():
        shown_default = next(line for line in shown.splitlines() if f".{name}=" in line)
        assert shown_default.endswith(f"={default}")


def test_an_unknown_paper_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        papers.main(["papers", "minpr"])
    assert ended.value.code == 2
    assert "'minpro'" in capsys.readouterr().err
