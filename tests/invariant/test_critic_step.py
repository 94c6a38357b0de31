"""A critic's values, gradients and steps under TP with sequence parallelism, PP and DP equal plain PyTorch with transformers' model and a
linear head, in float64 (tolerances as in test_one_step.py); a reward model's scores equal transformers' sequence classification."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.programs.critic_step import with_targets
from tests.ranks import free_port, run_ranks

LAYOUTS = {"2x1+sp": "qwen3", "1x2": "llama", "1x1": "qwen2"}  # on two ranks, so the last one is DP=2; the scorer's family
CLIP = 0.1


class PlainPyTorch:
    """One sequence at a time; the loss is written from its definition."""

    def __init__(self, folder: str):
        from transformers import AutoModelForSequenceClassification

        whole = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        self.body, self.head = whole.model, whole.score
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.named = dict(whole.named_parameters()) | {"score.bias": self.bias}
        self.samples = tiny.samples(24, whole.config.vocab_size)
        with torch.no_grad():
            self.values = [self.value(s) for s in self.samples]
        with_targets(self.samples, [v[:-1] for v in self.values])
        optimizer = torch.optim.AdamW(self.named.values(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        self.losses, self.norms, self.clipped = [], [], []
        for step in range(2):
            optimizer.zero_grad()
            loss, clipped = self.loss(self.samples[step * 12 : (step + 1) * 12])
            loss.backward()
            self.losses.append(loss.item())
            self.clipped.append(clipped)
            self.norms.append(sum(p.grad.square().sum() for p in self.named.values()).sqrt().item())
            if step == 0:
                self.gradients = {n: p.grad.clone() for n, p in self.named.items()}
            optimizer.step()

    def value(self, s):
        hidden = self.body(torch.tensor([s.prompt.tokens + s.response.tolist()])).last_hidden_state[0, len(s.prompt.tokens) - 1 :]
        return self.head(hidden)[:, 0] + self.bias

    def loss(self, samples):
        """Half the mean over tokens of max((v - R)^2, (old + clip(v - old, -c, c) - R)^2)."""
        terms, clipped = [], []
        for s in samples:
            v = self.value(s)[:-1]
            near = torch.minimum(torch.maximum(v, s.values - CLIP), s.values + CLIP)
            plain, bounded = (v - s.returns) ** 2, (near - s.returns) ** 2
            terms.append(torch.where(bounded > plain, bounded, plain))
            clipped.append((bounded > plain).double())
        return torch.cat(terms).mean() / 2, float(torch.cat(clipped).mean())


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    base = tmp_path_factory.mktemp("critic")
    folders = {layout: tiny.reward_model_folder(base / family, family) for layout, family in LAYOUTS.items()}
    layouts = [f"{layout}:{free_port()}:{folder}" for layout, folder in folders.items()]
    return PlainPyTorch(folders["1x1"]), run_ranks("critic_step", 2, folders["1x1"], str(base), *layouts), base


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_critic_under_any_layout_is_plain_pytorch(steps, layout):
    plain, ranks, base = steps
    values = {k: v for rank in ranks for k, v in rank[layout]["values"].items()}
    for s, expected in zip(plain.samples, plain.values, strict=True):
        torch.testing.assert_close(torch.tensor(values[f"{s.group}.{s.index}"], dtype=torch.float64), expected, rtol=1e-5, atol=1e-5)
    assert ranks[0][layout]["first"] == ranks[1][layout]["first"], "every rank has the same metrics"
    for number, (name, tolerance) in enumerate((("first", 1e-5), ("second", 5e-4))):
        found = ranks[0][layout][name]
        assert found["critic/loss"] == pytest.approx(plain.losses[number], rel=tolerance)
        assert found["critic/grad_norm"] == pytest.approx(plain.norms[number], rel=tolerance)
    assert ranks[0][layout]["first"]["critic/clip_frac"] == pytest.approx(plain.clipped[0], abs=1e-6) and 0 < plain.clipped[0] < 1
    tensors = load_file(base / f"{layout}.safetensors")
    for name, gradient in plain.gradients.items() if layout != "1x1" else ():  # DP leaves each rank the sums of a part; its weights tell
        off = float((tensors[f"gradient.{name}"].double() - gradient).abs().max() / gradient.abs().max())
        assert off < 1e-4, (name, off)
    # Adam's first steps move by lr * sign(gradient): an entry whose gradient is all but 0 may go either way, so the mean counts here
    assert max(float((tensors[f"weight.{n}"].double() - p.detach()).abs().mean()) for n, p in plain.named.items()) < 2e-5


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_a_critic_saved_beside_the_policy_goes_on_under_another_layout(steps, layout):
    """Saved under the first one. With a fresh Adam, or the policy's, the second of the two steps would begin at other values."""
    _, ranks, _ = steps
    for number, tolerance in enumerate((1e-5, 5e-4)):
        expected, found = (ranks[0][name]["saved"][number] for name in (next(iter(LAYOUTS)), layout))
        assert found["critic/lr"] == expected["critic/lr"] == 1e-3
        assert found["critic/loss"] == pytest.approx(expected["critic/loss"], rel=tolerance)
        assert found["critic/grad_norm"] == pytest.approx(expected["critic/grad_norm"], rel=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reward_model_on_the_mesh_is_transformers_sequence_classification(steps, layout):
    from transformers import AutoModelForSequenceClassification

    _, ranks, base = steps
    model = AutoModelForSequenceClassification.from_pretrained(base / LAYOUTS[layout], dtype=torch.float64, attn_implementation="eager")
    model.config.pad_token_id = None  # or transformers would look for the last token that is not padding: here every token counts
    with torch.no_grad():
        made = tiny.samples(24, model.config.vocab_size)
        expected = [model(torch.tensor([s.prompt.tokens + s.response.tolist()])).logits.item() for s in made]
    assert ranks[0][layout]["scores"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert max(expected) - min(expected) > 1e-2, "the scores differ"
