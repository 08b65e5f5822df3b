"""Several models on one page: which ones a parameter names, read before anything is decoded."""

from transformers import AutoConfig, PretrainedConfig

from eelib.common.errors import InputError
from eelib.models.checkpoint import not_loaded, path_of
from eelib.study.parameters import ParameterError
from eelib.tasks.task import task_names


def models_on_tasks(parameter: str, text: str, example: str) -> list[tuple[str, str]]:
    """(what stands before " on ", tasks) of each entry, several with semicolons; ParameterError for another form."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        models, _, tasks = (piece.strip() for piece in part.rpartition(" on "))
        if not models:
            raise ParameterError(
                f"parameter {parameter} holds {part!r}; allowed are entries such as {example!r}, "
                "several with semicolons, or nothing"
            )
        try:
            task_names(tasks)
        except InputError as error:
            raise ParameterError(f"parameter {parameter}, {models}: {error}") from error
        found.append((models, tasks))
    return found


def config_of(parameter: str, name: str) -> PretrainedConfig:
    """A checkpoint's config, read before anything is decoded; ParameterError where there is none."""
    try:
        return AutoConfig.from_pretrained(path_of(name))
    except Exception as error:  # transformers raises many kinds; the reader needs one line
        raise ParameterError(f"parameter {parameter}: {not_loaded(name, error)}") from error
