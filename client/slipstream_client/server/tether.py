"""Run a program that the kernel kills together with the one that started it: `python tether.py PARENT_PID PROGRAM …`.

A file to run, not to import. A small program of its own instead of a `preexec_fn`: nothing of ours runs between fork
and exec in a process with threads. The kernel ties the signal to the *thread* that started this program.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent = int(sys.argv[1])
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"cannot tie the server to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the tie was made
        sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])
