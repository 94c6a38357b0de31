"""Weights between three places: a Hugging Face folder, Megatron's shards, and the engine's. One two-way table serves all of them."""
