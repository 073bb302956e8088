"""The parent has computed with the threads of OpenMP; a forked child computes too and never comes back."""
# expect: slow=yes verdict=STUCK label=STUCK_CHILD marker=HERE also=THERE needs=torch says="a fork does not take the threads"

import multiprocessing

import torch


def embed(queue):
    matrix = torch.randn(3000, 300)
    queue.put((matrix @ matrix.T).sum().item())  # THERE


if __name__ == "__main__":
    torch.set_num_threads(2)
    matrix = torch.randn(2000, 2000)
    print("warm-up", (matrix @ matrix).mean().item())
    forking = multiprocessing.get_context("fork")
    queue = forking.Queue()
    forking.Process(target=embed, args=(queue,)).start()
    print(queue.get())  # HERE
