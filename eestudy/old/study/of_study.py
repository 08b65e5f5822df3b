"""What the models of a page have in common, whatever else a page keeps of them."""

from dataclasses import dataclass

from eestudy.old.study.study import Study


@dataclass(frozen=True)
class OfStudy:
    """Something that rests on a study."""

    study: Study

    @property
    def name(self) -> str:
        """The model's."""
        return self.study.model.name

    @property
    def depth(self) -> int:
        """L."""
        return self.study.model.layers

    @property
    def seed(self) -> int:
        """Of the bootstrap."""
        return self.study.parameters.seed
