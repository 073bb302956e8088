"""signal.pause with nobody to signal."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE
import signal

print("ready")
signal.pause()  # HERE
