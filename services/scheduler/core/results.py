"""What executors answer: results and failures of steps become tokens, ends and new attempts. Called by ``machine``.

An answer belongs to the oldest step in flight or is refused. Rows whose lane was retired meanwhile are dropped; a
token computed after a request's end appears nowhere.
"""

from services.scheduler.core.counters import count
from services.scheduler.core.lanes import Executor, Lane, Step
from services.scheduler.core.ledger import Ledger
from shared.wire import tokens
from shared.wire.executor import BatchFailed, BatchResult, LaneFailure, samples_of
from shared.wire.gateway import Delta
from shared.wire.logprobs import Logprobs

ITEM = tokens.ITEM_BYTES
_NOTHING_TOLD = Logprobs()


class ProtocolViolation(ValueError):
    """The executor answered something no executor may answer."""


def take_step(executor: Executor, number: int, ledger: Ledger) -> Step | None:
    """The step that is answered, no longer in flight; None if it was answered before. Raises ProtocolViolation."""
    if number <= executor.confirmed:
        count(ledger.counters.stale, "step")
        return None
    if not executor.inflight or executor.inflight[0].number != number:
        raise ProtocolViolation(f"step {number} was answered out of turn")
    step = executor.inflight.popleft()
    executor.confirmed = number
    executor.touched = True
    if executor.inflight:
        executor.inflight[0].since_ms = ledger.now_ms
    return step


def confirm(executor: Executor, step: Step, result: BatchResult, ledger: Ledger) -> None:
    """The step ran: deliver its tokens. Raises ProtocolViolation before anything is changed."""
    if step.doomed and step.rows:
        raise ProtocolViolation(f"step {step.number} ran although a step before it had failed")
    sampled, failed = _outcomes(step, result)
    new_tokens = tokens.unpack(result.sample_tokens)
    assert ledger.facts is not None
    if new_tokens and max(new_tokens) >= ledger.facts.vocab_size:
        raise ProtocolViolation(f"step {step.number} sampled a token outside the vocabulary")
    told = _told(step, result) if result.logprobs else {}
    if step.rows:
        executor.cost.measure(step.rows, step.reads, result.run_us, step.rows > len(step.samples))
        ledger.counters.steps += 1
        ledger.counters.computed_tokens += step.rows
        executor.steps_done += 1
    for lane, end in step.chunks:
        lane.computed = end
        if end >= lane.watch_at and not lane.closed:
            _publish(lane, ledger)
    _deliver(sampled, new_tokens, result.sample_tokens, told, ledger)
    if told:
        _deliver_prompts(step, told, ledger)
    for lane, failure in failed:
        if lane.closed:
            continue
        if failure.later:
            ledger.preempt(lane, failure.detail)
        else:
            ledger.fail(lane.request, failure.detail)


def _outcomes(step: Step, result: BatchResult) -> tuple[list[Lane], list[tuple[Lane, LaneFailure]]]:
    """Match samples and failures with the step's rows: the lanes that got a token, in order, and those that failed."""
    if result.sample_lanes == step.sample_lanes and result.sample_seqs == step.sample_seqs and not result.failures:
        if len(result.sample_tokens) != len(step.sample_lanes):
            raise ProtocolViolation(f"step {step.number} has {len(step.samples)} samples and another number of tokens")
        return step.samples, []
    try:
        samples = samples_of(result)
    except ValueError as error:
        raise ProtocolViolation(f"step {step.number}: {error}") from error
    failures = {(failure.lane, failure.seq): failure for failure in result.failures}
    sampled: list[Lane] = []
    failed: list[tuple[Lane, LaneFailure]] = []
    for lane in step.samples:
        failure = failures.pop((lane.number, lane.seq), None)
        if failure is None:
            sampled.append(lane)
        else:
            failed.append((lane, failure))
    if failures or [(lane.number, lane.seq) for lane in sampled] != [(row.lane, row.seq) for row in samples]:
        raise ProtocolViolation(f"step {step.number} did not answer each of its samples once, in order")
    return sampled, failed


def _told(step: Step, result: BatchResult) -> dict[int, Logprobs]:
    """What the step tells of logprobs, by seq; whatever it says of a lane goes to the gateway unread."""
    lanes = {lane.seq: lane for lane in step.lanes()}
    told: dict[int, Logprobs] = {}
    for entry in result.logprobs:
        lane = lanes.get(entry.seq)
        if lane is None or lane.number != entry.lane:
            raise ProtocolViolation(f"step {step.number} tells logprobs of a lane without work in it")
        before = told.get(entry.seq, _NOTHING_TOLD)
        if entry.start < lane.request.num_prompt:
            told[entry.seq] = Logprobs(before.output, entry.start, entry.records)
        else:
            told[entry.seq] = Logprobs(entry.records, before.prompt_start, before.prompt)
    return told


def _deliver_prompts(step: Step, told: dict[int, Logprobs], ledger: Ledger) -> None:
    """Logprobs of prompt tokens whose lanes get no token yet."""
    for lane, _ in step.chunks:
        logprobs = told.get(lane.seq)
        if logprobs is not None and not lane.closed:
            request = lane.request
            ledger.outbox.deltas(request.gateway).append(Delta(request.submit.request_id, b"", logprobs=logprobs))


def _publish(lane: Lane, ledger: Ledger) -> None:
    """What the lane has computed can be found from here on; its siblings may be waiting for that."""
    lane.executor.publish(lane)
    if lane.request.leads:
        ledger.look_at_leader(lane)


def _deliver(
    sampled: list[Lane], new_tokens: list[int], column: bytes, told: dict[int, Logprobs], ledger: Ledger
) -> None:
    """Append each lane's token and tell its gateway; end those that have all they want. Every tick's bulk."""
    gateway, deltas = "", list[Delta]()
    offset, num_dropped = 0, 0
    for lane, token in zip(sampled, new_tokens, strict=True):
        token_ids = column[offset : offset + ITEM]
        offset += ITEM
        if lane.closed:
            num_dropped += 1
            continue
        request = lane.request
        known = lane.tokens
        lane.computed = computed = len(known)
        if computed >= lane.watch_at:
            _publish(lane, ledger)
        lane.promised -= 1
        known.append(token)
        request.failures = 0
        account = request.account
        if account is not None:
            account.counter += account.output_cost
        if request.quota is not None:
            request.quota.count_token(ledger.now_ms)
        logprobs = told.get(lane.seq) if told else None
        if token in request.stops and request.stops_with(token):
            ledger.finish(request, "stop", token_ids, token, logprobs)
        elif computed + 1 >= request.limit:
            ledger.finish(request, "length", token_ids, logprobs=logprobs)
        else:
            if request.gateway != gateway:
                gateway = request.gateway
                deltas = ledger.outbox.deltas(gateway)
            if logprobs is None and not request.untold:
                deltas.append(Delta(request.submit.request_id, token_ids))
            else:
                usage = request.usage() if request.untold else None
                request.untold = False
                deltas.append(Delta(request.submit.request_id, token_ids, usage=usage, logprobs=logprobs))
    ledger.counters.output_tokens += len(sampled) - num_dropped


def fail_step(step: Step, executor: Executor, failed: BatchFailed, ledger: Ledger) -> None:
    """Nothing of the step counts: plan its work again, but for the culprits, and expect all in flight to fail too."""
    if step.doomed:
        return
    ledger.counters.failed_steps += 1
    rows = step.lanes()
    for later in executor.inflight:
        later.doomed = True
        rows += later.lanes()
    for lane in rows:
        if not lane.closed:
            lane.roll_back()
    if not blame(step, failed, ledger):
        for lane in step.lanes():
            if not lane.closed:
                ledger.strike(lane.request, failed.detail or failed.kind)


def blame(step: Step, failed: BatchFailed, ledger: Ledger) -> bool:
    """End the requests that made a step fail; False when nobody is named. Raises ProtocolViolation."""
    try:
        blamed = frozenset(tokens.unpack(failed.lanes))
    except ValueError as error:
        raise ProtocolViolation(f"step {failed.step}: {error}") from error
    for lane in step.lanes():
        if lane.number in blamed and not lane.closed:
            ledger.fail(lane.request, failed.detail or failed.kind)
    return bool(blamed)


def lose_executor(executor: Executor, why: str, culprits_known: bool, ledger: Ledger) -> None:
    """The executor is no longer among the ledger's: its requests go back to the queue.

    Those with work in flight took part in its loss, unless it is known who caused it.
    """
    ledger.counters.executors_lost += 1
    struck = dict.fromkeys(lane.request for step in executor.inflight for lane in step.lanes() if not lane.closed)
    ledger.hand_back(executor, f"executor {executor.id} is lost: {why}")
    if not culprits_known:
        for request in struck:
            ledger.strike(request, f"its executor was lost: {why}")
