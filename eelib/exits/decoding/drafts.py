"""Decide which tokens are drafted, and how many: as many as save time, by the cost of passes and earlier drafts.

A round of a batch drafts some tokens of each sequence; one pass then verifies them all. A draft that is right with the
probability p saves p times the seconds of a token; it costs the time to make it, and one more row in the verifying
pass. N-grams of the text cost nothing to look up: the tokens that followed an earlier occurrence of the last tokens are
guessed to follow again (prompt lookup, Saxena 2023). A model's draft is made only where the text gives none.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import mul

from torch import Tensor

from eelib.exits.decoding.pass_costs import PassCosts
from eelib.exits.decoding.sequences import Batch, DecodedSequence, DecodedToken
from eelib.models.block_runner import BlockRunner
from eelib.models.lens_adapters import DraftBlock

MOST = 15  # drafts of one sequence in a round
LONGEST = 8  # tokens of an n-gram; longer matches count as this long
FROM_TEXT = 0  # the exit layer of a draft that no layer has made
# How often a guess is right after a match of 1 to 8 tokens, before there are any: as in SmolLM2-135M's outputs, about.
MATCHED = (0.25, 0.55, 0.65, 0.8, 0.85, 0.85, 0.85, 0.95)
WEIGHT = 8.0  # drafts for which what is expected beforehand counts
TRAINED_WEIGHT = 40.0  # the same, of all drafts of a trained block: how often they are right was measured in training
FORGET = 0.98  # of what earlier drafts of the same kind have shown, at each new one
FADE = 0.9  # of what earlier rounds have shown of the seconds that a token takes
FIRST = 0.5  # how often a model's draft is right, where nothing is known beforehand
SURE = {"text": 0.6, "model": 0.85}  # of what drafts are expected to save counts: the best of many guesses is chosen
ENOUGH = 100  # tokens of outputs after which it is judged whether drafts have saved time
Kind = tuple[str, int]


class Ngrams:
    """Finds the latest earlier occurrence of a text's last tokens, and the tokens that followed it."""

    def __init__(self, text: Sequence[int]):
        self.text: list[int] = []
        self.follows: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST)]  # n-gram: where the next token is
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text = self.text
        for token in tokens:
            for size in range(1, min(LONGEST, len(text)) + 1):
                self.follows[size - 1][tuple(text[-size:])] = len(text)
            text.append(token)

    def guess(self, most: int) -> tuple[int, list[int]]:
        """(length of the longest match, the `most` tokens after its latest occurrence); (0, []) without a match."""
        for size in range(min(LONGEST, len(self.text) - 1), 0, -1):
            at = self.follows[size - 1].get(tuple(self.text[-size:]))
            if at is not None:
                guessed = self.text[at : at + most]
                while len(guessed) < most:  # the match reaches up to the end: what repeats goes on repeating
                    guessed.append(guessed[len(guessed) - (len(self.text) - at)])
                return size, guessed
        return 0, []


class Rates:
    """The shares of drafts of each kind that were right so far."""

    def __init__(self) -> None:
        self.right: dict[Kind, float] = defaultdict(float)
        self.tried: dict[Kind, float] = defaultdict(float)

    def of(self, kind: Kind, expected: float, weight: float = WEIGHT) -> float:
        """The share of right drafts of a kind; the share `expected` beforehand counts as `weight` drafts."""
        return (self.right[kind] + weight * expected) / (self.tried[kind] + weight)

    def add(self, kind: Kind, right: bool) -> None:
        """Count one more draft; all drafts before it in the round were right."""
        self.tried[kind] = FORGET * self.tried[kind] + 1
        self.right[kind] = FORGET * self.right[kind] + right


class ModelDrafts:
    """Makes drafts with a part of the model.

    Attributes:
        layer: the layer whose readout a draft is.
        expected: the expected shares of first, second ... drafts in a row that are right; empty: not known.
        block: the trained block after `layer` that runs in each pass, the verifying ones, too; None without one.
    """

    layer: int
    expected: tuple[float, ...] = ()
    block: DraftBlock | None = None

    def seconds(self, costs: PassCosts, rows: int) -> float:
        """Seconds of one draft for each of `rows` sequences."""
        raise NotImplementedError

    def chance(self, score: float) -> float:
        """The expected share of right drafts among those to which the model gave the probability `score`."""
        return min(max(score, 0.0), 1.0)

    @contextmanager
    def open(self, prompts: list[list[int]], blocks: BlockRunner) -> Iterator[None]:
        """Drafts are made while this is open, for one batch; `blocks` runs the model's blocks."""
        yield

    def observe(self, running: dict[DecodedSequence, int], states: Tensor) -> None:
        """Take the last layer's states [rows, new, hidden_size] of a pass; `running`: its sequences' tokens."""

    def next(self, batch: Batch, group: list[DecodedSequence], eos_ids: set[int]) -> None:
        """Draft one more token of each sequence of a group.

        Keys and values go into the batch's cache: into one more layer, or into the model's own, where the pass that
        verifies drafts writes the true ones.
        """
        raise NotImplementedError

    def emit(self, group: list[DecodedSequence], ids: Tensor, chance: Tensor, eos_ids: set[int]) -> None:
        """Put a draft at the end of each sequence; `chance` [n]: the probability that the model gives to `ids` [n]."""
        for sequence, token, score in zip(group, ids.tolist(), chance.tolist()):
            draft = DecodedToken(token, self.layer, 0, 1, score, drafted=True)
            sequence.emit(draft, eos_ids, verified=False)


class Drafting:
    """The drafts of all batches of one call of `generate`.

    Args:
        costs: of passes, on this machine.
        from_text: whether the text's n-grams are looked up.
        drafts: makes drafts where the text gives none; None: nothing does.
        length: the number of tokens to draft in a round; None: as many as save time.
    """

    def __init__(self, costs: PassCosts, from_text: bool, drafts: ModelDrafts | None, length: int | None):
        self.costs, self.from_text, self.drafts, self.length = costs, from_text, drafts, length
        self.rates = Rates()
        self.share = 1.0  # seconds of a token, as a share of plain decoding's
        self.ended = ""  # why nothing, or nothing but the text's n-grams, is drafted any more
        self.tokens = 0  # of all outputs
        self.seconds = self.plain_seconds = 0.0  # by the costs: of all rounds, and of the same batches without drafts
        self.before = 0.0  # seconds, up to the last batch that ended
        self.spent, self.written, self.rows = 0.0, 0, 0  # of this round
        self.texts: dict[DecodedSequence, tuple[Ngrams, int]] = {}  # and how much of the sequence is in it
        self.kinds: dict[DecodedSequence, list[Kind]] = {}  # of this round's drafts
        self.chances: dict[DecodedSequence, float] = {}  # that all of the model's drafts in this round are right

    def begin(self, sequences: list[DecodedSequence], prompts: list[list[int]]) -> None:
        """Begin a batch. N-grams are looked up in prompts, too, also in those of an encoder-decoder.

        If not even a first draft saves time, the model's drafts end before a trained block reads the prompts.
        """
        self.seconds, self.written = self.before, 0  # without the rounds of a batch that did not fit into memory
        self.start(sequences)
        if self.drafts and not self.length and not self.pays(sequences):
            self.end_model(self.drafts)
        self.kinds = {}
        if self.from_text:
            self.texts = {
                s: (Ngrams([] if s.ids[: len(prompt)] == prompt else prompt), 0)
                for s, prompt in zip(sequences, prompts)
            }

    def start(self, sequences: list[DecodedSequence]) -> None:
        """Begin a round."""
        self.settle()
        self.rows, self.width, self.made = len(sequences), 0, 0
        self.written, self.spent = 0, self.verifying(0)
        self.chances, self.kinds = dict.fromkeys(sequences, 1.0), {s: [] for s in sequences}
        self.guessed: set[DecodedSequence] = set()

    def settle(self) -> None:
        """Add the seconds and the tokens of the last round to the sums."""
        if self.written:
            plain = self.written * self.costs.whole(self.rows) / self.rows
            self.share = min(FADE * self.share + (1 - FADE) * self.spent / plain, 1.0)
            self.seconds, self.written = self.seconds + self.spent, 0

    def finish(self, lengths: list[int]) -> None:
        """End a batch with outputs of these lengths. Drafting ends, too, if it took longer than plain decoding."""
        self.settle()
        steps = range(1, max(lengths))  # the first token comes with the prompt
        self.plain_seconds += sum(self.costs.whole(sum(length > step for length in lengths)) for step in steps)
        self.tokens += sum(lengths)
        drafting, slower = self.from_text or self.drafts, self.seconds > self.plain_seconds
        if drafting and slower and not self.length and self.tokens > ENOUGH:
            self.from_text = False
            self.end(f"with drafts, outputs took {self.seconds / self.plain_seconds:.2f} times as long as without")
        self.before = self.seconds

    def end(self, why: str) -> None:
        """End the model's drafts, and print why."""
        what = "only the text's n-grams are drafted from here" if self.from_text and self.drafts else "it ends here"
        self.ended, self.drafts = f"{why}: drafting costs more than it saves, so {what}", None
        print(self.ended)

    def end_model(self, drafts: ModelDrafts) -> None:
        """End the model's drafts, and print the cost of a draft and its chance to be right."""
        share = drafts.seconds(self.costs, self.rows) / self.costs.whole(self.rows)
        self.end(
            f"a draft of layer {drafts.layer} costs {share:.2f} of a pass and is right with a chance of "
            f"{self.right():.0%}"
        )

    def value(self, source: str) -> float:
        """Seconds that a right draft saves, times SURE. Less in a batch, which lasts as long as its longest output."""
        return SURE[source] * self.share * self.costs.whole(self.rows) / self.rows**1.5

    def verifying(self, width: int) -> float:
        """Seconds of a pass that verifies `width` drafts of each sequence."""
        return self.costs.verifying(self.rows * (1 + width), bool(self.drafts and self.drafts.block))

    def widen(self, width: int) -> None:
        """Add to `spent` the seconds of verifying `width` drafts of each sequence instead of fewer."""
        if width > self.width:
            self.spent += self.verifying(width) - self.verifying(self.width)
            self.width = width

    def guess(self, sequences: list[DecodedSequence], eos_ids: set[int]) -> None:
        """Draft the tokens that the text's n-grams give; as many of each sequence as save most time in all."""
        if not self.from_text or not (self.length or self.guesses_may_pay()):
            return
        found: dict[DecodedSequence, tuple[list[int], list[Kind], list[float]]] = {}
        for sequence in sequences:
            text, known = self.texts[sequence]
            text.extend(sequence.ids[known:])
            self.texts[sequence] = text, len(sequence.ids)
            matched, guessed = text.guess(min(self.length or MOST, sequence.room))
            if guessed:
                sizes = [min(matched + number, LONGEST) for number in range(len(guessed))]
                kinds = [("text", size) for size in sizes]
                rates = [self.rates.of(kind, MATCHED[size - 1]) for kind, size in zip(kinds, sizes)]
                found[sequence] = guessed, kinds, list(accumulate(rates, mul))
        width = self.length or 0
        if not self.length and found:
            saved = [0.0]
            for number in range(max(len(chances) for _, _, chances in found.values())):
                at = sum(chances[number] for _, _, chances in found.values() if number < len(chances))
                saved.append(saved[-1] + at * self.value("text"))
            width = max(range(len(saved)), key=lambda w: saved[w] - self.verifying(w))
        for sequence, (guessed, kinds, chances) in found.items():
            for token, kind, chance in zip(guessed[:width], kinds, chances):
                if not sequence.draining:
                    self.kinds[sequence].append(kind)
                    draft = DecodedToken(token, FROM_TEXT, 0, 0, chance, drafted=True)
                    sequence.emit(draft, eos_ids, verified=False)
                    self.guessed.add(sequence)
            self.widen(sequence.drafts)

    def guesses_may_pay(self) -> bool:
        """Whether guesses would save time at this number of rows if all were right; in large batches none does."""
        saved = self.rows * self.value("text")
        return any(saved * width > self.verifying(width) - self.verifying(0) for width in range(1, MOST + 1))

    def wanted(self, sequences: list[DecodedSequence]) -> list[DecodedSequence]:
        """The sequences for which the model makes one more draft: those without guesses, if that saves time."""
        if self.drafts is None:
            return []
        some = [s for s in sequences if s.room and not s.draining and s not in self.guessed and s.drafts == self.made]
        if self.length:
            some = some if self.made < self.length else []
        elif some and not self.pays(some):
            if not self.made and len(some) == len(sequences):  # else the pass is paid for rows that draft nothing
                self.end_model(self.drafts)
            some = []
        if some:
            self.made += 1
            self.spent += self.drafts.seconds(self.costs, len(some))
            self.widen(self.made)
        return some

    def right(self) -> float:
        """The share of the model's drafts that are right."""
        known = self.drafts.expected if self.drafts else ()
        return self.rates.of(("model", -1), *((known[0], TRAINED_WEIGHT) if known else (FIRST,)))

    def pays(self, some: list[DecodedSequence]) -> bool:
        """Whether one more draft of each sequence saves more time than it takes to make and to verify it."""
        assert self.drafts
        saved = self.value("model") * self.right() * sum(self.chances[s] for s in some)
        more = max(self.made + 1, self.width)
        more_verified = self.verifying(more) - self.verifying(self.width)
        if not self.made:  # without any, a trained block need not run
            more_verified += self.verifying(0) - self.costs.whole(self.rows)
        return self.made < MOST and saved > self.drafts.seconds(self.costs, len(some)) + more_verified

    def drafted(self, sequences: list[DecodedSequence]) -> None:
        """Count the model's new draft of each sequence; a draft's score is the probability that the model gave it."""
        assert self.drafts
        for sequence in sequences:
            score = max(0.0, sequence.tokens[-1].score)  # 0 where it is no number: float16 may overflow
            kind = ("model", int(4.999 * score))
            self.kinds[sequence].append(kind)
            self.chances[sequence] *= self.rates.of(kind, self.drafts.chance(score))

    def learn(self, sequence: DecodedSequence, drafts: list[DecodedToken], written: int) -> None:
        """Count which verified drafts of a sequence were right; `written`: tokens that the pass has given."""
        for draft, kind in zip(drafts, self.kinds.get(sequence, [])):
            self.rates.add(kind, draft.accepted)
            if kind[0] == "model":
                self.rates.add(("model", -1), draft.accepted)
            if not draft.accepted:
                break
        if sequence in self.kinds:  # else a prompt was read
            self.written += written
