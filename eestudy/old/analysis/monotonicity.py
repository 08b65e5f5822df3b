"""Whether confidence rises from layer to layer, and answers stay (M §3, Figures 1 to 3; M §5)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pandas as pd

from eelib.tracing.trace import Trace
from eestudy.claims import HOLDS, Verdict, as_depth, claim, published
from eestudy.old.analysis.earliness import Values, token_layers
from eestudy.old.analysis.joint import Pair, change
from eestudy.old.analysis.saturation import example_sequence, lens_grid
from eestudy.old.statistics.interval import NOTHING, Interval
from eestudy.old.statistics.stats import bootstrap_unweighted_deviation_over_tasks, bootstrap_unweighted_mean_over_tasks
from eestudy.old.study.claims import untestable
from eestudy.old.study.comparison import check_there, location, model_at_layer
from eestudy.old.study.study import Study
from eestudy.parameters import Parameters

M_LAYERS = 12  # of M's T5, whose layers we read as shares of the depth
SHARES = {"sixth": 2 / M_LAYERS, "third": 4 / M_LAYERS}  # of the depth: M, Figure 1
IN_A_ROW, ABOVE = 3, 0.9  # M's rule, section 5: rising scores, and what the last of them has to exceed
SCORES = {
    "probability": "probability of the layer's own top token",
    "final_probability": "probability of the final token",
}
TOP = 3
PLAIN, WEIGHTED, DISTILLED = OBJECTIVES = ("plain", "weighted", "distilled")  # as in data/papers/M-figure-2.json


# ---- one trace: values by token, end tokens left out


def readout(trace: Trace, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(a readout at layers 0..L, float64 [tokens, L+1] (ids: int), groups [tokens])."""
    rows = trace.statistic_rows()
    values = trace[name][rows]
    return values if name == "top1" else values.astype(float), trace.tokens["group"].to_numpy()[rows]


def settled(trace: Trace, share: float) -> Values:
    """1.0 where the top-1 never changes after a share of the depth (M, Figure 1); between two layers, interpolated."""
    exits, groups = token_layers(trace, "stable")
    below = int(np.floor(share * trace.layers + 1e-9))
    weight = max(share * trace.layers - below, 0.0)
    return (1 - weight) * (exits <= below) + weight * (exits <= below + 1), groups


def at_layer(trace: Trace, name: str, layer: int) -> Values:
    """A readout at one layer."""
    values, groups = readout(trace, name)
    return values[:, layer], groups


def steps(scores: np.ndarray) -> np.ndarray:
    """How much a score [tokens, L+1] changes from layer l to l + 1, l = 1..L-1: [tokens, L-1]; embeddings left out."""
    return np.diff(scores[:, 1:], axis=1)


def rising(trace: Trace, name: str) -> Values:
    """Share of the steps between neighbouring layers at which a score rises; no tokens where there is no step."""
    scores, groups = readout(trace, name)
    rises = steps(scores) > 0
    return (rises.mean(axis=1), groups) if rises.shape[1] else (np.zeros(0), groups[:0])


def rising_to(trace: Trace, name: str, layer: int) -> Values:
    """1.0 where a score rises from the layer before to `layer`, 2..L."""
    scores, groups = readout(trace, name)
    return (steps(scores)[:, layer - 2] > 0).astype(float), groups


def never_falling(trace: Trace, name: str) -> Values:
    """1.0 where a score falls at no step from layer 1 to L: monotone throughout."""
    scores, groups = readout(trace, name)
    return (steps(scores) >= 0).all(axis=1).astype(float), groups


def rule_layer(scores: np.ndarray, in_a_row: int = IN_A_ROW) -> np.ndarray:
    """The first layer below L at which M's rule would stop (M §5), 0 where there is none: int [tokens].

    scores: top-1 probabilities [tokens, L+1]. The rule: they rise over layers l - 2, l - 1, l, and exceed 0.9 at l;
    of one in a row, they only have to exceed it.
    """
    depth = scores.shape[1] - 1
    found = np.zeros(len(scores), dtype=int)
    for layer in range(depth - 1, in_a_row - 1, -1):
        last = scores[:, layer - in_a_row + 1 : layer + 1]
        found[(np.diff(last, axis=1) > 0).all(axis=1) & (last[:, -1] > ABOVE)] = layer
    return found


def ruled(trace: Trace) -> Values:
    """1.0 where `rule_layer` finds a layer."""
    scores, groups = readout(trace, "probability")
    return (rule_layer(scores) > 0).astype(float), groups


def changed_later(trace: Trace, at_the_end: bool = False, in_a_row: int = IN_A_ROW) -> Values:
    """1.0 where the top-1 changes after `rule_layer`, of the tokens that have one.

    `at_the_end`: 1.0 only where the last layer's is another one; a top-1 that comes back does not count.
    """
    scores, groups = readout(trace, "probability")
    top1, found = readout(trace, "top1")[0], rule_layer(scores, in_a_row)
    has = found > 0
    top1, layers = top1[has], found[has]
    differs = top1 != np.take_along_axis(top1, layers[:, None], axis=1)
    later = np.arange(top1.shape[1]) > layers[:, None]
    return (differs[:, -1] if at_the_end else (differs & later).any(axis=1)).astype(float), groups[has]


def drop_after(trace: Trace, layer: int) -> Values:
    """Probability of the final token at `layer` minus the lowest at the layers after it, by token (M, Figure 2)."""
    scores, groups = readout(trace, "final_probability")
    return scores[:, layer] - scores[:, layer + 1 :].min(axis=1), groups


def next_step(trace: Trace, layer: int) -> Values:
    """Probability of the final token at `layer` minus that at the next, by token."""
    scores, groups = readout(trace, "final_probability")
    return scores[:, layer] - scores[:, layer + 1], groups


def falls_at(trace: Trace, layer: int) -> Values:
    """1.0 where the probability of the final token falls from `layer` to the next."""
    scores, groups = readout(trace, "final_probability")
    return (scores[:, layer + 1] < scores[:, layer]).astype(float), groups


# ---- the models of a page


@dataclass(frozen=True)
class Page:
    """The models of a page: each family is a plain model and those trained from it, the page's own family first.

    roles: the studies whose objective the parameters name, "weighted" and "distilled", where they are on the page.
    first_exit: the layer of the distilled model's first exit; 0 where the parameters name none.
    """

    families: tuple[tuple[Study, ...], ...]
    roles: dict[str, Study]
    first_exit: int

    @property
    def own(self) -> Study:
        """The study of parameter model."""
        return self.families[0][0]

    @property
    def studies(self) -> list[Study]:
        """All models, each once."""
        return [study for family in self.families for study in family]

    def objective(self, study: Study) -> str:
        """One of OBJECTIVES; "" for a model that was trained from another in a way that M has not."""
        named = next((role for role, one in self.roles.items() if one is study), "")
        return named or (PLAIN if any(study is family[0] for family in self.families) else "")

    def plain(self, study: Study) -> Study | None:
        """The plain model of a study's family; None where it is that itself."""
        first = next(family[0] for family in self.families if any(study is one for one in family))
        return None if first is study else first

    @property
    def labels(self) -> dict[int, str]:
        """{id of a study: its name for tables and figures}, with its tasks where a name stands twice."""
        names = [study.model.name for study in self.studies]
        found = {}
        for study, name in zip(self.studies, names):
            tasks = f" on {study.parameters.tasks}" if names.count(name) > 1 else ""
            found[id(study)] = f"{name}{tasks}{'' if study.learnt_tasks else ' (not learnt)'}"
        return found

    def label(self, study: Study) -> str:
        """A study's name."""
        return self.labels[id(study)]


def open_page(p: Parameters, further: list[tuple[str, str, str]]) -> Page:
    """The models that the parameters name, and further (before, after, tasks), traced.

    ParameterError, before anything is decoded, for parameters weighted and distilled that name no checkpoint.
    """
    check_there("weighted", p.weighted)
    distilled, first_exit = model_at_layer("distilled", p.distilled)

    @cache
    def study(where: str, tasks: str, model: str) -> Study:
        return Study(p, model=model, tasks=tasks)

    pairs = [(p.model, p.after, p.tasks), *further]
    families: dict[int, list[Study]] = {}
    for before, after, tasks in pairs:
        plain = study(location(before), tasks, before)
        family = families.setdefault(id(plain), [plain])
        if after and all((relative := study(location(after), tasks, after)) is not one for one in family):
            family.append(relative)
    every = [one for family in families.values() for one in family]
    roles: dict[str, Study] = {}
    for role, name in ((WEIGHTED, p.weighted), (DISTILLED, distilled)):
        found = [one for one in every if name and location(one.parameters.model) == location(name)]
        roles |= {role: found[0]} if found else {}
    return Page(tuple(map(tuple, families.values())), roles, first_exit)


# ---- over tasks


def pooled(study: Study, values: Callable[[Trace], Values]) -> dict[str, Values]:
    """{task: values(trace)} of the learnt tasks, of all where none is learnt; tasks without tokens are left out."""
    found = {name: values(made) for name, made in study.traces.items()}
    return study.learnt_tokens(values) or {name: pair for name, pair in found.items() if len(pair[0])}


def mean(study: Study, values: Callable[[Trace], Values]) -> Interval:
    """Unweighted mean over the tasks of `pooled`; NOTHING of none."""
    return mean_of(pooled(study, values), study.parameters.seed)


def mean_of(pool: dict[str, Values], seed: int = 0) -> Interval:
    """Unweighted mean over tasks; NOTHING of none."""
    return bootstrap_unweighted_mean_over_tasks(pool, seed=seed) if pool else NOTHING


def deviation(study: Study, values: Callable[[Trace], Values]) -> Interval:
    """Standard deviation over the tokens of a task, over the tasks of `pooled`; NOTHING of none."""
    pool = pooled(study, values)
    return bootstrap_unweighted_deviation_over_tasks(pool, seed=study.parameters.seed) if pool else NOTHING


def curve(study: Study, make: Callable[[int], Interval], first: int = 1) -> pd.DataFrame:
    """make(layer) at layers `first` to L: columns layer, depth (layer / L), estimate, low, high, sequences."""
    depth = study.model.layers
    rows = [{"layer": at, "depth": at / depth, **make(at)._asdict()} for at in range(first, depth + 1)]
    return pd.DataFrame(rows, columns=["layer", "depth", *Interval._fields]).dropna()


def settled_curve(study: Study) -> pd.DataFrame:
    """`curve` of the share of tokens whose top-1 never changes after a layer (M, Figure 1)."""
    return curve(study, lambda layer: mean(study, partial(settled, share=layer / study.model.layers)))


def confidence_curve(study: Study) -> pd.DataFrame:
    """`curve` of the mean probability of the final token (M, Figure 2), with its standard deviation as `deviation`."""
    found = curve(study, lambda layer: mean(study, partial(at_layer, name="final_probability", layer=layer)))
    return found.assign(
        deviation=[
            deviation(study, partial(at_layer, name="final_probability", layer=layer)).estimate
            for layer in found["layer"]
        ]
    )


def rising_curve(study: Study, name: str) -> pd.DataFrame:
    """`curve` of the share of tokens whose score rises from the layer before; from layer 2 on."""
    return curve(study, lambda layer: mean(study, partial(rising_to, name=name, layer=layer)), first=2)


def of_families(page: Page, make: Callable[[Study], pd.DataFrame]) -> list[dict[str, pd.DataFrame]]:
    """For each family, {label: make(study)}."""
    return [{page.label(study): make(study) for study in family} for family in page.families]


# ---- what M published


def published_settled() -> pd.DataFrame:
    """M's Figure 1, weighted objective: columns depth (share of its twelve layers), unchanged (share of tokens)."""
    table = published("M-figure-1")
    return pd.DataFrame({"depth": table["layer"] / M_LAYERS, "unchanged": table["unchanged"] / 100})


def published_curve(objective: str) -> pd.DataFrame:
    """M's Figure 2 for one of OBJECTIVES: columns low, high (share of the depth under both readings of M's index,
    which does not say where it begins), probability. Empty for another objective.
    """
    table = published("M-figure-2")
    base = table.attrs["columns"]["index"]["layer_base"]
    table = table[table["objective"] == objective]
    readings = [[blocks / M_LAYERS for blocks in as_depth(index, base)] for index in table["index"]]
    return pd.DataFrame(
        {
            "low": [min(found) for found in readings],
            "high": [max(found) for found in readings],
            "probability": table["probability"].to_numpy(),
        }
    )


# ---- single tokens


def example_tokens(trace: Trace, sequence: int) -> pd.DataFrame:
    """`lens_grid` with the top 3 of up to three tokens of an output: the first, the middle and the last to settle.

    M's Figure 3 shows such tokens. End tokens are left out; empty where the trace does not have the sequence.
    """
    of_it = (trace.tokens["sequence"] == sequence).to_numpy() & trace.statistic_rows()
    positions = trace.tokens["position"].to_numpy()[of_it]
    by_layer = positions[np.argsort(trace.exit_layer("stable")[of_it], kind="stable")]
    places = [0, (len(by_layer) - 1) // 2, len(by_layer) - 1]
    grid = lens_grid(trace, sequence, TOP)
    return grid[grid["position"].isin(by_layer[places] if len(by_layer) else [])]


@dataclass(frozen=True)
class Example:
    """One output of each model of a family: its task and number, and {label: `example_tokens`}."""

    task: str
    sequence: int
    grids: dict[str, pd.DataFrame]


def examples(page: Page, wanted: int = -1) -> list[Example]:
    """An `Example` for each family, chosen by its plain model's first task; `wanted` is for the page's own."""
    found = []
    for family in page.families:
        task, first = next(iter(family[0].traces.items()))
        number = example_sequence(first, wanted if family is page.families[0] else -1)
        grids = {page.label(study): example_tokens(study.traces[task], number) for study in family}
        found.append(Example(task, number, grids))
    return found


# ---- verdicts


def missing(page: Page, role: str) -> str:
    """Why a claim about an objective cannot be judged here."""
    name = page.own.parameters[role]
    return f"parameter {role} names {name}, which is not on this page" if name else f"parameter {role} names none"


def weighted_less_plain(page: Page) -> Interval:
    """Share settled after a sixth of the layers, weighted minus plain, paired by group; NOTHING of no learnt task."""
    weighted = page.roles[WEIGHTED]
    plain = page.plain(weighted)
    if plain is None:
        return NOTHING
    return change(Pair(plain, weighted), partial(settled, share=SHARES["sixth"]))["difference"]


def verdicts(page: Page) -> list[Verdict]:
    """Verdicts on M-M1 to M-M5, each on the model with the objective that it is about."""
    weighted, distilled = page.roles.get(WEIGHTED), page.roles.get(DISTILLED)
    plain = page.plain(weighted) if weighted else None
    trained = weighted is not None and plain is not None and plain.model.hash != weighted.model.hash

    def verdict(claim_id: str, study: Study | None, role: str, make: Callable[[], Interval], met: bool) -> Verdict:
        if study is None:
            return untestable(claim_id, f"needs {claim(claim_id).requires}; {missing(page, role)}")
        named = "" if study is page.own else study.model.name
        return replace(study.judge(claim_id, make, requirement_met=met), models=named)

    def average(study: Study | None, values: Callable[[Trace], Values]) -> Callable[[], Interval]:
        return lambda: study.average(values) if study else NOTHING

    found = [
        verdict(name, weighted, WEIGHTED, average(weighted, partial(settled, share=share)), True)
        for name, share in zip(("M-M1", "M-M2"), SHARES.values())
    ]
    third = verdict("M-M3", weighted, WEIGHTED, lambda: weighted_less_plain(page), trained)
    if weighted and not trained:
        third = untestable("M-M3", f"needs {claim('M-M3').requires}; {weighted.model.name} stands here without it")
    drop = verdict("M-M4", distilled, DISTILLED, average(distilled, partial(drop_after, layer=page.first_exit)), True)
    if distilled and drop.verdict == HOLDS:
        step = distilled.average(partial(next_step, layer=page.first_exit), share=False)
        if step.known and step.high < 0:  # the lowest of several layers may be low where the mean is not
            drop = replace(drop, note=f"at the very next layer the mean rises, by {-step.estimate:.3f}")
    judged = weighted or page.own
    return [*found, third, drop, verdict("M-M5", judged, WEIGHTED, average(judged, changed_later), True)]
