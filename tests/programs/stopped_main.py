"""The main process itself was stopped, as by Ctrl-Z or a debugger."""
# expect: verdict=PAUSED marker=HERE "says=paused (SIGSTOP)"

import os
import signal

print("training")
os.kill(os.getpid(), signal.SIGSTOP)  # HERE
