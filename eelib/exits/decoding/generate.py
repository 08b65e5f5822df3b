"""eelib.generate: greedy decoding that stops early where a gate says so."""

from pathlib import Path

import torch

from eelib.common.errors import InputError
from eelib.common.memory import Halving
from eelib.common.values import check_whole
from eelib.exits.decoding.asker import Asker
from eelib.exits.decoding.clock import Clock
from eelib.exits.decoding.generated import Generated, described
from eelib.exits.decoding.keys import KEYS, Keys
from eelib.exits.decoding.loop import Decoding
from eelib.exits.decoding.oracle import FirstAgreeing, Oracle, oracle_rule
from eelib.exits.decoding.parting import ALWAYS, Parting, parting_of
from eelib.exits.decoding.row import Row
from eelib.exits.decoding.sampling import Sampler, check_temperature
from eelib.exits.decoding.trial import check_stops
from eelib.exits.exit_rule import Estimated, ExitRule, check_exit_layers, fixed_exit
from eelib.exits.gates.gate import NEEDS, Gate, LayerOutput
from eelib.exits.gates.learned import Learned
from eelib.exits.gates.registry import gate_named
from eelib.exits.gates.trained import TRAINED, trained_gate
from eelib.exits.policy import Policy
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.plan import encode

DRAFT = 4  # most tokens drafted in a row where nothing is said


def generate(
    model: Model,
    task: Task | list[str],
    gate: str | Gate | ExitRule | None = None,
    exits: tuple[int, ...] | None = None,
    keys: str | None = None,
    draft: int | None = None,
    batch_size: int = 8,
    max_new_tokens: int = 64,
    policy: Policy | Path | str | None = None,
    temperature: float | None = None,
    seed: int = 0,
    parting: Parting | None = None,
) -> Generated:
    """Decode a task's prompts, or a list of them, greedily; each token leaves where the gate stops it.

    `gate`: a name ("oracle" too, see `decoding.oracle`), a gate, or a rule with its threshold and exits; without one
    and with `exits=(E,)` each token leaves at layer E. `keys`: what later tokens find at skipped layers, of
    `eelib.exits.decoding.keys`: full, copy, project, deferred, verified, schedule. `draft`: of verified, most tokens
    that are drafted before they are verified. `policy`: a calibrated one (`eelib.exits.policy`), or its file, in place
    of gate, exits and keys; its threshold is that of the task's kind. `temperature` above 0: tokens are sampled, with
    random numbers of each prompt by `seed`; of verified, whose outputs are distributed as those of full depth, or where
    no token leaves; None takes the policy's, or 0. `parting`: seconds by which rows of a batch part or stay together
    (`decoding.parting`); None measures them, once for each model and batch size, so what is run for a token, and
    how it rounds, is the machine's; ALWAYS and NEVER repeat. Where tokens are sampled, rows always part. Out of
    memory, a batch is halved. A threshold that is learnt (FREE's) goes on learning in the rule that is given. The
    prompt (of an encoder-decoder: the start token) runs all blocks under every policy.
    InputError, one line: a model that writes nothing or can't be stopped, an unknown gate or policy, exits out of
    range, a prompt that does not fit the window.
    """
    check_writes(model)
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_whole("batch_size", batch_size, 1)
    if parting is not None and not isinstance(parting, Parting):
        raise InputError(f"parting {parting!r} is not allowed; it must be a Parting, or None to measure it")
    if policy is not None:
        gate, keys, temperature = by_policy(model, task, policy, temperature, gate, exits, keys)
    chosen_keys = policy_named("full" if keys is None else keys)
    rule = rule_of(model, gate, exits)
    check_fit(model, chosen_keys, rule, max_new_tokens)
    length = draft_length(model, chosen_keys, draft if policy is None or rule is not None else None)
    sampler = sampler_of(chosen_keys, rule, temperature, seed)
    prompts = encoded(model, task)
    check_stops(model, chosen_keys)
    chunks, halving = batches(model, prompts, batch_size), Halving()
    if sampler or rule is None or not chosen_keys.stops:
        parting = ALWAYS
    elif parting is None:  # of the most rows that fit
        parting = halving.run(lambda some: parting_of(model, len(some)), max(chunks, key=len))[0]
    clock = Clock()
    rows: list[Row] = []
    decoding = Decoding(model, chosen_keys, asker_of(model, rule, clock), length, clock, sampler, parting)
    for chosen in chunks:
        parts = halving.run(lambda some: decode_chosen(decoding, prompts, some, max_new_tokens), chosen)
        rows += [row for part in parts for row in part]
    clock.turn("python")
    return described(model, rows, clock.seconds)


def check_writes(model: object) -> None:
    """InputError for what is no model, or one that writes no tokens."""
    if not isinstance(model, Model) or not model.adapter.writes:
        raise InputError("generate needs a causal or encoder-decoder model from eelib.load_model")


def decode_chosen(decoding: Decoding, prompts: list[list[int]], chosen: list[int], max_new_tokens: int) -> list[Row]:
    """The rows of the prompts `chosen`, numbered as these."""
    if decoding.sampler:
        decoding.sampler.begin_batch(chosen)
    try:
        rows = decoding.decode([prompts[i] for i in chosen], max_new_tokens)
    except (RuntimeError, MemoryError):
        decoding.forget()  # a batch that did not fit: its halves need the room
        raise
    for row in rows:
        row.number = chosen[row.number]
    return rows


def sampler_of(keys: Keys, rule: ExitRule | None, temperature: float | None, seed: int) -> Sampler | None:
    """What draws tokens; None at temperature 0. InputError where sampling would not be that of full depth."""
    check_whole("seed", seed, 0)
    if temperature is None:
        return None
    check_temperature(temperature)
    if temperature == 0:
        return None
    if rule is not None and not keys.verifies:
        raise InputError(
            f"temperature {temperature:g} with keys={keys.name!r} would sample from other layers than the last; "
            "allowed with keys='verified', or where no token leaves"
        )
    return Sampler(float(temperature), seed)


def asker_of(model: Model, rule: ExitRule | None, clock: Clock) -> Asker | None:
    """What asks the rule; None where there is none."""
    if rule is None:
        return None
    return Oracle(model, rule, clock) if isinstance(rule.gate, FirstAgreeing) else Asker(model, rule, clock)


def by_policy(
    model: Model,
    task: Task | list[str],
    policy: Policy | Path | str,
    temperature: float | None,
    *others: object,
) -> tuple[ExitRule | None, str, float]:
    """(rule, keys, temperature) of a policy, or of its file, for a task; `others`: gate, exits and keys asked for
    beside it, all None. InputError where one is not, and for a policy that can't be read, is for another model or
    temperature, or has nothing for the task.
    """
    if any(other is not None for other in others):
        raise InputError("a policy has a gate, exits and keys of its own; give it alone")
    policy = policy if isinstance(policy, Policy) else Policy.load(policy)
    if temperature is not None and temperature != policy.temperature:
        raise InputError(f"the policy is for temperature {policy.temperature:g}, not {temperature!r}")
    rule = policy.rule(model, task.kind if isinstance(task, Task) else "prompts")
    return rule, policy.keys if rule is not None else "full", policy.temperature


def policy_named(keys: str | None) -> Keys:
    """The policy of keys and values. InputError for an unknown one."""
    if not isinstance(keys, str) or keys not in KEYS:
        raise InputError(f"keys {keys!r} is not known; allowed: {', '.join(KEYS)}")
    return KEYS[keys]


def rule_of(model: Model, gate: str | Gate | ExitRule | None, exits: tuple[int, ...] | None) -> ExitRule | None:
    """The rule that is meant; None: no token leaves. InputError where it does not fit the model."""
    check_exit_layers(exits)
    if isinstance(gate, ExitRule):
        if exits is not None:
            raise InputError("a rule has exits of its own; give exits with a gate's name, or in the rule")
        rule = gate
    elif gate is None:
        if exits is None:
            return None
        if len(exits) != 1:
            raise InputError(f"exits {exits!r} without a gate is not allowed; it must be one layer, or give a gate")
        rule = fixed_exit(exits[0])
    elif gate == "oracle":
        rule = oracle_rule(None if exits is None else tuple(exits))
    elif isinstance(gate, (str, Gate)):
        found = gate if isinstance(gate, Gate) else trained_gate(model, gate) if gate in TRAINED else gate_named(gate)
        rule = ExitRule(found, exit_layers=None if exits is None else tuple(exits))
    else:
        raise InputError(f"gate {gate!r} is not allowed; it must be a gate's name, a gate or a rule")
    rule.check(model.layers)
    return rule


def check_fit(model: Model, keys: Keys, rule: ExitRule | None, max_new_tokens: int) -> None:
    """InputError where gate, policy and model do not go together."""
    if rule is None:
        if keys.stops:
            raise InputError(f"keys={keys.name!r} needs a gate, or exits=(layer,) at which every token leaves")
        return
    if missing := sorted(set(rule.gate.needs) - set(NEEDS)):
        raise InputError(f"gate {rule.gate.name} needs {', '.join(missing)}, which is not there while decoding")
    if isinstance(rule.gate, Learned) and (
        rule.gate.model != model.name or rule.gate.model_hash not in ("", model.hash)
    ):
        other = ", for other weights than these" if rule.gate.model == model.name else f", not for {model.name}"
        raise InputError(f"gate {rule.gate.name} was trained for {rule.gate.model}{other}")
    if isinstance(rule.threshold, Estimated) and keys.verifies:
        raise InputError(
            f"keys={keys.name!r} asks the last layer about several tokens at once, from which a threshold that is "
            "learnt while decoding can't learn; allowed: deferred, or a threshold that is a number"
        )
    if isinstance(rule.gate, FirstAgreeing) and (keys.waits or keys.name == "schedule"):
        raise InputError(
            f"the oracle runs all blocks, so keys={keys.name!r} says nothing; allowed: full, copy, project"
        )
    if keys.name == "schedule":
        check_schedule(model, rule, max_new_tokens)
    if model.adapter_block and keys.name in ("copy", "project"):
        least = model.adapter_block.layer
        if any(rule.asks(layer, model.layers) for layer in range(1, least)):
            raise InputError(
                f"keys={keys.name!r}: of a token that leaves before layer {least} the adapter block of {model.name} "
                "has no keys; allowed are exits from there on, or other keys"
            )


def check_schedule(model: Model, rule: ExitRule, max_new_tokens: int) -> None:
    """InputError where depths are not known beforehand, or where one is deeper than one before it."""
    if rule.gate.needs:
        raise InputError(
            f"keys='schedule' needs depths that are known beforehand; gate {rule.gate.name} looks at each token; "
            "allowed: schedule, fixed"
        )
    positions = torch.arange(max_new_tokens)
    depths = torch.full_like(positions, model.layers)
    for layer in range(model.layers - 1, 0, -1):
        if rule.asks(layer, model.layers):
            score = rule.gate.score(LayerOutput(layer, model.layers, positions), {})
            depths[rule.exits(layer, score, positions)] = layer
    if deeper := (depths.diff() > 0).nonzero().flatten().tolist():
        raise InputError(f"keys='schedule': token {deeper[0] + 1} would go deeper than the one before it")


def draft_length(model: Model, keys: Keys, draft: int | None) -> int:
    """Most tokens drafted in a row. InputError where none are, or where they do not fit the window."""
    if not keys.verifies:
        if draft is not None:
            raise InputError(f"draft={draft!r} is for keys='verified'; keys={keys.name!r} drafts nothing")
        return 0
    draft = DRAFT if draft is None else draft
    check_whole("draft", draft, 1)
    if draft >= model.context_length:
        raise InputError(f"draft {draft} is longer than {model.name}'s window of {model.context_length} tokens")
    return draft


def encoded(model: Model, task: Task | list[str]) -> list[list[int]]:
    """Token ids of the prompts. InputError where one has none, or does not fit the window."""
    prompts = encode(model, task if isinstance(task, Task) else Task.from_prompts(task))
    for number, ids in enumerate(prompts):
        if not 0 < len(ids) < model.context_length:
            raise InputError(
                f"prompt {number} has {len(ids)} tokens; allowed are 1 to {model.context_length - 1}, what "
                f"{model.name}'s window holds beside the output"
            )
    return prompts


def batches(model: Model, prompts: list[list[int]], batch_size: int) -> list[list[int]]:
    """Prompts by number in batches, the shortest first; of one length where padding would change a row."""
    found: list[list[int]] = []
    for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        same = model.pads or (found and len(prompts[found[-1][-1]]) == len(prompts[i]))
        if found and same and len(found[-1]) < batch_size:
            found[-1].append(i)
        else:
            found.append([i])
    return found
