"""What happens before the first step: imports, precision, compilation, model size."""
