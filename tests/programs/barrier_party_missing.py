"""Three parties expected, two come."""

# expect: slow=yes verdict=STUCK marker=HERE
import threading

b = threading.Barrier(3)
threading.Thread(target=b.wait, daemon=True).start()
print("syncing")
b.wait()  # HERE
