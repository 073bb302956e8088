"""A DataLoader worker hangs in its data set; the main process waits for the batch."""
# expect: verdict=STUCK label=STUCK_CHILD marker=HERE also=THERE needs=torch

import threading

from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 20:
            threading.Event().wait()  # THERE
        return index


if __name__ == "__main__":
    for batch in DataLoader(Images(), batch_size=4, num_workers=2):  # HERE
        print("batch", batch.tolist())
