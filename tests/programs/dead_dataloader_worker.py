"""A DataLoader worker is killed; torch tells the main process, which dies of it."""
# expect: cause=worker_killed exit=1 marker=HERE needs=torch

import os
import signal
import time

from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 20:
            time.sleep(1)  # until the batches before this one have arrived: their memory is fetched from this process
            os.kill(os.getpid(), signal.SIGKILL)
        return index


if __name__ == "__main__":
    for batch in DataLoader(Images(), batch_size=4, num_workers=1):  # HERE
        print("batch", batch.tolist())
