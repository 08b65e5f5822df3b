"""eelib.generate: greedy decoding that stops early where a gate says so."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch

from eelib.common.errors import InputError
from eelib.common.machine import run_in_halves
from eelib.common.values import check_whole
from eelib.exits.cost import exit_costs, sizes_of
from eelib.exits.decoding.drafters import check_draft_length, drafting_of
from eelib.exits.decoding.gate_runner import FirstAgreeing, GateRunner, OracleGate, oracle_rule
from eelib.exits.decoding.kv_policies import KV_POLICIES, KVPolicy
from eelib.exits.decoding.loop import Decoder, DraftRecord
from eelib.exits.decoding.self_test import self_test
from eelib.exits.decoding.sequences import DecodedSequence
from eelib.exits.exit_rule import Estimated, ExitRule, check_exit_layers, fixed_exit
from eelib.exits.gates.gate import Gate, LayerOutput, gate_named
from eelib.exits.gates.schedule import Schedule
from eelib.exits.gates.state import TrainedGate
from eelib.exits.policy import Policy
from eelib.models.lens_adapters import DraftBlock
from eelib.models.model import Model
from eelib.tasks.task import Task
from eelib.tracing.columns import token_texts
from eelib.tracing.decode import encode
from eelib.tracing.plan import cut

DRAFT_LENGTH = 4  # most tokens drafted in a row, unless another number is given
OLD_WORDS = {
    "exits": "it is exit_layers= now",
    "keys": "it is kv_policy= now",
    "parting": "batches are split by a fixed rule now",
    "batch_split": "batches are split by a fixed rule now",
}


@dataclass
class GenerateOutput:
    """What `generate` returns.

    Attributes:
        tokens: a row per token: sequence and position from 0, text, token_id, exit_layer, layers_run (blocks that ran
            at the position that predicts it), head_reads, score (the gate's last), kv_only_layers (blocks that made
            only keys and values), drafted and accepted.
        sequences: a row per prompt: output (as in a trace, without its end token), length in tokens (unlike a trace's,
            with the end token), truncated (no end token), passes (reads of the last layer), and of verified decoding
            the tokens drafted and accepted.
        seconds: of decoding, from the encoded prompts to the last token.
        kv_policy: the KV policy that was used.
        draft: name of the draft that was used; "" for none.
        ended: why drafting, or the model's part in it, ended, where it costs more than it saves; else "".
        expected: seconds after the prompts by the cost of passes: (without drafts, with the drafts that were made).
    """

    tokens: pd.DataFrame
    sequences: pd.DataFrame
    seconds: float
    kv_policy: str
    draft: str = ""
    ended: str = ""
    expected: tuple[float, float] = (0.0, 0.0)


def generate(
    model: Model,
    task: Task | list[str],
    gate: str | Gate | ExitRule | None = None,
    exit_layers: tuple[int, ...] | None = None,
    kv_policy: str | None = None,
    draft_length: int | None = None,
    batch_size: int = 8,
    max_new_tokens: int = 64,
    policy: Policy | Path | str | None = None,
    always_draft: bool = False,
    draft: str | DraftBlock | None = None,
    **old: object,
) -> GenerateOutput:
    """Decode a task's prompts, or a list of prompts, greedily: each token exits where its gate's score passes the
    threshold, or tokens are drafted and verified, which changes no output.

    In bfloat16 and float16, rounding depends on the tokens that are computed together, so that of two tokens with
    nearly the same probability the other one may be emitted.

    The prompt (of an encoder-decoder: the start token) runs all blocks under every KV policy. If memory runs out,
    batches are halved. A threshold that is learned (FREE's) goes on learning in the rule that is given. Threads that
    share a model decode their batches one after the other.

    Args:
        gate: a name ("oracle" too: the first layer that agrees with the last), a gate, or a rule with its threshold and
            exits. None: plain decoding; with `exit_layers=(E,)` and a KV policy other than verified, each token
            exits at layer E.
        exit_layers: layers from 1 to L; the gate is asked at those below L. None for all.
        kv_policy: what later tokens find at skipped layers: full, copy, project, deferred, verified, schedule (see
            `eelib.exits.decoding.kv_policies`). None chooses: verified, whose output is plain decoding's; deferred for
            a threshold that is learned while decoding; schedule for SkipDecode's gate; full for the oracle, or where no
            token exits.
        draft_length: of a gate's verified exits, most tokens that are drafted before they are verified; None: 4. Of
            `draft`, the number that is drafted in a round; None: as many as save time, by the drafts that were right so
            far and by the cost of passes on this machine (measured once, in a second, or several for large batches).
        batch_size: prompts that are decoded together.
        max_new_tokens: longest output, in tokens.
        policy: a calibrated policy (`eelib.exits.policy`), or its file, in place of gate, exit_layers and kv_policy;
            its threshold is that of the task's kind, for outputs no longer than those that it was calibrated on.
        always_draft: of a gate's verified exits, draft even if that costs more time than it saves. False: drafting
            ends when that shows, with one printed line.
        draft: drafts tokens, in place of a gate; all drafts are verified, so that the output is plain decoding's.
            "prompt": the tokens that followed an earlier occurrence of the text's last tokens (prompt lookup);
            "layer:K": layer K through the head; "block": a trained block after a layer; "features": a trained block on
            the last layer's states; "int8": all layers, with weights of 8 bits; "prompt+block", "prompt+features",
            "prompt+int8": prompt lookup, and the other where it finds nothing; a trained block itself; "auto": the
            fastest on this machine. None: nothing.
        old: not allowed; for a name of an earlier release, the error gives the new name, or says what became of it.

    Raises:
        InputError: a model that writes nothing or can't be stopped, an unknown gate or policy, exit layers out of
            range, a prompt that does not fit the window, a policy that holds for shorter outputs only.
    """
    check_writes(model)
    for name in old:
        new = f"; {OLD_WORDS[name]}" if name in OLD_WORDS else ""
        raise InputError(f"generate takes no {name}={new}")
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_whole("batch_size", batch_size, 1)
    prompts = encoded(model, task)
    rule, drafting, record, name, length = None, None, None, "", 0
    if draft is not None:
        if not all(given is None for given in (gate, exit_layers, kv_policy, policy)):
            raise InputError("draft stands in place of gate, exit_layers, kv_policy and policy; give it alone")
        self_test(model, KV_POLICIES["verified"])
        drafting, name = drafting_of(model, draft, draft_length, min(batch_size, len(prompts)))
        kv = KV_POLICIES["verified" if drafting else "full"]
    else:
        rule, kv, length = resolved(model, task, gate, exit_layers, kv_policy, draft_length, max_new_tokens, policy)
        if rule is not None and kv.verifies and not always_draft:
            sizes = sizes_of(model)
            record = DraftRecord((exit_costs(sizes, rule) / sizes.full).tolist())
    oracle = rule is not None and isinstance(rule.gate, FirstAgreeing)
    runner = OracleGate(model, rule) if oracle else GateRunner(model, rule)

    def decoded(chosen: list[int]) -> list[DecodedSequence]:
        """Decode the prompts with the numbers `chosen`; the sequences get these numbers."""
        decoder = Decoder(model, kv, runner, length, record, drafting)
        found = decoder.decode([prompts[i] for i in chosen], max_new_tokens)
        runner.end_batch()
        for sequence in found:
            sequence.index = chosen[sequence.index]
        return found

    sequences, started = list[DecodedSequence](), time.perf_counter()
    for chosen in batches(model, prompts, batch_size):
        sequences += [sequence for part in run_in_halves(decoded, chosen) for sequence in part]
    seconds = time.perf_counter() - started
    made = GenerateOutput(*tables_of(model, sequences), seconds, kv.name, name, record.ended if record else "")
    if drafting:
        made.ended, made.expected = drafting.ended, (drafting.plain_seconds, drafting.seconds)
    return made


def tables_of(model: Model, sequences: list[DecodedSequence]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(tokens, sequences) as in `GenerateOutput`, of sequences that have the numbers of their prompts."""
    token_rows, sequence_rows = [], []
    for sequence in sorted(sequences, key=lambda sequence: sequence.index):
        ids = [token.token_id for token in sequence.tokens]
        ended = ids[-1] in model.eos_ids
        texts, _, _, output = token_texts(model.tokenizer, ids[:-1] if ended else ids)
        texts += [str(model.tokenizer.decode(ids[-1:]))] * ended
        for position, (token, text) in enumerate(zip(sequence.tokens, texts)):
            token_rows.append({"sequence": sequence.index, "position": position, "text": text, **asdict(token)})
        sequence_rows.append(
            {
                "sequence": sequence.index,
                "output": output,
                "length": len(ids),
                "truncated": not ended,
                "passes": sequence.passes,
                "drafted": sequence.drafted,
                "accepted": sequence.accepted,
            }
        )
    return pd.DataFrame(token_rows), pd.DataFrame(sequence_rows)


def check_writes(model: object) -> None:
    """InputError where `model` is not a model that writes tokens."""
    if not isinstance(model, Model) or not model.adapter.writes:
        raise InputError("generate needs a causal or encoder-decoder model from eelib.load_model")


def resolved(
    model: Model,
    task: Task | list[str],
    gate: str | Gate | ExitRule | None,
    exit_layers: tuple[int, ...] | None,
    kv_policy: str | None,
    draft_length: int | None,
    max_new_tokens: int,
    policy: Policy | Path | str | None,
) -> tuple[ExitRule | None, KVPolicy, int]:
    """(rule, KV policy, most drafts in a row) for these arguments of `generate`. Rule None: no token exits.

    InputError where they do not fit each other or the model, and for a policy that can't be read, is for another model,
    has nothing for the task, or holds for shorter outputs only.
    """
    if policy is not None:
        if not all(given is None for given in (gate, exit_layers, kv_policy)):
            raise InputError("a policy has a gate, exit_layers and a kv_policy of its own; give it alone")
        policy = policy if isinstance(policy, Policy) else Policy.load(policy)
        kind = task.kind if isinstance(task, Task) else "prompts"
        gate = policy.rule(model, kind)
        kv_policy = "full" if gate is None else policy.kv_policy
        exact = gate is None or KV_POLICIES[kv_policy].verifies
        if not exact and max_new_tokens > (longest := policy.max_new_tokens[kind]):
            allowed = f"the policy holds for outputs of at most {longest} tokens"
            raise InputError(f"max_new_tokens {max_new_tokens} is not allowed; {allowed}")
    rule = rule_of(model, gate, exit_layers, kv_policy)
    if kv_policy is None:
        kv_policy = default_kv_policy(rule)
    if not isinstance(kv_policy, str) or kv_policy not in KV_POLICIES:
        raise InputError(f"kv_policy {kv_policy!r} is not known; allowed: {', '.join(KV_POLICIES)}")
    kv = KV_POLICIES[kv_policy]
    check_fit(model, kv, rule, max_new_tokens)
    if not kv.verifies:
        if draft_length is not None and (policy is None or rule is not None):
            raise InputError(
                f"draft_length={draft_length!r} is for kv_policy='verified'; kv_policy={kv.name!r} drafts nothing"
            )
        length = 0
    else:
        length = DRAFT_LENGTH if draft_length is None else draft_length
        check_draft_length(model, length)
    self_test(model, kv)
    return rule, kv, length


def default_kv_policy(rule: ExitRule | None) -> str:
    """The name of the KV policy that is chosen for a rule."""
    if rule is None or isinstance(rule.gate, FirstAgreeing):
        return "full"
    if isinstance(rule.threshold, Estimated):
        return "deferred"
    return "schedule" if isinstance(rule.gate, Schedule) else "verified"


def rule_of(
    model: Model, gate: str | Gate | ExitRule | None, exit_layers: tuple[int, ...] | None, kv_policy: str | None
) -> ExitRule | None:
    """The rule for these arguments of `generate`; None: no token exits. InputError where it does not fit the model."""
    check_exit_layers(exit_layers)
    if isinstance(gate, ExitRule):
        if exit_layers is not None:
            raise InputError("a rule has exit_layers of its own; give them with a gate's name, or in the rule")
        rule = gate
    elif gate is None:
        if exit_layers is None:
            return None
        if len(exit_layers) != 1:
            raise InputError(
                f"exit_layers {exit_layers!r} without a gate is not allowed; it must be one layer, or give a gate"
            )
        if kv_policy in (None, "verified"):
            raise InputError(
                f"exit_layers={exit_layers!r} without a gate needs a kv_policy: full, copy, project, deferred or "
                f"schedule; drafts of one layer, which the last layer verifies, are draft='layer:{exit_layers[0]}'"
            )
        rule = fixed_exit(exit_layers[0])
    elif gate == "oracle":
        rule = oracle_rule(exit_layers)
    elif isinstance(gate, (str, Gate)):
        found = gate if isinstance(gate, Gate) else gate_named(gate, model)
        rule = ExitRule(found, exit_layers=exit_layers)
    else:
        raise InputError(f"gate {gate!r} is not allowed; it must be a gate's name, a gate or a rule")
    rule.check(model.layers)
    return rule


def check_fit(model: Model, kv: KVPolicy, rule: ExitRule | None, max_new_tokens: int) -> None:
    """InputError where gate, KV policy and model do not fit each other."""
    if rule is None:
        if kv.stops:
            raise InputError(f"kv_policy={kv.name!r} needs a gate, or exit_layers=(layer,) at which every token exits")
        return
    if isinstance(rule.gate, TrainedGate) and (
        rule.gate.model != model.name or rule.gate.model_hash not in ("", model.hash)
    ):
        other = ", for other weights than these" if rule.gate.model == model.name else f", not for {model.name}"
        raise InputError(f"gate {rule.gate.name} was trained for {rule.gate.model}{other}")
    if isinstance(rule.threshold, Estimated) and kv.verifies:
        raise InputError(
            f"kv_policy={kv.name!r} asks the last layer about several tokens at once, from which a threshold that is "
            "learned while decoding can't learn; allowed: deferred, or a threshold that is a number"
        )
    if isinstance(rule.gate, FirstAgreeing) and (kv.defers or kv.name == "schedule"):
        raise InputError(
            f"the oracle runs all blocks, so kv_policy={kv.name!r} does not apply; allowed: full, copy, project"
        )
    if kv.name == "schedule":
        check_schedule(model, rule, max_new_tokens)


def check_schedule(model: Model, rule: ExitRule, max_new_tokens: int) -> None:
    """InputError where a rule's depths are not known beforehand, or a token would go deeper than the one before it."""
    if rule.gate.needs:
        raise InputError(
            f"kv_policy='schedule' needs depths that are known beforehand; gate {rule.gate.name} looks at each token; "
            "allowed: schedule, fixed"
        )
    positions = torch.arange(min(max_new_tokens, model.context_length))
    depths = torch.full_like(positions, model.layers)
    for layer in range(model.layers - 1, 0, -1):
        if rule.asks(layer, model.layers):
            score = rule.gate.score(LayerOutput(layer, model.layers, positions), {})
            depths[rule.exits(layer, score, positions)] = layer
    if deeper := (depths.diff() > 0).nonzero().flatten().tolist():
        raise InputError(f"kv_policy='schedule': token {deeper[0] + 1} would go deeper than the one before it")


def encoded(model: Model, task: Task | list[str]) -> list[list[int]]:
    """Token ids of the prompts. InputError where a prompt has no token, or does not fit the window."""
    prompts = encode(model, task if isinstance(task, Task) else Task.from_prompts(task))
    for number, ids in enumerate(prompts):
        if not 0 < len(ids) <= model.longest_prompt:
            raise InputError(
                f"prompt {number} has {len(ids)} tokens; allowed are 1 to {model.longest_prompt}, what {model.name}'s "
                "window holds"
            )
    return prompts


def batches(model: Model, prompts: list[list[int]], batch_size: int) -> list[list[int]]:
    """The prompts' numbers in batches, the shortest first; of one length where padding would change a row."""
    lengths = [len(prompt) for prompt in prompts]
    order, mixed = sorted(range(len(prompts)), key=lengths.__getitem__), model.longest_prompt if model.pads else 0
    return cut(lengths, order, batch_size, mixed)
