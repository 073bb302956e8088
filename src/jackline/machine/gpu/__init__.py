"""GPUs as seen from outside a training. `watch` asks; `vendors/` has one module for each vendor."""
