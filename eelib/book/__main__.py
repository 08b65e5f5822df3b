"""Write everything in the book that is not prose or a notebook: python -m eelib.book [--study FILE]."""

import argparse

import yaml

from eelib.book.engine import engine
from eelib.book.pages import GENERATED, cards, findings, load_results, runs, scoreboard
from eelib.book.study_file import BOOK, StudyFile
from eelib.common.data import data_folder


def main() -> None:
    """Write the table of contents and the generated fragments."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--study", default="study.yml", help="which study (study.yml)")
    study = StudyFile.load(parser.parse_args().study)
    results = load_results(study)
    GENERATED.mkdir(parents=True, exist_ok=True)
    (BOOK / "_toc.yml").write_text(yaml.safe_dump(study.contents(), sort_keys=False), encoding="utf-8")
    fragments = {
        "findings": findings(study, results),
        "scoreboard": scoreboard(study, results),
        "cards": cards(),
        "runs": runs(results),
    } | engine(data_folder("checks"), GENERATED)
    for name, fragment in fragments.items():
        (GENERATED / f"{name}.md").write_text(fragment + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
