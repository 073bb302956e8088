"""The checkpoint format on disk: names, manifest, headers, checksums. Torch-free."""
