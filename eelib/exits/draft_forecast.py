"""What drafts gain on this machine: some prompts are decoded with them, and passes cost what was measured once."""

from dataclasses import dataclass

from eelib.common.values import check_whole
from eelib.exits.decoding.generate import GenerateOutput, generate
from eelib.models.lens_adapters import DraftBlock
from eelib.models.model import Model
from eelib.tasks.task import Task


@dataclass(frozen=True)
class DraftForecast:
    """What to expect of `eelib.generate` with a draft.

    Attributes:
        of: the model and the task.
        batch: sequences that are decoded together.
        prompts: seconds in which all prompts are read, timed.
        made: what was decoded with drafts; seconds after the prompts are its `expected`, by what passes cost.
    """

    of: str
    batch: int
    prompts: float
    made: GenerateOutput

    @property
    def speed_up(self) -> float:
        """Tokens per second, as a multiple of plain decoding's, prompts included; 1 where nothing drafts."""
        plain, drafting = self.made.expected
        return (self.prompts + plain) / (self.prompts + drafting) if self.made.draft else 1.0

    def __str__(self) -> str:
        """Two lines for a person."""
        total = self.made.sequences[["passes", "drafted", "accepted"]].sum()
        each = len(self.made.tokens) / max(total["passes"], 1)
        return (
            f"{self.of}: draft={self.made.draft!r}, batch {self.batch}: {self.speed_up:.2f} times plain decoding "
            f"expected\n{total['accepted']} of {total['drafted']} drafts are right; a pass gives {each:.2f} tokens."
        )


def forecast_draft(
    model: Model,
    task: Task,
    draft: str | DraftBlock,
    batch_size: int = 1,
    draft_length: int | None = None,
    max_new_tokens: int = 64,
) -> DraftForecast:
    """Decode a task with a draft, whose outputs are plain decoding's, and put together what its passes cost.

    InputError as of `generate`.
    """
    check_whole("batch_size", batch_size, 1)
    asked = {"draft_length": draft_length, "batch_size": batch_size, "draft": draft}
    made = generate(model, task, max_new_tokens=max_new_tokens, **asked)  # type: ignore[arg-type]
    alone = (generate(model, task, batch_size=batch_size, max_new_tokens=1) for _ in range(2))
    prompts = min(sum(one.times.values()) for one in alone)
    return DraftForecast(f"{model.name} on {task.name}", batch_size, prompts, made)
