"""Workers of a DataLoader ask a server that accepts and says nothing."""
# expect: slow=yes verdict=STUCK|SUSPECT label=STUCK_CHILD marker=HERE also=THERE needs=torch

import socket

import torch
from torch.utils.data import DataLoader, Dataset

server = socket.create_server(("127.0.0.1", 0))


class Remote(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with socket.create_connection(server.getsockname()) as client:
            return torch.tensor(len(client.recv(10)))  # THERE


for batch in DataLoader(Remote(), batch_size=2, num_workers=2):  # HERE
    print(batch)
