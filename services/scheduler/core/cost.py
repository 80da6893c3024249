"""How long a step will take on one executor, learnt from the steps it ran. Pure arithmetic, the same in every process.

A step costs a base, so much a row, and so much a row and token of context it reads: 128 rows behind 8,000 tokens are
far dearer than 128 behind none. Fitted by least squares over an exponentially fading past, no coefficient below zero.
Steps with and without prefill fade apart: after an hour of decodes the price of a prefill is still known.
"""

FADE = 0.995
"""Weight of the past against each new step."""
FIRST_FIT = 32
"""Steps before anything is predicted."""
REFIT_EVERY = 16
ACCIDENT = 4.0
"""A step that takes more than so many times what is expected is counted as if it took just that: a machine that paused
is no property of a step, and one that has become slower is believed within a few fits. Nothing makes a step as many
times faster by accident: then what was learnt before is wrong."""
READ_UNIT = 1024.0
"""Reads are counted in thousands, which keeps the equations well-conditioned."""
RIDGE = 1e-9

_SUBSETS = [(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)]
Matrix = list[list[float]]


class Moments:
    """Sums over steps from which a least squares fit is made; older steps weigh less.

    Written out, because every step of every executor comes by: base, rows and reads are features 0, 1 and 2.
    """

    __slots__ = ("p00", "p01", "p02", "p11", "p12", "p22", "squares", "t0", "t1", "t2")

    def __init__(self) -> None:
        self.p00 = self.p01 = self.p02 = self.p11 = self.p12 = self.p22 = 0.0
        """Sums of products of two features."""
        self.t0 = self.t1 = self.t2 = 0.0
        """Sums of products of a feature and the time."""
        self.squares = 0.0
        """Sum of the times' squares."""

    def add(self, rows: float, reads: float, run_us: float) -> None:
        """Let the past fade a little and add one step."""
        self.p00 = self.p00 * FADE + 1.0
        self.p01 = self.p01 * FADE + rows
        self.p02 = self.p02 * FADE + reads
        self.p11 = self.p11 * FADE + rows * rows
        self.p12 = self.p12 * FADE + rows * reads
        self.p22 = self.p22 * FADE + reads * reads
        self.t0 = self.t0 * FADE + run_us
        self.t1 = self.t1 * FADE + rows * run_us
        self.t2 = self.t2 * FADE + reads * run_us
        self.squares = self.squares * FADE + run_us * run_us

    def forget(self) -> None:
        """What came before counts half."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) / 2)

    def sums(self) -> tuple[float, ...]:
        """All of them."""
        return tuple(getattr(self, name) for name in self.__slots__)


class StepCost:
    """Predicts the microseconds of a step; nothing (zero) before enough steps were measured."""

    __slots__ = ("_decodes", "_prefills", "base_us", "num_steps", "read_us", "recent_us", "row_us")

    def __init__(self) -> None:
        self.base_us = 0.0
        self.row_us = 0.0
        self.read_us = 0.0
        self.num_steps = 0
        self.recent_us = 0.0
        """Mean of the last steps."""
        self._decodes = Moments()
        self._prefills = Moments()

    @property
    def fitted(self) -> bool:
        """Whether predictions mean anything yet."""
        return self.num_steps >= FIRST_FIT

    def measure(self, rows: int, reads: int, run_us: int, prefill: bool) -> None:
        """Learn from one step: its rows, the sum of the contexts they read, its time, and whether it held a prefill."""
        moments = self._prefills if prefill else self._decodes
        expected_us = self.step_us(rows, reads)
        if expected_us > 0.0:
            if run_us * ACCIDENT < expected_us:
                moments.forget()
            run_us = min(run_us, round(ACCIDENT * expected_us))
        moments.add(float(rows), reads / READ_UNIT, float(run_us))
        self.num_steps += 1
        self.recent_us += (run_us - self.recent_us) / min(self.num_steps, REFIT_EVERY)
        if self.num_steps >= FIRST_FIT and self.num_steps % REFIT_EVERY == 0:
            self._fit()

    def step_us(self, rows: int, reads: int) -> float:
        """Predicted time of a whole step."""
        return self.base_us + self.chunk_us(rows, reads)

    def chunk_us(self, rows: int, reads: int) -> float:
        """Predicted time that ``rows`` more rows add to a step."""
        return rows * self.row_us + reads * self.read_us

    def budget_us(self, wanted_us: int) -> float:
        """What a step may take if it is to take ``wanted_us``: twice the base where that alone is more than half of it.

        Otherwise a large model would read its weights again for each block of a prompt.
        """
        return max(wanted_us, 2 * self.base_us)

    def most_rows(self, start: int, wanted: int, left_us: float) -> int:
        """Most rows, up to ``wanted``, from position ``start`` on that fit into ``left_us``."""
        if self.chunk_us(wanted, chunk_reads(start, wanted)) <= left_us:
            return wanted
        low, high = 0, wanted
        while high - low > 1:
            middle = (low + high) // 2
            if self.chunk_us(middle, chunk_reads(start, middle)) <= left_us:
                low = middle
            else:
                high = middle
        return low

    def _fit(self) -> None:
        """The best fit among those without a negative coefficient: with three features, try every subset."""
        pair = zip(self._decodes.sums(), self._prefills.sums(), strict=True)
        p00, p01, p02, p11, p12, p22, squares, *targets = (one + other for one, other in pair)
        products = [[p00, p01, p02], [p01, p11, p12], [p02, p12, p22]]
        best, best_error = [0.0, 0.0, 0.0], squares
        for subset in _SUBSETS:
            weights = _solve([[products[i][j] for j in subset] for i in subset], [targets[i] for i in subset])
            if weights is None or min(weights) < 0.0:
                continue
            error = squares - sum(weight * targets[i] for weight, i in zip(weights, subset, strict=True))
            if error < best_error:
                best, best_error = [0.0, 0.0, 0.0], error
                for weight, i in zip(weights, subset, strict=True):
                    best[i] = weight
            if len(subset) == 3:
                break  # no fit with fewer features is better than one with all
        self.base_us, self.row_us, self.read_us = best[0], best[1], best[2] / READ_UNIT


def chunk_reads(start: int, num_tokens: int) -> int:
    """Sum of the contexts that ``num_tokens`` rows from ``start`` on read, their own positions included."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def _solve(matrix: Matrix, targets: list[float]) -> list[float] | None:
    """Gaussian elimination of a small symmetric system; None when it is singular."""
    size = len(targets)
    rows = [[*row, target] for row, target in zip(matrix, targets, strict=True)]
    for i in range(size):
        rows[i][i] *= 1.0 + RIDGE
    for i in range(size):
        pivot = rows[i][i]
        if pivot <= 1e-12 * matrix[i][i] or pivot <= 0.0:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / pivot
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    weights = [0.0] * size
    for i in range(size - 1, -1, -1):
        known = sum(rows[i][j] * weights[j] for j in range(i + 1, size))
        weights[i] = (rows[i][size] - known) / rows[i][i]
    return weights
