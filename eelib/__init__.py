"""Early exit without extra heads: read every layer of a transformer through its own unembedding."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eelib.exits.decoding.generate import generate as generate
    from eelib.exits.forecast import forecast as forecast
    from eelib.models.checkpoint import shipped_models as shipped_models
    from eelib.models.model import load_model as load_model
    from eelib.tasks.task import Task as Task
    from eelib.tasks.task import load_task as load_task
    from eelib.tasks.task import shipped_tasks as shipped_tasks
    from eelib.tasks.task import task_names as task_names
    from eelib.tracing.make import trace as trace
    from eelib.tracing.trace import Trace as Trace

WHERE = {
    "Task": "eelib.tasks.task",
    "Trace": "eelib.tracing.trace",
    "forecast": "eelib.exits.forecast",
    "generate": "eelib.exits.decoding.generate",
    "load_model": "eelib.models.model",
    "load_task": "eelib.tasks.task",
    "shipped_models": "eelib.models.checkpoint",
    "shipped_tasks": "eelib.tasks.task",
    "task_names": "eelib.tasks.task",
    "trace": "eelib.tracing.make",
}

__all__ = [*WHERE]

if not TYPE_CHECKING:  # each is imported when it is first asked for: the book and the Snakefile do not wait for torch

    def __getattr__(name: str) -> object:
        if name not in WHERE:
            raise AttributeError(f"module 'eelib' has no attribute {name!r}")
        return getattr(import_module(WHERE[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *WHERE})
