"""SGLang's own Engine, embedded in the ranks: the first rank of each rollout group owns one, its schedulers sit on the group's devices."""

from __future__ import annotations

from typing import Any

from megaflow.config.schema import Config, SamplingConfig
from megaflow.data import decoded
from megaflow.parallel import device
from megaflow.parallel.mesh import Mesh
from megaflow.rollout.base import BucketSource, PullSource, StaleWeights, sample_seed, share_of_engine
from megaflow.rollout.engine_process import Answer, EngineProcess
from megaflow.rollout.loading import Loader
from megaflow.rollout.restarts import Finished, restarted, started
from megaflow.types import Layout, Prompt, Sample


class SGLangRollout:
    """See base.Rollout."""

    returns_routes = True

    def __init__(self, config: Config, mesh: Mesh, tokenizer: Any, stop_token_ids: list[int]):
        """Starts this rank's engine and returns at once; the first use waits for it. From the main thread."""
        self.config, self.mesh, self.tokenizer, self.stop_token_ids = config, mesh, tokenizer, stop_token_ids
        group = mesh.rollout
        self.layout = Layout(group.size, group.index, fused=True, ep=config.rollout.ep)
        self.version = -1
        self.name = f"engine {mesh.engine_index} (ranks {group.ranks[0]}-{group.ranks[-1]})"
        self.is_owner = group.is_first
        self.asleep: set[str] = set()
        self.has_started = False
        self.finished = Finished()
        self.engine = EngineProcess(config, mesh.engine_index, self.name) if self.is_owner else None
        self.loader = Loader(mesh, self.engine, self.name, config.rollout.timeout_s)

    def await_start(self) -> None:
        """Collective. All engines are there. Raises EngineError on every rank if one did not start, EngineLost if its process died."""
        if self.has_started:
            return
        with self.mesh.together():
            if self.engine is not None:
                started(self.engine)
        self.has_started = True

    def replace_lost(self) -> None:
        """Collective. See base.Rollout. A lost engine is ended whole before another one takes its place."""
        self.version, self.has_started = -1, True
        with self.mesh.together():
            if self.engine is not None and not self.engine.is_well():
                self.engine.kill()
                self.engine = EngineProcess(self.config, self.mesh.engine_index, self.name)
                self.loader.use(self.engine)
                restarted(self.engine)
                self.engine.release(sorted(self.asleep))

    def startup_seconds(self) -> dict[str, float]:
        """Of this rank's engine, by part, and until its first token; nothing on a rank without one."""
        return dict(self.engine.seconds) if self.engine is not None else {}

    # --- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingConfig,
        seed: tuple[int, int],
        num_samples: int,
        version: int,
        routes: bool = False,
    ) -> list[Sample]:
        """Collective. See base.Rollout."""
        samples: list[Sample] = []
        with self.mesh.together():
            self._require_fresh(version)
            if self.is_owner:
                self.loader.settle()
                samples = self._generate(prompts, sampling, seed, num_samples, routes)
        self.finished.clear()
        return samples

    def _require_fresh(self, version: int) -> None:
        if self.version != version:
            raise StaleWeights(f"{self.name} holds weights of version {self.version}, the trainer is at {version}; sync first")
        if self.asleep:
            raise StaleWeights(f"{self.name} sleeps ({', '.join(sorted(self.asleep))}); wake it first")

    def _generate(self, prompts, sampling, seed, num_samples, routes) -> list[Sample]:
        mine = [(g, i) for g in share_of_engine(len(prompts), self.mesh.engine_index, self.mesh.num_engines) for i in range(num_samples)]
        finished = self.finished.of_call([p.id for p in prompts], sampling, seed, num_samples, self.version)
        wanted = [place for place in mine if place not in finished]
        requests = [(prompts[g].tokens, self._params(sampling, sample_seed(seed, prompts[g].id, i))) for g, i in wanted]
        for answers in self.engine.generate(requests, self.config.rollout.timeout_s, routes):  # as they finish: decoding overlaps
            texts = decoded(self.tokenizer, [answer.tokens for answer in answers])
            for answer, text in zip(answers, texts, strict=True):
                group, index = wanted[answer.index]
                finished[group, index] = self._sample(prompts[group], group, index, answer, text)
        return [finished[place] for place in mine]

    def _params(self, sampling: SamplingConfig, seed: int) -> dict[str, Any]:
        params = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": seed,
        }
        if not sampling.ignore_eos:
            params["stop_token_ids"] = self.stop_token_ids
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        return params

    def _sample(self, prompt: Prompt, group: int, index: int, answer: Answer, text: str) -> Sample:
        return Sample(
            prompt=prompt,
            group=group,
            index=index,
            response=answer.tokens,
            rollout_logp=answer.logps,
            finish="length" if answer.finish == "length" else "stop",
            version=self.version,
            text=text,
            routes=answer.routes,
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    def load_weights(self, source: BucketSource | PullSource, version: int, proof: bool) -> None:
        """Collective. See base.Rollout."""
        self.await_start()
        self.version = -1
        self.mesh.all_ok(self.loader.load(source, proof))
        self.version = version

    # --- sleep and wake -------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Collective. See base.Rollout. Level 1's copy is SGLang's own (enable_weights_cpu_backup); on CPU weights simply stay.

        On CUDA an engine is started for one level: its host copy is made at every sleep or never.
        """
        assert level == 2 or not device.on_cuda() or self.config.rollout.sleep_level == "1", "started with rollout.sleep_level=2"
        keep_weights = level == 1 and not device.on_cuda()
        tags = ["kv_cache"] if keep_weights else ["kv_cache", "weights"]
        if level == 2:
            self.version = -1
        if not set(tags) <= self.asleep:
            self._on_engine(lambda: self.engine.release(tags))
        self.asleep |= set(tags)

    def wake(self, tags: tuple[str, ...]) -> None:
        """Collective. See base.Rollout."""
        self.await_start()
        if self.asleep & set(tags):
            self._on_engine(lambda: self.engine.resume(list(tags)))
        self.asleep -= set(tags)

    def _on_engine(self, action) -> None:
        self.await_start()
        with self.mesh.together():
            if self.engine is not None:
                self.loader.settle()
                action()

    def close(self) -> None:
        """Collective."""
        if self.engine is not None:
            self.engine.close()
        self.mesh.barrier()
