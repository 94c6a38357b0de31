"""One contract for all backends (rollout/base.py), and invariant 3: after a sync the engine's numbers are transformers'.

Tolerance of log-probabilities: 2e-5 absolute in fp32 (measured: 7e-6 at most).
"""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.ranks import run_ranks

BACKENDS = ["sglang", "hf"]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", True)


@pytest.fixture(scope="module")
def found(backend, model):
    return run_ranks("rollout_contract", 1, model, backend, timeout=280)[0]


@pytest.fixture(scope="module")
def reference(found, model):
    """transformers' model with the weights that the trainer held."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    state = {name: torch.tensor(values) for name, values in found["weights"].items()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return reference


def logp_of(reference, prompt, response, temperature=1.0):
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_every_sample_comes_once_in_order(found):
    assert [(s["group"], s["index"]) for s in found["samples"]] == [(g, i) for g in range(8) for i in range(4)]
    assert all(s["version"] == 0 and 1 <= len(s["response"]) == len(s["logp"]) <= 12 for s in found["samples"])


def test_logprobs_are_those_of_transformers(found, reference):
    for s in found["samples"]:
        torch.testing.assert_close(torch.tensor(s["logp"]), logp_of(reference, s["prompt"], s["response"]), rtol=0, atol=2e-5)


def test_logprobs_are_of_the_tempered_distribution(found, reference):
    for s, logp, tokens in zip(found["samples"][::4], found["cold"], found["cold tokens"], strict=True):
        torch.testing.assert_close(torch.tensor(logp), logp_of(reference, s["prompt"], tokens, 0.5), rtol=0, atol=5e-5)


def test_greedy_tokens_are_those_of_transformers(found, reference):
    for s, greedy in zip(found["samples"][::4], found["greedy"], strict=True):
        expected = reference.generate(torch.tensor([s["prompt"]]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert greedy == expected[0, len(s["prompt"]) :].tolist()
    assert found["top_k 1 is greedy"]


def test_seeds(found):
    assert found["again"] and found["alone"], "the same seed gives the same tokens, whatever else is generated"
    assert found["other step differs"] and found["other seed differs"]
    assert len({tuple(s["response"]) for s in found["samples"][:4]}) > 1, "samples of one prompt differ"


def test_samples_are_drawn_from_the_models_distribution(found, reference):
    """The mean log-probability of sampled tokens is minus the mean entropy, within four standard errors."""
    logp, entropy = [], []
    for s in found["samples"]:
        with torch.no_grad():
            p = reference(torch.tensor([s["prompt"] + s["response"]])).logits[0, len(s["prompt"]) - 1 : -1].log_softmax(-1)
        logp.append(p.gather(1, torch.tensor(s["response"])[:, None])[:, 0])
        entropy.append(-(p.exp() * p).sum(-1))
    difference = torch.cat(logp) + torch.cat(entropy)
    assert abs(difference.mean()) < 4 * difference.std() / len(difference) ** 0.5


def test_responses_end_with_an_end_token_or_at_the_limit(found, model):
    from megaflow.data import load_tokenizer

    eos = load_tokenizer(model).eos_token_id
    for finish, last, length in found["ends"]:
        assert (finish == "stop" and last == eos) or (finish == "length" and length == 200)


def test_stop_strings_end_a_response_where_they_first_appear(found, model):
    from megaflow.data import load_tokenizer
    from tests.programs.rollout_contract import STOP

    tokenizer = load_tokenizer(model)
    by_text = [tokens for _, finish, tokens in found["stopped"] if finish == "stop" and tokens[-1] != tokenizer.eos_token_id]
    assert by_text, "random text of 100 tokens has one of the letters"
    for tokens in by_text:  # the names of special tokens are text too
        assert any(s in tokenizer.decode(tokens) for s in STOP)
        assert not any(s in tokenizer.decode(tokens[:-1]) for s in STOP)


def test_no_request_is_served_with_other_weights_than_the_trainers(found):
    assert found["stale before"].startswith("StaleWeights")
    assert "version 0, the trainer is at 7" in found["stale"]
    assert found["asleep"].startswith("StaleWeights")
    assert found["two-step wake"] == ""
    assert found["woken without weights"].startswith("StaleWeights"), "level 2 has dropped them"


def test_sleep_and_wake(found, backend):
    assert found["after sleep"] and found["level 1 keeps weights"]
    if backend == "sglang":
        assert found["freed_mb"] > 150, "131,072 tokens x 4 layers x 2 heads x 32 x 2 (k, v) x 4 bytes are 268 MB of KV cache alone"


def test_the_proof_catches_one_changed_value_and_names_it(found):
    assert found["sync"]["sync/proof"] == 1.0
    assert found["flipped"].startswith("ProofError") and "from rank 0, pipeline stage 0" in found["flipped"]
    assert "model.layers." in found["flipped"]
    assert found["after a failed proof"].startswith("StaleWeights"), "nothing is published"
    assert found["mended"]


def test_stacks_of_the_engines_processes_can_be_asked_for(found, backend):
    if backend == "sglang":
        host, *others = found["stacks"]  # its scheduler, and a detokenizer for stop strings
        assert "engine_host.py" in host and any(" in run_scheduler_process" in stack for stack in others), others


def test_an_engine_that_hangs_is_replaced_and_only_what_it_had_not_finished_is_generated_again(found, backend):
    if backend != "sglang":
        pytest.skip("hf runs in the trainer's own process")
    seconds, why = found["hang"]
    assert "of 16 took more than 2 s (rollout.timeout_s)" in why and 2 < seconds < 20
    assert found["gone"], "no process and no file of it is left"
    assert found["unsynced"].startswith("StaleWeights"), "another engine has no weights to serve from before a sync"
    assert found["replaced"], "the same samples as without the hang"
    first, second = found["asked"]
    assert first == 16 and 0 < second < 16
    assert found["stats"]["rollout/engine_restarts"] == 1 and found["stats"]["rollout/restart_s"] > 1


def test_an_engine_that_dies_too_often_is_named_at_once(found, backend):
    if backend != "sglang":
        pytest.skip("hf runs in the trainer's own process")
    message, seconds = found["death"]
    assert message.startswith("LostError: engine 0 (ranks 0-0): its process") and "exit code -9" in message and seconds < 15
    assert "started anew 1 times within an hour (rollout.max_restarts)" in message


def test_the_backend_of_the_documentation(found, backend, reference):
    """docs/examples/generate_backend.py, in the same process, after the same sync."""
    if backend != "hf":
        pytest.skip("made beside hf")
    example = found["example"]
    assert example["stale"].startswith("StaleWeights") and example["asleep"].startswith("StaleWeights")
    assert example["again"] and example["proof"] == 1.0 and len(example["samples"]) == 4
    for prompt, response, logp, version in example["samples"]:
        torch.testing.assert_close(torch.tensor(logp), logp_of(reference, prompt, response), rtol=0, atol=2e-5)
        assert version == 4
    greedy = reference.generate(torch.tensor([example["samples"][0][0]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert example["greedy"] == greedy[0, len(example["samples"][0][0]) :].tolist()
