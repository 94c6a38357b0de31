"""curve.png is a picture of what metrics.jsonl says."""

from __future__ import annotations

from pathlib import Path

from megaflow.monitor.metrics import Metrics
from megaflow.monitor.plot import _smooth, draw_curve


def test_picture_is_drawn(tmp_path: Path) -> None:
    import matplotlib.image

    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(0, {"eval/addition/accuracy": 0.3})
    for step in range(1, 12):
        metrics.write(step, {"reward/mean": step / 20, "train/grad_norm": float("nan") if step == 4 else 1.0, "rollout/len_mean": 5.0})
    assert draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "test")
    picture = matplotlib.image.imread(tmp_path / "curve.png")  # [height, width, 4]
    assert picture.shape[1] > 1000 and 0.5 < picture[..., :3].mean() < 0.999  # mostly white, not all


def test_nothing_to_draw(tmp_path: Path) -> None:
    Metrics(tmp_path / "metrics.jsonl")
    assert not draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "test")
    assert not (tmp_path / "curve.png").exists()


def test_smoothing_is_a_trailing_mean() -> None:
    assert _smooth([1, 2, 3, 4, 5, 11]) == [1, 1.5, 2, 2.5, 3, 5]
