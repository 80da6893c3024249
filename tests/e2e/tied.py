"""Becomes a command that is told to stop when its parent dies, however that dies: ``python tied.py COMMAND...``.

So no system outlives a test process that a timeout or an impatient Ctrl-C has ended before it could clean up. Linux
tells; elsewhere such a system has to be stopped by hand.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(sys.argv[1], sys.argv[1:])
