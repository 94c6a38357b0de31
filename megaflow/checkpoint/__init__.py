"""The state of a run on disk: saved whole or not at all, verified before it is used, loaded bit for bit."""

from megaflow.parallel import megatron_shim

megatron_shim.install()  # before any module here imports megatron
