"""GPUs as seen from outside a training. `watch` reads them; `vendors/` has one module for each vendor."""
