"""What a run tells of itself: metrics, the line on the console, times, memory, trackers, the learning curve."""

from __future__ import annotations

from megaflow.registry import Registry

TRACKERS = Registry("tracker")
TRACKERS.register("tensorboard", "megaflow.monitor.trackers:TensorBoard")
TRACKERS.register("wandb", "megaflow.monitor.trackers:WandB")
TRACKERS.register("trackio", "megaflow.monitor.trackers:Trackio")
TRACKERS.register("swanlab", "megaflow.monitor.trackers:SwanLab")
