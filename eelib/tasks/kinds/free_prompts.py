"""Free prompts, which need no references; where they have some, BLEU and chrF are given."""

from eelib.tasks import sums
from eelib.tasks.kinds.kind import TaskKind
from eelib.tasks.metrics import bleu_chrf

FREE_PROMPTS = TaskKind(
    name="prompts",
    scores=lambda task, outputs: bleu_chrf(outputs, task.references, task.target_language),
    sums=lambda task, outputs: {"BLEU": sums.bleu(outputs, task.references, task.target_language)},
)
