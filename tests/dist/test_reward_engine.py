"""A reward model in an SGLang engine gives transformers' scores, sleeps between them, and is replaced when it dies."""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny.reward_model_folder(tmp_path_factory.mktemp("model") / "scorer", "qwen2")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("reward_engine", 1, folder, folder, timeout=180)


def test_scores_are_transformers_sequence_classification(ranks, folder):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.config.pad_token_id = None  # or transformers would look for the last token that is not padding: here every token counts
    with torch.no_grad():
        made = {(s.group, s.index): s for s in tiny.samples(24, model.config.vocab_size)}
        expected = {at: model(torch.tensor([s.prompt.tokens + s.response.tolist()])).logits.item() for at, s in made.items()}
    found = {tuple(place): score for rank in ranks for place, score in zip(rank["places"], rank["scores"], strict=True)}
    assert found == pytest.approx(expected, abs=1e-4)
    assert max(expected.values()) - min(expected.values()) > 1e-2, "the scores differ"
    for rank in ranks:
        assert rank["rewards"] == pytest.approx([0.5 * score for score in rank["scores"]])
        assert rank["again"] == pytest.approx(rank["scores"], abs=1e-5), "scored once more after a sleep"


def test_it_sleeps_from_its_start_on_and_but_while_it_scores(ranks):
    memory = ranks[0]["memory"]
    assert memory["awake"] > memory["start"] + 50 and memory["awake"] > memory["asleep"] + 50, memory


def test_one_that_dies_while_it_is_awake_is_replaced_and_nothing_is_left_in_the_end(ranks):
    for rank in ranks:
        assert rank["restarts"]["rollout/engine_restarts"] == 1
        assert rank["after_death"] == pytest.approx(rank["scores"], abs=1e-5)
    assert ranks[0]["gone"] == [True] * 2 * len(ranks), "every process of both engines"
