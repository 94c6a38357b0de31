"""What a stall looks like to a person: who waits for whom, from what each rank has said of itself or others have found out about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MOST_STACKS = 4  # shown in the report; the files have all


@dataclass
class Finding:
    """Of one rank.

    begun   collectives begun and not done (collectives.begun)
    counts  group -> [begun, done]; of a silent rank as of its last beat
    state   of a rank that does not answer: what the kernel says of its process
    stack   of its main thread, or all that came of a silent one
    """

    rank: int
    host: str = "?"
    pid: int = 0
    step: int = 0
    phase: str = "?"
    item: str = ""
    age_s: float = 0.0
    limit_s: float = 0.0
    waiting: bool = False
    begun: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=dict)
    call: str = ""
    state: str = ""
    stack: str = ""

    @property
    def place(self) -> str:
        return f"{self.phase}: {self.item}" if self.item else self.phase

    @property
    def doing(self) -> str:
        if self.state:
            return f"silent, {self.state}"
        if not self.waiting:
            return "working"
        return f"waits in {collective(self.begun[0])}" if self.begun else f"waits in {self.call.partition(' called at ')[0]}"


def collective(entry: dict[str, Any]) -> str:
    if not entry["ranks"]:
        return entry["op"].rpartition(":")[2]
    called = f", {entry['called']}" if entry["called"] else ""
    return f"{entry['op'].rpartition(':')[2]} of ranks {ranks_text(entry['ranks'])}{called}, number {entry['seq']}"


def waits_for(findings: list[Finding]) -> dict[int, set[int]]:
    """rank -> the ranks of its group that have not begun the collective that it waits in."""
    by_rank = {f.rank: f for f in findings}
    found = {}
    for f in findings:
        missing: set[int] = set()
        for entry in f.begun if f.waiting else ():
            others = [by_rank[r] for r in entry["ranks"] if r != f.rank and r in by_rank]
            missing |= {o.rank for o in others if o.counts.get(entry["group"], [0, 0])[0] < entry["seq"]}
        found[f.rank] = missing
    return found


def to_blame(findings: list[Finding]) -> list[Finding]:
    """Those that do not wait; or wait for nobody that they could, e.g. with a collective on its way on the device, and are waited for."""
    waits = waits_for(findings)
    wanted = set().union(*waits.values())
    return [f for f in findings if not f.waiting or (f.rank in wanted and not waits[f.rank])]


def conclusion(findings: list[Finding]) -> str:
    """One line: who waits where, for whom, and what that one is in."""
    waits, blamed = waits_for(findings), to_blame(findings)
    waiting = [f for f in findings if f not in blamed]
    causes = "; ".join(f"{_named([f.rank])} {_whereabouts(f)}{_why(f)}" for f in blamed)
    if not blamed:
        return _all_wait(findings, waits)
    if not waiting:
        return f"no rank waits for another: {causes}"
    return f"{_heads(waiting, waits, {f.rank for f in blamed})}. {causes[0].upper()}{causes[1:]}"


def _heads(waiting: list[Finding], waits: dict[int, set[int]], otherwise: set[int]) -> str:
    """Ranks that wait in the same place for the same ranks, in one sentence."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for f in waiting:
        groups.setdefault((f.place, f.doing, tuple(sorted(waits[f.rank] or otherwise))), []).append(f.rank)
    heads = []
    for (place, doing, missing), ranks in groups.items():
        verb = doing if len(ranks) == 1 else doing.replace("waits", "wait", 1)
        target = f"for {_named(list(missing))}" if missing else "which all its ranks have begun"
        heads.append(f"{_named(ranks)} {verb} (`{place}`) {target}")
    return "; ".join(heads)


def _all_wait(findings: list[Finding], waits: dict[int, set[int]]) -> str:
    reason = "they are in different collectives" if any(waits.values()) else "the collective does not end: network, driver or device"
    return f"every rank waits, {reason}: {_heads(findings, waits, set())}"


def _whereabouts(f: Finding) -> str:
    if f.phase == "?":
        return "has never said where it is"
    verb = "was last heard of" if f.state.startswith("its host") else "is" if f.state else "works"
    return f"{verb} in `{f.place}`, for {f.age_s:.1f} s"


def _why(f: Finding) -> str:
    return f", and does not answer: {f.state}" if f.state else " without progress"


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(ranks)}"


def ranks_text(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for r in sorted(ranks):
        if parts and r == parts[-1][-1] + 1:
            parts[-1].append(r)
        else:
            parts.append([r])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def table(findings: list[Finding]) -> str:
    rows = [("rank", "host", "pid", "step", "phase", "item", "without progress", "doing")]
    for f in findings:
        age = f"{f.age_s:.1f} s (limit {f.limit_s:g})"
        rows.append((str(f.rank), f.host, str(f.pid), str(f.step), f.phase, f.item or "-", age, f.doing))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows)


def report(findings: list[Finding], folder: str) -> str:
    """The whole of it."""
    findings = sorted(findings, key=lambda f: f.rank)
    shown, stacks = to_blame(findings) or findings, []
    for f in shown[:MOST_STACKS]:
        stacks.append(f"--- rank {f.rank}, {f.place} ---\n{f.stack.rstrip() or '(no stack)'}")
    if len(shown) > MOST_STACKS:
        stacks.append(f"... and {len(shown) - MOST_STACKS} more ranks")
    files = f"stacks of all ranks and engines: {folder}/"
    return "\n\n".join(["the run has stalled", table(findings), conclusion(findings), *stacks, files])
