"""safetensors fills the disk."""
# expect: slow=yes cause=disk_full exit=1 cwd_on=tmpfs:3M marker=HERE needs=torch

import torch
from safetensors.torch import save_file

save_file({"weight": torch.randn(1 << 21)}, "model.safetensors")  # HERE
