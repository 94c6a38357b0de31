"""Models between three forms on disk: a Hugging Face folder, files cut for a Megatron layout, a training checkpoint. No GPU, no ranks."""
