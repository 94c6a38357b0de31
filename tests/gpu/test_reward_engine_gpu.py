"""A reward model in an SGLang engine on a GPU: transformers' scores, and the memory that it gives back while it sleeps.

Tolerance: SGLang's Triton attention multiplies fp32 as TF32, with 10 bits of mantissa.
"""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = 5e-3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_scores_and_sleep(tmp_path, family):
    from transformers import AutoModelForSequenceClassification

    folder = tiny.reward_model_folder(tmp_path / "scorer", family)
    found = run_ranks("reward_engine", 1, folder, folder, timeout=300)[0]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.config.pad_token_id = None  # every token counts
    with torch.no_grad():
        made = {(s.group, s.index): s for s in tiny.samples(24, model.config.vocab_size)}
        expected = {at: model(torch.tensor([s.prompt.tokens + s.response.tolist()])).logits.item() for at, s in made.items()}
    scores = {tuple(place): score for place, score in zip(found["places"], found["scores"], strict=True)}
    assert scores == pytest.approx(expected, abs=TOLERANCE)
    memory, device = found["memory"], torch.cuda.get_device_properties(0).total_memory / 1e6
    assert memory["awake"] - memory["asleep"] > 0.2 * device, "reward.model.mem_fraction is 0.25"
    assert abs(memory["asleep"] - memory["start"]) < 500
    assert found["after_death"] == pytest.approx(found["scores"], abs=TOLERANCE), "another engine, after it was killed"
