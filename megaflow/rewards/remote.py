"""A reward model behind HTTP: texts out, scores back, with time-outs, retries and an end to patience."""

from __future__ import annotations

import json
import logging
import math
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import batched
from typing import Any

from megaflow.config.schema import RewardModelConfig
from megaflow.monitor.progress import mark
from megaflow.types import LostError, PreflightError, Sample

log = logging.getLogger(__name__)
MAX_WAIT_S = 30.0  # between two tries
SHOWN = 300  # characters of an answer that an error quotes
TRY_AGAIN = (408, 425, 429)  # beside 5xx: the service is there, but not now


class RemoteScorer:
    """POSTs {"prompts": [...], "responses": [...], "answers": [...]} to reward.model.url; the answer is {"scores": [...]}, one number each.

    A request carries at most `batch` samples and `concurrency` of them are on their way at once. A connection that fails, a time-out and
    the statuses 408, 425, 429 and 5xx are tried again, after backoff_s, twice that, and so on up to 30 s.
    """

    def __init__(self, config: RewardModelConfig):
        self.config = config

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """In the order of `samples`. Raises LostError when the service stays down, PreflightError when it refuses or answers nonsense."""
        parts = list(batched(samples, self.config.batch))
        with ThreadPoolExecutor(self.config.concurrency) as threads:
            found = []
            for scores in threads.map(self._ask, parts):
                found += scores
                mark("score of the reward service", len(found), len(samples))
            return found

    def _ask(self, samples: Sequence[Sample]) -> list[float]:
        body = json.dumps(
            {
                "prompts": [s.prompt.text for s in samples],
                "responses": [s.text for s in samples],
                "answers": [s.prompt.answer for s in samples],
            },
            default=str,
        ).encode()
        for attempt in range(self.config.retries + 1):
            try:
                return self._scores_of(self._post(body), len(samples))
            except _Unavailable as error:
                reason = str(error)
                if attempt < self.config.retries:
                    wait = min(self.config.backoff_s * 2**attempt, MAX_WAIT_S)
                    log.warning("%s: %s; try %d of %d in %g s", self.config.url, reason, attempt + 2, self.config.retries + 1, wait)
                    mark(f"waiting for the reward service, try {attempt + 2}")  # patience, not a stall
                    time.sleep(wait)
        raise LostError(
            f"reward.model.url={self.config.url}: no answer after {self.config.retries + 1} tries; the last: {reason}. The last "
            "checkpoint is untouched: start the service and run the same command again, or raise reward.model.retries or .timeout_s"
        )

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.config.url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.config.timeout_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read(SHOWN).decode(errors="replace")
            if error.code >= 500 or error.code in TRY_AGAIN:
                raise _Unavailable(f"status {error.code} {error.reason}: {text}") from error
            raise PreflightError(f"reward.model.url={self.config.url}: refused with status {error.code} {error.reason}: {text}") from error
        except TimeoutError as error:
            raise _Unavailable(f"no answer within reward.model.timeout_s={self.config.timeout_s:g}") from error
        except (urllib.error.URLError, OSError) as error:  # no such host, nobody listens, the connection broke
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _Unavailable(f"no connection within reward.model.timeout_s={self.config.timeout_s:g}") from error
            raise _Unavailable(str(reason)) from error

    def _scores_of(self, text: bytes, number: int) -> list[float]:
        wrong = f"reward.model.url={self.config.url}: expected {{'scores': [{number} numbers]}}, got"
        try:
            scores: Any = json.loads(text)["scores"]
            found = [float(score) for score in scores]
        except (ValueError, TypeError, KeyError) as error:
            raise PreflightError(f"{wrong} {text[:SHOWN].decode(errors='replace')!r}") from error
        if len(found) != number:
            raise PreflightError(f"{wrong} {len(found)} numbers")
        if not all(math.isfinite(score) for score in found):
            raise PreflightError(f"{wrong} the number {next(s for s in found if not math.isfinite(s))}")
        return found


class _Unavailable(Exception):
    """Worth another try."""
