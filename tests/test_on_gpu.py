"""On a GPU, traces and decoding give what they give on the CPU, in float32; skipped where there is no GPU."""

import numpy as np
import pytest
import torch
import traces

import eelib
from checks.tiny_texts import PROMPTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WAYS = [
    dict(exit_layers=(2,), kv_policy="project"),
    dict(exit_layers=(1, 2), gate="confidence", kv_policy="deferred"),
    dict(exit_layers=(1, 2), gate="confidence", kv_policy="verified", always_draft=True),
    dict(draft="layer:1", draft_length=3),
    dict(draft="auto"),
]


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "bert"])
def test_a_trace_is_that_of_the_cpu(name, folder_of, model_of, tmp_path):
    own = eelib.load_model(str(folder_of(name)), device="cuda", dtype="float32")
    gpu, cpu = traces.make(own, tmp_path / "gpu"), traces.make(model_of(name), tmp_path / "cpu")
    assert gpu.tokens["token_id"].tolist() == cpu.tokens["token_id"].tolist()
    for readout in ("probability", "margin", "entropy"):
        np.testing.assert_allclose(gpu[readout], cpu[readout], atol=1e-3)
    assert (gpu["top1"] == cpu["top1"]).mean() > 0.98  # random weights have ties


@pytest.mark.parametrize("given", WAYS, ids=lambda given: " ".join(map(str, given.values())))
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_decoding_is_that_of_the_cpu(name, given, folder_of, model_of):
    own = eelib.load_model(str(folder_of(name)), device="cuda", dtype="float32")
    gpu, cpu = (
        eelib.generate(model, PROMPTS, max_new_tokens=8, batch_size=3, **given) for model in (own, model_of(name))
    )
    assert gpu.tokens["token_id"].tolist() == cpu.tokens["token_id"].tolist()
    if "draft" not in given:
        assert gpu.tokens["exit_layer"].tolist() == cpu.tokens["exit_layer"].tolist()


def test_bfloat16_is_what_a_gpu_gets(folder_of):
    model = eelib.load_model(str(folder_of("llama")))
    assert (model.device.type, model.dtype) == ("cuda", "bfloat16")
    assert len(eelib.generate(model, PROMPTS, max_new_tokens=4).sequences) == len(PROMPTS)
