"""Write everything in the book that is not prose or a notebook: python -m eestudy.book.fragments [--study FILE]."""

import argparse
import sys

import yaml

from eelib.common.errors import InputError
from eestudy.book.answered import ANSWERS
from eestudy.book.front import explore, front, limits, page_chips, questions
from eestudy.book.pages import cards, clone, engine, findings, models, papers, runs
from eestudy.book.study_file import BOOK, GENERATED, StudyFile
from eestudy.book.verdicts import counted_changes, load_results, scoreboard


def main() -> None:
    """Write the table of contents and the generated fragments."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--study", default="study.yml", help="which study (study.yml)")
    study = StudyFile.load(parser.parse_args().study)
    results = load_results(study)
    GENERATED.mkdir(parents=True, exist_ok=True)
    (BOOK / "_toc.yml").write_text(yaml.safe_dump(study.contents(), sort_keys=False), encoding="utf-8")
    fragments = {
        "front": front(study, results),
        "questions": questions(study, results),
        "limits": limits(study),
        "explore": explore(study),
        "findings": findings(study, results),
        "changes": counted_changes(),
        "scoreboard": scoreboard(study, results),
        "cards": cards(),
        "papers": papers(),
        "models": models(study),
        "clone": clone(),
        "runs": runs(results),
    } | engine()
    for name, fragment in fragments.items():
        (GENERATED / f"{name}.md").write_text(fragment + "\n", encoding="utf-8")
    for model, notebook in study.runs:
        path = GENERATED / ANSWERS / model / f"{notebook}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page_chips(study, results, model, notebook), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
