"""A byte-level BPE of our own: splits off punctuation, and decodes every text to itself."""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
# Words, runs of up to three digits, runs of punctuation, white space: no piece ever mixes two of these.
PIECES = r" ?\p{L}[\p{L}\p{M}]*| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Parts of the paper's prompts that are one piece each, so that they cost little.
FIXED_PARTS = (
    "### Instruction:\n",
    "\n### Input:\n",
    "\n### Response:\n",
    "\n### Context:\n",
    "\n### Question:\n",
    "\n### Answer:\n",
    "I will provide a context and a question to you. You need to answer me the question based on the context.",
)


def train_tokenizer(texts: Iterable[str], vocabulary: int, window: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `vocabulary` entries in all, trained on `texts`; `window` is the model's, in tokens.

    All 256 bytes are in the initial alphabet, so nothing is unknown and decode(encode(x)) == x.
    The fixed parts of the paper's prompts are one entry each (`FIXED_PARTS`).
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    added = 2 + len(FIXED_PARTS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_special_tokens([AddedToken(PAD, special=True), AddedToken(END, special=True)])
    bpe.add_tokens([AddedToken(part, normalized=False) for part in FIXED_PARTS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        model_max_length=window,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
