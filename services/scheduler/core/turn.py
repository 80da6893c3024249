"""One executor's turn: the plan in the making, and what it is composed of. Filled by ``planner`` and ``policies``."""

from services.scheduler.core.cost import chunk_reads
from services.scheduler.core.lanes import Chunk, Executor, Lane, Step
from services.scheduler.core.request import Request
from shared.wire import tokens
from shared.wire.executor import Admit, BatchPlan

_ONE = tokens.pack([1])


class Draft:
    """A plan in the making: its columns and the step that will answer for it."""

    __slots__ = ("admits", "append_blocks", "append_lanes", "counts", "lanes", "marks", "starts", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        self.admits: list[Admit] = []
        self.append_lanes: list[int] = []
        self.append_blocks: list[int] = []
        self.lanes: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        """Of chunks only, as are ``marks``: each decode before them is one row and samples."""
        self.marks: list[int] = []

    def append(self, lane: Lane, blocks: list[int]) -> None:
        """Lengthen a lane's table."""
        self.append_lanes += [lane.number] * len(blocks)
        self.append_blocks += blocks

    def admit(self, lane: Lane) -> None:
        """Tell of a request's lane, with all its tokens and the blocks it has so far."""
        request = lane.request
        self.admits.append(
            Admit(
                lane=lane.number,
                seq=lane.seq,
                tokens=tokens.pack(request.tokens),
                num_prompt=request.num_prompt,
                num_cached=lane.cached,
                blocks=tokens.pack(lane.table),
                sampling=request.submit.sampling,
            )
        )

    def chunk(self, lane: Lane, num_tokens: int) -> None:
        """Compute the next tokens of a prefill; sample at the last known one."""
        start, end = lane.scheduled, lane.scheduled + num_tokens
        sample = end == lane.known
        self.lanes.append(lane.number)
        self.starts.append(start)
        self.counts.append(num_tokens)
        self.marks.append(sample)
        self.step.rows += num_tokens
        reads = chunk_reads(start, num_tokens)
        self.step.reads += reads
        self.step.chunk_reads += reads
        lane.scheduled = end
        if sample:
            lane.promised += 1
            self.step.samples.append(lane)
        else:
            self.step.chunks.append(Chunk(lane, end))

    def decodes(self, executor: Executor, lanes: list[Lane]) -> None:
        """Compute one token of each lane and sample the next; before any chunk. This is every tick's bulk."""
        assert not self.lanes, "decodes come first"
        starts = self.starts
        for lane in lanes:
            start = lane.scheduled
            if start >= lane.slots:
                self.append(lane, executor.extend(lane, start + 1))
            lane.scheduled = start + 1
            lane.promised += 1
            starts.append(start)
        self.lanes += [lane.number for lane in lanes]
        self.step.samples += lanes
        self.step.rows += len(lanes)
        self.step.reads += sum(starts) + len(lanes)

    def close(self, epoch: int, executor: Executor, now_ms: int) -> BatchPlan:
        """The plan, with the executor's retires; from here on its step is in flight."""
        step, num_decodes = self.step, len(self.lanes) - len(self.counts)
        work_lanes = tokens.pack(self.lanes)
        step.sample_lanes = tokens.pack([lane.number for lane in step.samples]) if self.counts else work_lanes
        step.sample_seqs = tokens.pack([lane.seq for lane in step.samples])
        step.since_ms = now_ms
        executor.inflight.append(step)
        executor.next_step += 1
        retires, executor.retires = executor.retires, []
        return BatchPlan(
            epoch=epoch,
            step=step.number,
            confirmed=executor.confirmed,
            retires=tokens.pack(retires),
            admits=self.admits,
            append_lanes=tokens.pack(self.append_lanes),
            append_blocks=tokens.pack(self.append_blocks),
            work_lanes=work_lanes,
            work_starts=tokens.pack(self.starts),
            work_counts=_ONE * num_decodes + tokens.pack(self.counts),
            work_samples=_ONE * num_decodes + tokens.pack(self.marks),
        )


class Turn:
    """What one executor's plan is composed of and what must not be in it."""

    __slots__ = ("blocked", "decodes", "draft", "executor", "num_asked", "passing", "preempted", "prefills")

    def __init__(self, executor: Executor, num_asked: int, solo: bool) -> None:
        self.executor = executor
        self.num_asked = num_asked
        """Executors that can plan at this moment and share what waits."""
        self.draft = Draft(Step(executor.next_step, solo))
        self.decodes: list[Lane] = []
        """Lanes with one token to compute."""
        self.prefills: list[Lane] = []
        """Lanes with more."""
        self.preempted: list[Request] = []
        """They are not admitted again in the same plan."""
        self.blocked: Request | None = None
        """The first waiting request that does not fit now."""
        self.passing: list[Request] = []
        """Those chosen from behind it."""

    def sort(self, lanes: list[Lane]) -> None:
        """Tell decodes from prefills. A lane whose last token is promised has nothing to do."""
        for lane in lanes:
            known = len(lane.tokens) + lane.promised
            pending = known - lane.scheduled
            if pending == 1:
                if known < lane.request.limit:
                    self.decodes.append(lane)
            elif pending > 1:
                self.prefills.append(lane)
