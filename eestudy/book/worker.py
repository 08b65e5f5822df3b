"""Make the traces of a model's notebooks, along with other workers: python -m eestudy.book.worker --model FOLDER."""

import argparse
import sys

from eelib.common.errors import InputError
from eestudy.book.study_file import StudyFile
from eestudy.parameters import Parameters
from eestudy.study import Study


def main() -> None:
    """Make one task's trace after the other; parts that another worker is making are awaited at the end."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--study", default="study.yml", help="which study (study.yml)")
    parser.add_argument("--model", required=True, help="the last part of the model's name")
    asked = parser.parse_args()
    try:
        study = StudyFile.load(asked.study)
        if asked.model not in study.models:
            raise InputError(
                f"model {asked.model!r} is not enabled in {asked.study}; enabled: {', '.join(study.models)}"
            )
        last: Study | None = None
        for values in study.asked(asked.model):
            same = last is not None and all(last.parameters[key] == values[key] for key in ("model", "dtype", "device"))
            last = Study(Parameters(values), loaded=last.model if last is not None and same else None)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
