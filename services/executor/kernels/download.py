"""A step's tokens on their way to the host: one copy into pinned memory, and an event to wait for it alone.

Called by ``sampling``. Whatever the device was given behind the copy goes on meanwhile.
"""

import contextlib

import torch
from torch import Tensor


class Download:
    """A copy that has begun. What lies on the host already is there at once."""

    def __init__(self, tensor: Tensor) -> None:
        """``tensor`` may be changed on the device afterwards, in the same stream: the copy comes first."""
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits sleeps
            self._event.record()

    @property
    def done(self) -> bool:
        """Whether it has arrived, or never will."""
        try:
            return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # told by ``read``
            return True

    def wait(self) -> None:
        """Return when it has arrived, or never will; from any thread."""
        if self._event is not None:
            with contextlib.suppress(RuntimeError):  # told by ``read``
                self._event.synchronize()

    def read(self) -> list[int]:
        """Wait for it. Raises RuntimeError when the device has failed."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._tensor.tolist()
        return numbers
