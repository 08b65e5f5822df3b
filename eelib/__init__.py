"""Early exit without extra heads: read every layer of a transformer through its own head."""

from .model import load_model, shipped_models
from .tasks import Task, load_task, shipped_tasks, task_names
from .trace import Trace, trace

__all__ = ["Task", "Trace", "load_model", "load_task", "shipped_models", "shipped_tasks", "task_names", "trace"]
