"""Plain nn.Modules: what is trained. They know nothing of runs, memory plans or trainers."""
