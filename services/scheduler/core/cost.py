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
READ_UNIT = 1024.0
"""Reads are counted in thousands, which keeps the equations well-conditioned."""
RIDGE = 1e-9

_SUBSETS = [(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)]
Matrix = list[list[float]]


class Moments:
    """Sums over steps from which a least squares fit is made; older steps weigh less."""

    __slots__ = ("products", "squares", "targets")

    def __init__(self) -> None:
        self.products: Matrix = [[0.0] * 3 for _ in range(3)]
        self.targets = [0.0] * 3
        self.squares = 0.0

    def add(self, features: tuple[float, float, float], run_us: int) -> None:
        """Let the past fade a little and add one step."""
        for i, one in enumerate(features):
            row = self.products[i]
            for j, other in enumerate(features):
                row[j] = row[j] * FADE + one * other
            self.targets[i] = self.targets[i] * FADE + one * run_us
        self.squares = self.squares * FADE + float(run_us) * run_us


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
        moments.add((1.0, float(rows), reads / READ_UNIT), run_us)
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
        pair = (self._decodes, self._prefills)
        products = [[sum(one.products[i][j] for one in pair) for j in range(3)] for i in range(3)]
        targets = [sum(one.targets[i] for one in pair) for i in range(3)]
        squares = sum(one.squares for one in pair)
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
