"""Early exit without extra heads: read every layer of a transformer through its own unembedding."""

from eelib.models.checkpoint import shipped_models
from eelib.models.model import load_model
from eelib.tasks.task import Task, load_task, shipped_tasks, task_names
from eelib.tracing.make import trace
from eelib.tracing.trace import Trace

__all__ = ["Task", "Trace", "load_model", "load_task", "shipped_models", "shipped_tasks", "task_names", "trace"]
