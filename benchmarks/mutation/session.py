"""One pytest session that collects the tests once, finds which of them can notice which mutant, and forks per mutant.

The parent process imports everything and never runs a test. Mutants that the record has killed are tried with the test
that killed them. For the others a child runs all tests with probes; then a child for each mutant changes one function's
code and runs the tests that may notice, quickest first, until one fails.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mutation.operators import Mutant
from mutation.probes import Probes, Sources, install_mutant


@dataclass
class Reach:
    """What the probed run found: CPU seconds of each test, and the tests in which each mutant (by key) differs."""

    seconds: dict[str, float] = field(default_factory=dict)
    tests: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """killed, survived, unreached (no test makes it differ) or timeout; by which test, and how."""

    verdict: str
    by: str = ""
    how: str = ""
    tests: int = 0  # that it could have failed in
    seconds: float = 0.0


class Session:
    """A pytest plugin whose test loop is the mutation run."""

    def __init__(
        self,
        sources: Sources,
        mutants: Sequence[Mutant],
        killers: Sequence[str],
        tell: Callable[[Mutant, Verdict], None],
        budget: float,
    ) -> None:
        self.sources, self.mutants, self.killers, self.tell, self.budget = sources, mutants, killers, tell, budget
        self.kills: Counter[str] = Counter()  # by test

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("a test file could not be collected")
        warm_up()
        items = {item.nodeid: item for item in session.items}
        known = zip(self.mutants, self.killers, strict=True)
        left = [mutant for mutant, killer in known if not self.confirmed(mutant, items.get(killer))]
        if not left:
            return True
        reached = in_child(lambda: self.probe(session.items, left), limit=3600)
        if not isinstance(reached, dict):
            raise session.Interrupted(f"the tests fail without a mutant: {reached}")
        reach = Reach(**reached)
        numbered = sorted(enumerate(left), key=lambda m: bool(reach.tests[m[0]]))  # those out of reach first
        for number, mutant in numbered:
            tests = self.ordered(reach, number)
            self.tell(mutant, self.judge(mutant, [items[t] for t in tests], reach))
        return True

    def confirmed(self, mutant: Mutant, killer: pytest.Item | None) -> bool:
        """Whether the test that killed a mutant before does so again."""
        failure = None if killer is None else in_child(lambda: self.attack(mutant, [killer]), limit=60)
        if isinstance(failure, list):
            self.kills[failure[0]] += 1
            self.tell(mutant, Verdict("killed", *failure, tests=1))
        return isinstance(failure, list)

    def probe(self, items: Sequence[pytest.Item], mutants: Sequence[Mutant]) -> Any:
        """Run all tests once, with probes."""
        probes = Probes(self.sources, mutants)
        reach = Reach(tests=[[] for _ in mutants])
        for item in items:
            start = time.process_time()
            failure = failed(item)
            if failure is not None:
                return f"{item.nodeid}: {failure}"
            reach.seconds[item.nodeid] = time.process_time() - start
            for number in probes.taken():
                reach.tests[number].append(item.nodeid)
            if len(reach.seconds) % 50 == 0:
                print(f"{len(reach.seconds)}/{len(items)} tests probed", file=sys.stderr, flush=True)
        return {"seconds": reach.seconds, "tests": reach.tests}

    def ordered(self, reach: Reach, number: int) -> list[str]:
        """The quickest first, and those that have killed many."""
        return sorted(reach.tests[number], key=lambda t: reach.seconds[t] / (1 + self.kills[t]))

    def judge(self, mutant: Mutant, items: list[pytest.Item], reach: Reach) -> Verdict:
        if not items:
            return Verdict("unreached")
        total, chosen = 0.0, list[pytest.Item]()
        for item in items:
            total += reach.seconds[item.nodeid]
            if chosen and total > self.budget:
                break
            chosen.append(item)
        start = time.monotonic()
        failure = in_child(lambda: self.attack(mutant, chosen), limit=int(3 * min(total, self.budget)) + 20)
        seconds = round(time.monotonic() - start, 1)
        if failure is None:
            return Verdict("timeout", tests=len(items), seconds=seconds)
        if isinstance(failure, list):
            self.kills[failure[0]] += 1
            return Verdict("killed", *failure, tests=len(items), seconds=seconds)
        return Verdict(
            "survived", how="" if len(chosen) == len(items) else "time was up", tests=len(items), seconds=seconds
        )

    def attack(self, mutant: Mutant, items: Sequence[pytest.Item]) -> Any:
        """The first test that fails with the mutant, and how; else True."""
        install_mutant(self.sources, mutant)
        for item in items:
            failure = failed(item)
            if failure is not None:
                return [item.nodeid, failure]
        return True


def warm_up() -> None:
    """Trace something once: the first trace of a process imports much of torch."""
    import torch

    from deadweight.graph.canonical import canonical
    from deadweight.graph.trace import trace

    canonical(trace(torch.nn.Linear(2, 2).double(), (torch.zeros(1, 2, dtype=torch.float64),)))


def failed(item: pytest.Item) -> str | None:
    """Run one test: the first line of its failure, if it fails."""
    for report in runtestprotocol(item, log=False, nextitem=None):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            return str(crash.message if crash else report.longrepr).splitlines()[0][:120]
    return None


def in_child(work: Callable[[], Any], limit: int) -> Any:
    """What the work returns in a forked process; None if it dies or takes more than so many CPU seconds."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        with os.fdopen(target, "w", encoding="utf-8") as stream:
            json.dump(work(), stream)
        os._exit(0)
    os.close(target)
    with os.fdopen(source, encoding="utf-8") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None
