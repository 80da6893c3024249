"""The lane mirror against a naive one: Python lists, one token at a time, over random plans, good and bad."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.executor.backend import StepOutput
from services.executor.batch import StepBatch
from services.executor.lanes import Lanes
from services.executor.refusals import PlanError
from shared.wire.executor import Admit, Append, Work, batch_plan
from shared.wire.facts import ExecutorLimits, ModelFacts
from tests.fakes.plans import admit

NUM_LANES, NUM_BLOCKS, CONTEXT = 3, 8, 12


@dataclass
class NaiveLane:
    seq: int
    tokens: list[int]
    computed: int
    blocks: list[int] = field(default_factory=list)


class LaneMirror(RuleBasedStateMachine):
    """Rules draw mostly sensible plans, and now and then one wrong number in them."""

    @initialize(block_size=st.integers(1, 4))
    def begin(self, block_size: int) -> None:
        self.block_size = block_size
        self.facts = ModelFacts("tiny", 2, CONTEXT, [1], "none")
        self.limits = ExecutorLimits(NUM_BLOCKS, block_size, NUM_LANES, max_step_tokens=10)
        self.taken: list[int] = []
        self.lanes = Lanes(self.facts, self.limits, lambda _lane: None, self.taken.extend)
        self.left: list[NaiveLane] = []
        """Lanes that were retired: what their full blocks hold is cached until the block is taken."""
        self.full: set[int] = set()
        self.fresh: list[int] = []
        self.naive: dict[int, NaiveLane] = {}
        self.seq = 0

    def free(self) -> list[int]:
        held = {block for lane in self.naive.values() for block in lane.blocks}
        return [block for block in range(NUM_BLOCKS) if block not in held]

    def take(self, blocks: list[int]) -> list[int]:
        self.fresh += blocks
        self.full -= set(blocks)
        return blocks

    @rule(data=st.data())
    def tick(self, data: st.DataObject) -> None:
        """Change lanes, then run what of the work can run; sometimes the step fails."""
        retires = data.draw(st.lists(st.sampled_from(sorted(self.naive)), unique=True)) if self.naive else []
        for lane in retires:
            self.left.append(self.naive.pop(lane))
        self.taken.clear()
        self.fresh.clear()
        admits = self.draw_admits(data)
        appends = self.draw_appends(data)
        work = self.draw_work(data)
        plan = batch_plan(1, 1, 0, retires, admits, appends, work)
        self.lanes.apply(plan)
        assert sorted(self.taken) == sorted(self.fresh), "the backend is told of every block that is written anew"
        batch, failures = self.lanes.batch(plan)
        assert failures == []
        self.check_batch(batch, work)
        if data.draw(st.integers(0, 4)) == 0:
            return
        sampled = [data.draw(st.integers(0, 1)) for _ in batch.samples]
        self.lanes.commit(self.lanes.launch(batch), StepOutput(sampled))
        for row in work:
            self.naive[row.lane].computed += row.num_tokens
            if row.sample:
                self.naive[row.lane].tokens.append(sampled.pop(0))
        for state in self.naive.values():
            self.full.update(state.blocks[: state.computed // self.block_size])

    def draw_admits(self, data: st.DataObject) -> list[Admit]:
        admits = []
        for lane in range(NUM_LANES):
            if lane in self.naive or not data.draw(st.booleans()):
                continue
            known = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT - 1))
            shared, num_cached = self.draw_shared(data, len(known))
            most = min(-(-CONTEXT // self.block_size) - len(shared), len(self.free()))
            fresh = [block for block in self.free() if block not in shared][: data.draw(st.integers(0, most))]
            blocks = shared + self.take(fresh)
            self.seq += 1
            self.naive[lane] = NaiveLane(self.seq, list(known), num_cached, blocks)
            admits.append(admit(lane, known, blocks, seq=self.seq, num_cached=num_cached))
        return admits

    def draw_shared(self, data: st.DataObject, num_known: int) -> tuple[list[int], int]:
        """Leading full blocks that another lane has computed, also one that has left."""
        donors = [*self.naive.values(), *self.left]
        if not donors or not data.draw(st.booleans()):
            return [], 0
        donor = data.draw(st.sampled_from(donors))
        full = next((i for i, block in enumerate(donor.blocks) if block not in self.full), len(donor.blocks))
        count = data.draw(st.integers(0, min(full, (num_known - 1) // self.block_size)))
        return donor.blocks[:count], count * self.block_size

    def draw_appends(self, data: st.DataObject) -> list[Append]:
        appends = []
        for lane, state in self.naive.items():
            free, room = self.free(), -(-CONTEXT // self.block_size) - len(state.blocks)
            for block in self.take(free[: data.draw(st.integers(0, min(room, 2)))]):
                state.blocks.append(block)
                appends.append(Append(lane, block))
        return appends

    def draw_work(self, data: st.DataObject) -> list[Work]:
        work, budget = [], 10
        for lane, state in self.naive.items():
            room = min(len(state.tokens), len(state.blocks) * self.block_size) - state.computed
            most = min(room, budget)
            if most <= 0 or not data.draw(st.booleans()):
                continue
            count = data.draw(st.integers(1, most))
            sample = state.computed + count == len(state.tokens)
            if sample and len(state.tokens) >= CONTEXT:
                continue
            work.append(Work(lane, state.computed, count, sample))
            budget -= count
        return work

    def check_batch(self, batch: StepBatch, work: list[Work]) -> None:
        rows = []
        for row in work:
            state = self.naive[row.lane]
            for position in range(row.start, row.start + row.num_tokens):
                block, offset = divmod(position, self.block_size)
                rows.append((state.tokens[position], position, state.blocks[block] * self.block_size + offset))
        got = zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist(), strict=True)
        assert list(got) == rows
        for index, row in enumerate(work):
            context = row.start + row.num_tokens
            need = -(-context // self.block_size)
            assert batch.context_lens[index] == context
            assert batch.block_tables[index].tolist()[:need] == self.naive[row.lane].blocks[:need]
        sampled = [(self.naive[row.lane], row.start + row.num_tokens) for row in work if row.sample]
        expected = [(state.seq, position, state.tokens) for state, position in sampled]
        assert [(s.seq, s.position, s.tokens.tolist()) for s in batch.samples] == expected

    @rule(data=st.data())
    def wrong_work(self, data: st.DataObject) -> None:
        """One wrong number in the work: refused, and nothing changes (the invariant checks that)."""
        good = self.draw_work(data)
        if not good:
            return
        index = data.draw(st.integers(0, len(good) - 1))
        row = good[index]
        wrong = data.draw(
            st.sampled_from(
                [
                    row._replace(lane=NUM_LANES),
                    row._replace(start=row.start + 1),
                    row._replace(num_tokens=0),
                    row._replace(num_tokens=CONTEXT + 1),
                    row._replace(sample=not row.sample),
                    *(row._replace(lane=lane) for lane in range(NUM_LANES) if lane not in self.naive),
                ]
            )
        )
        good[index] = wrong
        self.refused(work=good)

    @rule(data=st.data())
    def wrong_change(self, data: st.DataObject) -> None:
        if not self.naive:
            return
        lane = data.draw(st.sampled_from(sorted(self.naive)))
        closed = [other for other in range(NUM_LANES + 1) if other not in self.naive]
        held = self.naive[lane].blocks
        self.refused(retires=[data.draw(st.sampled_from(closed))])
        self.refused(admits=[admit(lane, [1], [])])
        self.refused(appends=[Append(lane, NUM_BLOCKS)])
        if held:
            self.refused(appends=[Append(lane, held[0])])
            if closed[0] < NUM_LANES:
                self.refused(admits=[admit(closed[0], [1], [held[0]])])

    def refused(self, **parts: object) -> None:
        plan = batch_plan(1, 1, 0, **parts)  # type: ignore[arg-type]
        try:
            self.lanes.apply(plan)
            self.lanes.batch(plan)
        except PlanError:
            return
        raise AssertionError(f"not refused: {plan}")

    @rule()
    def new_session(self) -> None:
        self.lanes.clear()
        self.naive.clear()
        self.left.clear()
        self.full.clear()

    @invariant()
    def mirrors(self) -> None:
        if not hasattr(self, "naive"):
            return
        assert self.lanes.open_lanes() == sorted(self.naive)
        for lane, state in self.naive.items():
            assert self.lanes.view(lane) == (state.seq, state.tokens, state.computed, state.blocks)


LaneMirror.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestLaneMirror = LaneMirror.TestCase
