"""The pages and figures of ``docs/studies/``: ``python scripts/study_pages.py [RUNS]``.

They are made from the results that come with the package and from the comments in ``studies/comments/``. With RUNS, a
folder of ``vil study``, its results are taken into the package first.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from vision_longformer.studies.catalogue import STUDY_NAMES, find_study
from vision_longformer.studies.plots import draw
from vision_longformer.studies.report import Report, notes, report, table_cells, table_columns
from vision_longformer.studies.results import STORED, ResultStore, comment

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "studies"
NAVIGATION = ROOT / "mkdocs.yml"
SCALE = "small"
START, END = "<!-- made by scripts/study_pages.py -->", "<!-- end -->"
"""Marks of the part of the index that is made here."""


def take_in(runs: Path) -> None:
    """Put the results of a folder into the package."""
    store = ResultStore.read([STORED, runs], SCALE)
    for study in map(find_study, STUDY_NAMES):
        if any(row.runs for row in report(study, SCALE, store).rows):
            store.write(study, SCALE, STORED)


def markdown_table(columns: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A table whose first ``left`` columns are text."""
    lines = [columns, [*["---"] * left, *["--:"] * (len(columns) - left)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(table: Report) -> str:
    """A study's page."""
    study = table.study
    parts = [f"# {title(study.name)}", f"{study.about}. In the paper: {study.table}."]
    if any(row.runs for row in table.rows):
        rows = [table_cells(table, row) for row in table.rows]
        parts += [f"```bash\nvil study show {study.name}\n```", markdown_table(table_columns(study), rows)]
        parts += [*notes(table), f"![Results of the study]({study.name}.png)", comment(study.name)]
    else:
        parts.append("No run of it is finished yet.")
    return "\n\n".join(part for part in parts if part) + "\n"


def title(name: str) -> str:
    """As the navigation of the site has it."""
    found = re.search(rf"- (.+): studies/{name}\.md$", NAVIGATION.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{NAVIGATION.name} does not list studies/{name}.md"
    return found[1]


def index(tables: list[Report]) -> str:
    """The list of the studies, for the page that links to them."""
    rows = []
    for table in tables:
        study = table.study
        done = sum(len(row.runs) for row in table.rows)
        correlation = "–" if table.correlation is None else f"{table.correlation[0]:.2f}"
        rows.append([f"[`{study.name}`]({study.name}.md)", study.about, str(len(table.rows)), str(done), correlation])
    return markdown_table(["study", "what is compared", "rows", "runs here", "Spearman with the paper"], rows, left=2)


def stored_tables() -> list[Report]:
    """All studies with the results that come with the package."""
    store = ResultStore.read([STORED], SCALE)
    return [report(study, SCALE, store) for study in map(find_study, STUDY_NAMES)]


def pages(tables: list[Report]) -> dict[str, str]:
    """All pages by file name; of the index only the list is made here, what is around it stays."""
    before, _, rest = (PAGES / "index.md").read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    listed = f"{before}{START}\n\n{index(tables)}\n\n{END}{after}"
    return {"index.md": listed, **{f"{table.study.name}.md": page(table) for table in tables}}


def main() -> None:
    tables = stored_tables()
    for name, text in pages(tables).items():
        (PAGES / name).write_text(text, encoding="utf-8")
    for table in tables:
        if any(row.runs for row in table.rows):
            draw(table, PAGES / f"{table.study.name}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?", type=Path, help="a folder of 'vil study', whose results are taken in")
    arguments = parser.parse_args()
    if arguments.runs is not None:
        take_in(arguments.runs)
    main()
