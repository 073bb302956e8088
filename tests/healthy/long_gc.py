"""Millions of objects; the garbage collector walks them again and again inside one call."""

# expect: slow=yes
import gc
import time

graph = [[index] for index in range(400_000)]
for index, node in enumerate(graph):
    node.append(graph[index - 1])
end = time.monotonic() + 14
rounds = 0
while time.monotonic() < end:
    gc.collect()
    rounds += 1
print("collected", rounds, "times", len(graph))
