"""The models that are trained, as plain nn.Modules. They know nothing of runs, memory plans or trainers."""
