"""The half of a shell pipeline that hangs: `python pipeline.py | tee log`."""
# expect: verdict=STUCK marker=HERE out="through the pipe" command="sh -c '{python} {program} | tee log.txt'"

import threading

print("through the pipe")
threading.Event().wait()  # HERE
