"""What log files and TensorBoard files tell about a run."""
