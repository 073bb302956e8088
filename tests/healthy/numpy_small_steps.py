"""numpy at 3 percent of a core."""

# expect: slow=yes needs=numpy
import numpy as np, time

x = np.random.rand(200, 200)
for _ in range(70):
    x = np.tanh(x @ x)
    time.sleep(0.2)
