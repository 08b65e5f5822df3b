"""What drafts gain on this machine: some prompts are decoded with them, and passes cost what was measured once."""

from dataclasses import dataclass

from eelib.common.values import check_whole
from eelib.exits.decoding.generate import generate
from eelib.models.lens_adapters import DraftBlock
from eelib.models.model import Model
from eelib.tasks.task import Task


@dataclass(frozen=True)
class DraftForecast:
    """What to expect of `eelib.generate` with a draft.

    Attributes:
        of: the model and the task.
        draft: what drafts; "" where nothing does.
        batch: sequences that are decoded together.
        prompts: seconds in which all prompts are read, timed.
        decoding: seconds of all tokens after the prompts, in plain decoding and with drafts, by what passes cost.
        tokens, passes: of all outputs. drafted, accepted: drafts, and those that were right.
    """

    of: str
    draft: str
    batch: int
    prompts: float
    decoding: tuple[float, float]
    tokens: int
    passes: int
    drafted: int
    accepted: int

    @property
    def speed_up(self) -> float:
        """Tokens per second, as a multiple of plain decoding's, prompts included."""
        plain, drafting = self.decoding
        return (self.prompts + plain) / (self.prompts + drafting) if self.draft else 1.0

    def __str__(self) -> str:
        """Two lines for a person."""
        each = self.tokens / max(self.passes, 1)
        return (
            f"{self.of}: draft={self.draft!r}, batch {self.batch}: {self.speed_up:.2f} times plain decoding expected\n"
            f"{self.accepted} of {self.drafted} drafts are right; a pass gives {each:.2f} tokens."
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
    drafted, accepted, passes = (int(made.sequences[name].sum()) for name in ("drafted", "accepted", "passes"))
    return DraftForecast(
        f"{model.name} on {task.name}",
        made.draft,
        batch_size,
        min(sum(one.times.values()) for one in alone),
        made.expected,
        len(made.tokens),
        passes,
        drafted,
        accepted,
    )
