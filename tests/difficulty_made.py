"""Units and traces as the section on difficulty reads them, made for its tests."""

from types import SimpleNamespace

import numpy as np
import pandas as pd

from eestudy.old.study.study import Study


class FakeTrace:
    """What the section reads of a trace: three sequences, the last one cut, each other with an end token."""

    def __init__(self, lengths=(4, 0, 6), cut=(False, False, True), layers=5, seed=3):
        generator, rows = np.random.default_rng(seed), []
        for sequence, (length, truncated) in enumerate(zip(lengths, cut)):
            for position in range(length + (not truncated)):
                rows.append(
                    {
                        "sequence": sequence,
                        "position": position,
                        "is_eos": position == length,
                        "truncated": truncated,
                        "group": f"g{sequence // 2}",
                    }
                )
        self.layers, self.tokens = layers, pd.DataFrame(rows)
        self.sequences = pd.DataFrame(
            {
                "sequence": range(len(lengths)),
                "length": lengths,
                "truncated": cut,
                "group": [f"g{s // 2}" for s in range(len(lengths))],
            }
        )
        cosine = generator.choice([0.1, 0.5, 0.9, 0.95], size=(len(rows), layers + 1))
        cosine[:, -1] = 1
        self.values = {"cosine": cosine.astype(np.float32), "entropy": generator.random((len(rows), layers + 1))}

    def __getitem__(self, name):
        return self.values[name]

    def statistic_rows(self):
        return ~self.tokens["is_eos"].to_numpy()


def curves(units=40, layers=6, seed=0, levels=None):
    generator = np.random.default_rng(seed)
    cosine = generator.choice(levels, (units, layers + 1)) if levels else generator.random((units, layers + 1))
    cosine[:, -1] = 1
    return cosine


def planted(easy_are_longer, outputs=410, small=0):
    """A study of outputs with ten tokens each: later tokens are similar sooner, or earlier ones are.

    One task of `outputs`, and one of `small` where that is above 0.
    """
    traces = {name: planted_trace(easy_are_longer, n) for name, n in (("task", outputs), ("small", small)) if n}
    study = SimpleNamespace(
        traces=traces,
        learnt=dict.fromkeys(traces, True),
        learnt_tasks=list(traces),
        labels={name: name for name in traces},
        parameters=SimpleNamespace(share=0.4, threshold=0.9, seed=0),
        model=SimpleNamespace(layers=12, kind="causal", name="planted"),
    )
    study.judge = lambda claim_id, make: Study.judge(study, claim_id, make)
    return study


def planted_trace(easy_are_longer, outputs):
    """One task of `planted`."""
    made = FakeTrace(lengths=(10,) * outputs, cut=(False,) * outputs, layers=12)
    made.tokens["group"] = [f"g{s}" for s in made.tokens["sequence"]]
    made.sequences["group"] = [f"g{s}" for s in range(outputs)]
    made.sequences["length"] = 10 + np.arange(outputs) % 5
    place = made.tokens["position"].to_numpy() + made.tokens["sequence"].to_numpy() % 5 / 10
    ease = (place if easy_are_longer else place.max() - place)[:, None]
    cosine = np.linspace(0, 1, 13) ** (1 / (0.2 + ease))  # rises at every layer
    cosine[place >= 5, 6] = cosine[place >= 5, 5]  # but for a step of half the prefixes
    made.values = {"cosine": cosine, "entropy": np.repeat(ease.max() - ease, 13, axis=1)}
    return made
