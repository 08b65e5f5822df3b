"""Token tables with known effects of position and length."""

from types import SimpleNamespace

import numpy as np
import pandas as pd

from eestudy.old.analysis.length import token_table


def make_trace(*layers, cut=(), groups=None, eos=1):
    """A trace whose sequence i has tokens that leave at layers[i], then an end token that leaves at layer `eos`."""
    rows, sequences = [], []
    for number, own in enumerate(layers):
        group, ended = (groups or range(len(layers)))[number], number not in cut
        for position, layer in enumerate([*own, *([eos] if ended else [])]):
            rows.append(
                dict(
                    sequence=number,
                    group=group,
                    position=position,
                    is_eos=position == len(own),
                    truncated=not ended,
                    layer=layer,
                )
            )
        sequences.append(dict(sequence=number, group=group, length=len(own), truncated=not ended))
    tokens = pd.DataFrame(rows, columns=["sequence", "group", "position", "is_eos", "truncated", "layer"])
    return SimpleNamespace(
        tokens=tokens,
        sequences=pd.DataFrame(sequences),
        layers=12,
        statistic_rows=lambda: ~tokens["is_eos"].to_numpy(bool),
        exit_layer=lambda definition: tokens["layer"].to_numpy() - (definition == "first"),
    )


def made(effect, lengths, noise=0.0, seed=0, **options):
    """Token table of sequences of these lengths whose stable exit layer is effect(position, length) plus noise."""
    rng = np.random.default_rng(seed)
    layers = [[effect(p, n) + noise * rng.normal() for p in range(n)] for n in lengths]
    return token_table(make_trace(*layers, **options))


def noisy():
    """Forty sequences in twenty groups, with an effect of each."""
    rng = np.random.default_rng(3)
    return made(
        lambda p, n: 6 - 0.2 * p + 0.1 * n, rng.integers(1, 12, size=40), noise=1.0, groups=[i // 2 for i in range(40)]
    )
