"""The policy as a Megatron-core model: log-probabilities, updates, sleep and wake."""

from megaflow.parallel import megatron_shim

megatron_shim.install()  # before any module here imports megatron
