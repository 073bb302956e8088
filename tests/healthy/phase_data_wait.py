"""A DataLoader whose worker needs a second for a batch."""

# expect: slow=yes says=data needs=torch
import time
from torch.utils.data import DataLoader, Dataset


class D(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        time.sleep(1)
        return i


if __name__ == "__main__":
    for b in DataLoader(D(), batch_size=1, num_workers=1):
        pass
