"""The main process itself was stopped, as by Ctrl-Z or a debugger."""
# expect: verdict=STUCK|SUSPECT marker=HERE says=stopped

import os
import signal

print("training")
os.kill(os.getpid(), signal.SIGSTOP)  # HERE
