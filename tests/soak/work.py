"""Jobs that a soak keeps in hand: some run through, some are paused and resumed, some cancelled.

Each is verified as soon as it has ended, before the service's retention deletes it, by the public
API alone and against an undisturbed run of the same spec.
"""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import httpx2

import glasshouse as gh
from tests.acceptance.services import Cluster
from tests.acceptance.specs import lasting, small
from tests.chaos.failover_client import FailoverClient
from tests.chaos.verifier import Record, record_of

PATIENCE_S = 600.0
LOOK_EVERY_S = 0.3
LIVING = ["queued", "starting", "running", "pausing", "paused", "cancelling"]
KINDS = ("short",) * 4 + ("watched",) * 2 + ("paused",) * 2 + ("cancelled",) * 2
NUM_TOLD = 20


def specs(dataset: str) -> dict[str, dict[str, Any]]:
    """The specs of jobs: a few steps, and many with statistics and whole tensors of layers."""
    calm = {"max_restarts": 1000}
    probes = [
        {"layers": ["fc"], "kinds": ["output", "param_grad"], "every": 10, "max_overhead": None},
        {"layers": ["conv1", "fc"], "kinds": ["output"], "every": 250, "want": ["full"]},
    ]
    often = {"every_steps": 20, "keep_last": 2}
    middle = lasting(dataset, 300, checkpoint=often, retry=calm, probes=probes)
    brief = small(dataset, stop={"steps": 20}, checkpoint=often | {"every_steps": 5}, retry=calm)
    long = middle | {"stop": {"steps": 1500}}  # so that there is time to pause or cancel it
    return {"short": brief, "watched": middle, "paused": long, "cancelled": long}


@dataclass
class Task:
    """One job, and what is still to be done to it."""

    kind: str
    id: str
    begun_at: float | None = None
    act_after_s: float = 0.0
    acted: bool = False
    resume_at: float | None = None


@dataclass
class Work:
    """The jobs in hand, those that have ended, and what was wrong with them."""

    cluster: Cluster
    num_in_hand: int
    spared: str
    """The API through which jobs are verified."""
    seed: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """By kind and state."""
    num_attempts: int = 0
    num_pauses: int = 0
    wrong: list[str] = field(default_factory=list)
    _tasks: list[Task] = field(default_factory=list)
    _specs: dict[str, dict[str, Any]] = field(default_factory=dict)
    _golden: dict[str, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311
        self._client = FailoverClient(self.cluster, PATIENCE_S)
        self._over: Queue[Task | None] = Queue()
        self._error: BaseException | None = None
        self._verifier = threading.Thread(target=self._verify_all, name="verifier", daemon=True)
        self._verifier.start()

    def begin(self) -> None:
        """Store the data, and run each spec once with nothing in its way."""
        dataset = self._client.ask(lambda client: client.datasets.create(builtin="digits").id)
        self._specs = specs(dataset)
        for kind in ("short", "watched", "paused"):
            self._golden[kind] = self._undisturbed(self._specs[kind])
        self._golden["cancelled"] = self._golden["paused"]

    def keep_up(self) -> None:
        """Submit what is wanting and do what is due; then rest a little."""
        while len(self._tasks) < self.num_in_hand:
            self._tasks.append(self._submit())
        self._look()

    def finish(self, within_s: float) -> None:
        """Take no more, see every job to its end, and verify the last of them."""
        deadline = time.monotonic() + within_s
        while self._tasks and time.monotonic() < deadline:
            self._look()
        self._complain(*(f"{task.kind} job {task.id} has not ended" for task in self._tasks))
        self._over.put(None)
        self._verifier.join(within_s)
        if self._verifier.is_alive():
            self._complain("the last jobs were not verified in time")
        self._client.close()

    def _look(self) -> None:
        if self._error is not None:
            raise self._error
        living = self._client.ask(
            lambda client: {job.id: job for job in client.jobs.list(state=LIVING, limit=200)}
        )
        for task in [*self._tasks]:
            if task.id in living:
                self._act(task, living[task.id].state)
            else:
                self._tasks.remove(task)
                self._over.put(task)
        time.sleep(LOOK_EVERY_S)

    def _submit(self) -> Task:
        kind = self._random.choice(KINDS)
        job = self._client.ask(lambda client: client.jobs.create(self._specs[kind]).id)
        return Task(kind, job, act_after_s=self._random.uniform(0.2, 6.0))

    def _act(self, task: Task, state: str) -> None:
        now = time.monotonic()
        if state == "running" and task.begun_at is None:
            task.begun_at = now
        if task.kind == "paused" and state == "paused":
            self._resume(task, now)
        due = task.begun_at is not None and now > task.begun_at + task.act_after_s
        if due and not task.acted and task.kind in ("paused", "cancelled"):
            verb = "pause" if task.kind == "paused" else "cancel"
            task.acted = self._try(task, verb)

    def _resume(self, task: Task, now: float) -> None:
        if task.resume_at is None:
            task.resume_at = now + self._random.uniform(0, 3)
            self.num_pauses += 1
        elif now > task.resume_at:
            self._try(task, "resume")

    def _try(self, task: Task, verb: str) -> bool:
        """Ask it; what comes too late is none the worse for that."""
        try:
            self._client.ask(lambda client: getattr(client.jobs, verb)(task.id))
        except gh.ConflictError:
            return False
        return True

    def _undisturbed(self, spec: dict[str, Any]) -> Record:
        with self.cluster.endpoint(self.spared).client() as client:
            job = client.jobs.create(spec).wait(timeout=PATIENCE_S)
            job.raise_if_unsuccessful()
        return self._record(job.id)

    def _record(self, job: str) -> Record:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self.cluster.endpoint(self.spared).http() as http:
                    self.num_attempts += (
                        http.get(f"/jobs/{job}").raise_for_status().json()["attempt"]
                    )
                    return record_of(http, job)
            except httpx2.HTTPStatusError as error:
                if error.response.status_code != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _verify_all(self) -> None:
        try:
            while (task := self._over.get()) is not None:
                self._verify(task)
        except BaseException as error:  # raised in the thread that looks after the jobs
            self._error = error

    def _verify(self, task: Task) -> None:
        try:
            found = self._record(task.id)
            problems = compare(task.kind, found, self._golden[task.kind])
            self.ended[f"{task.kind} {found.state}"] += 1
        except (AssertionError, httpx2.HTTPError) as error:
            problems = [str(error)[:500]]
        self._complain(*(f"{task.kind} job {task.id}: {problem}" for problem in problems))

    def _complain(self, *problems: str) -> None:
        self.wrong += problems[: NUM_TOLD - len(self.wrong)]


def compare(kind: str, found: Record, golden: Record) -> list[str]:
    """What of a job is not as it would be had nobody touched it.

    A pause saves a checkpoint of its own, so that the list of them may differ. A job that was
    cancelled has said, of the steps that it made, what the other one said of those.
    """
    said, meant = step_events(found), step_events(golden)
    if kind == "cancelled" and found.state == "cancelled":
        return [] if said == meant[: len(said)] else ["said something else before it was cancelled"]
    problems = [f"ended as {found.state}"] * (found.state != "succeeded")
    problems += ["another log"] * (said != meant)
    problems += ["other series"] * (found.metrics != golden.metrics)
    problems += ["other weights"] * (found.weights != golden.weights)
    if kind in ("short", "watched"):
        problems += ["other checkpoints"] * (found.log != golden.log)
    return problems


def step_events(record: Record) -> list[tuple[Any, ...]]:
    """The events that tell of steps, without the checkpoints."""
    return [event for event in record.log if event[0] != "checkpoint"]
