"""Rules about what is sampled: for training, for evaluation, into a file."""

from __future__ import annotations

from megaflow.config.rules.job import Found, Job


def training_samples(job: Job) -> Found:
    if job.config.sampling.temperature == 0:
        text = "sampling.temperature=0 draws the same response every time, and log-probabilities need a temperature; use e.g. 1.0"
        yield ("sampling.temperature",), f"{text} (eval.temperature is apart)"


def top_k_is_off_or_positive(job: Job) -> Found:
    top_k = job.config.sampling.top_k
    if top_k != -1 and top_k < 1:
        yield ("sampling.top_k",), f"sampling.top_k={top_k} must be -1 (off) or at least 1"


def eval_samples_differ(job: Job) -> Found:
    settings = job.config.eval
    if settings.samples > 1 and settings.temperature == 0:
        text = f"eval.temperature=0 draws the same response eval.samples={settings.samples} times; set a temperature, or samples=1"
        yield ("eval.samples", "eval.temperature"), text
    for k in settings.pass_k:
        if not 1 <= k <= settings.samples:
            yield ("eval.pass_k", "eval.samples"), f"eval.pass_k={k} must be of 1 to eval.samples={settings.samples}"


def generation_has_a_choice(job: Job) -> Found:
    wanted, sampling = job.config.generate, job.config.sampling
    if wanted.samples > 1 and sampling.temperature == 0:
        text = f"sampling.temperature=0 draws the same response generate.samples={wanted.samples} times; set samples=1 or a temperature"
        yield ("sampling.temperature", "generate.samples"), text
    if wanted.samples == 1 and wanted.kind in ("pairs", "best_of_n"):
        text = f"generate.kind={wanted.kind} chooses among the samples of a prompt, and generate.samples=1; draw more"
        yield ("generate.kind", "generate.samples"), text


def output_fits_format(job: Job) -> Found:
    wanted = job.config.generate
    if wanted.output and not wanted.output.endswith(f".{wanted.format}"):
        text = f"generate.output={wanted.output} must end in .{wanted.format} (generate.format), or nothing can read it"
        yield ("generate.output", "generate.format"), text
