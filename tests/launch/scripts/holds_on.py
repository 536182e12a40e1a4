"""A rank with a loader worker that is stuck, a process of its own session and a forked pool; SIGTERM does nothing."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

how = sys.argv[1] if len(sys.argv) > 1 else "stubborn"
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
pool = multiprocessing.get_context("fork").Pool(1)
pool.apply(os.getpid)
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
time.sleep(600)
