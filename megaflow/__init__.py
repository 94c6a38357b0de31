"""megaflow: reinforcement learning of language models. Megatron-core trains, SGLang generates, torchrun starts it."""

__version__ = "0.1.0"
