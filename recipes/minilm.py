"""Recipes of MiniLM's classifiers: all-MiniLM-L6-v2, a real encoder, fine-tuned on four tasks of GLUE by LoRA.

Each task has two versions: with the loss of the last layer alone, and with the losses of all layers (joint
optimization). Rates and steps are the same kind for all and were not tuned on GLUE's validation sets. What is shipped
are the low-rank updates, the pooler and the classifier.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoTokenizer

from eelib.models.folder import weights_hash
from eelib.models.model import Model, prepare
from eelib.models.packaged import packaged_folder
from recipes.losses import uniform_weights
from recipes.pocket_bert import GlueTraining, last_alone, new_classifier
from recipes.texts import SEED
from recipes.training import Optimizer, Schedule, products, save_adapters

START = "all-minilm-l6-v2"
KIND = "BertForSequenceClassification, 6 layers of width 384: LoRA adapters of rank {}, pooler and classifier, bfloat16"
OWN = ("pooler", "classifier")  # modules that are trained whole
WINDOW = 256  # tokens; the few longer texts are left out
# BERT-base-cased on GLUE's validation sets, as the text-classification example of transformers reports it.
BERT_BASE = {"sst2": {"accuracy": 92.3}, "mrpc": {"F1": 88.9}, "rte": {"accuracy": 65.7}, "cola": {"Matthews": 56.5}}


@dataclass(frozen=True)
class MiniLM(GlueTraining):
    """MiniLM fine-tuned on one task by updates of a rank."""

    rank: int = 16
    start: str = START

    def run(self, corpora: Path, out: Path, work: Path, device: str) -> dict:
        """Train, continuing from `work`, and write the adapters with their card to `out`; returns the card."""
        base = packaged_folder(self.start)
        model = begin(base, self.task, device)
        tuned = with_adapters(model, self.rank)
        self.fit(model, tuned, corpora, work, products(model.device), Optimizer(tuned, muon=False))
        save_adapters(tuned, out, self.start, {"model_hash": weights_hash(base)}, OWN)
        model.network.config.save_pretrained(out)
        return self.card(corpora, out, work, device, KIND.format(self.rank), f"GLUE {self.task} train")

    def measure(self, corpora: Path, folder: Path, device: str) -> dict[str, dict]:
        """The task's scores on GLUE's validation set, beside those published for BERT-base."""
        published = {f"GLUE {self.task} validation, BERT-base-cased as published": BERT_BASE[self.task]}
        return super().measure(corpora, folder, device) | published


def begin(base: Path, task: str, device: str) -> Model:
    """The encoder in a folder with its pooler and a new classifier, the same in every call, in float32."""
    encoder = AutoModel.from_pretrained(base)
    network = new_classifier(encoder.config, task)
    network.bert.load_state_dict(encoder.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(base, model_max_length=WINDOW)
    return prepare(network.to(device).eval(), tokenizer, task, "classifier")


def with_adapters(model: Model, rank: int) -> PeftModel:
    """The network with low-rank updates in its blocks; these, pooler and classifier alone are trained."""
    torch.manual_seed(SEED)
    inside = r".*encoder\.layer.*\.(query|key|value|dense)"
    tuned = get_peft_model(model.network, LoraConfig(r=rank, lora_alpha=rank, target_modules=inside))
    for name, weight in tuned.named_parameters():
        if any(f".{own}." in name for own in OWN):
            weight.requires_grad_(True)
    return tuned


def both(task: str, schedule: Schedule) -> tuple[MiniLM, MiniLM]:
    """(plain, joint) recipes of a task: they differ in the weights only."""
    joint = "uniform weights on the losses of all 6 layers through the shared pooler and classifier (P, section 3.3)"
    return (
        MiniLM(f"minilm-{task}", task, "the loss of layer 6 alone", last_alone, schedule),
        MiniLM(f"minilm-{task}-joint", task, joint, uniform_weights, schedule),
    )


# An epoch has about 610 batches of SST-2, 130 of MRPC, 65 of CoLA, 120 of RTE.
SST2, SST2_JOINT = both("sst2", Schedule(steps=400, peak=1e-3, warmup=40, decay=300))
MRPC, MRPC_JOINT = both("mrpc", Schedule(steps=390, peak=1e-3, warmup=40, decay=300))
COLA, COLA_JOINT = both("cola", Schedule(steps=320, peak=1e-3, warmup=40, decay=240))
RTE, RTE_JOINT = both("rte", Schedule(steps=360, peak=1e-3, warmup=40, decay=280))
